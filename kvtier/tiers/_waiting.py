"""Waiting until a transfer has really ended, even when cancelled, and wake-ups from other threads.

A thread, and most client libraries, continue a transfer after its awaiting task was cancelled, for example by
``asyncio.timeout``. Its slot then belongs to another chunk: a late put would store that chunk's bytes, and a
late get would overwrite them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from kvtier._log import GuardedLogger

logger = GuardedLogger("kvtier.tiers")
T = TypeVar("T")


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Schedule a callback on a loop, from any thread; drop it if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        logger.debug("the event loop of a waiter is closed")


async def wait_for_end(
    future: asyncio.Future[Any], on_cancel: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait until ``future`` is done, even if the task is cancelled meanwhile.

    A shielded scope alone does not suffice: ``asyncio.timeout`` calls ``Task.cancel``, which passes it.

    Args:
        future: the future to wait for; it is not cancelled.
        on_cancel: callback at the first cancellation, to end the work sooner.

    Returns:
        The cancellation, for the caller to raise after its clean-up; None if there was none.
    """
    try:
        await asyncio.wait((future,))
        return None
    except asyncio.CancelledError as error:
        cancelled = error
    if on_cancel is not None:
        on_cancel()
    with anyio.CancelScope(shield=True):  # Otherwise anyio would cancel again at each turn of the loop.
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((future,))
    if not future.cancelled():
        future.exception()  # Otherwise asyncio would log that it was never retrieved.
    return cancelled


async def until_done(work: Awaitable[T]) -> T:
    """Return the result of a future or coroutine, but only when it has ended, even if cancelled.

    Raises:
        BaseException: the exception of the work, or a cancellation in the meantime.
    """
    future = asyncio.ensure_future(work)
    cancelled = await wait_for_end(future)
    if cancelled is not None:
        raise cancelled
    return future.result()


async def in_thread(
    function: Callable[..., T], *arguments: object, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """Return the result of a blocking function in a worker thread, but only when it has returned.

    A call that is cancelled while it waits for ``limiter`` never starts. Default: the loop's shared limiter.

    Raises:
        BaseException: the exception of the function, or a cancellation in the meantime.
    """
    limiter = limiter or anyio.to_thread.current_default_thread_limiter()
    turn = object()
    try:
        limiter.acquire_on_behalf_of_nowait(turn)
    except anyio.WouldBlock:
        await limiter.acquire_on_behalf_of(turn)
    try:
        call = partial(function, *arguments)
        return await until_done(anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1)))
    finally:
        limiter.release_on_behalf_of(turn)
