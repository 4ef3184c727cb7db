"""For authors of tiers: wait until what moves bytes has truly ended, however often that is cancelled.

Most clients and every thread go on with a transfer after the task that awaited it was cancelled, and
``asyncio.timeout`` cancels, too. Meanwhile the slot belongs to another chunk: a put then keeps bytes
that nobody put, a get writes into bytes that are not its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


async def wait_for_end(
    future: asyncio.Future[Any], on_cancel: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait until ``future`` is done, however often the task is cancelled meanwhile.

    A shielded scope alone is not enough: it does not hold off ``Task.cancel``, which is what
    ``asyncio.timeout`` does.

    Args:
        future: what is waited for; it is not cancelled.
        on_cancel: called at the first cancellation, to have the work end sooner.

    Returns:
        The cancellation that came meanwhile, to be raised when the caller has tidied up; or None.
    """
    try:
        await asyncio.wait((future,))
        return None
    except asyncio.CancelledError as error:
        cancelled = error
    if on_cancel is not None:
        on_cancel()
    with anyio.CancelScope(shield=True):  # or anyio cancels again at each turn of the loop
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((future,))
    if not future.cancelled():
        future.exception()  # looked at: asyncio complains where the cancellation is raised in its place
    return cancelled


async def until_done(work: Awaitable[T]) -> T:
    """Return the result of what cannot be stopped, at its true end. See ``wait_for_end``.

    Args:
        work: a future, or a coroutine, which then runs in a task of its own.

    Raises:
        BaseException: what the work has raised, or the cancellation that came meanwhile.
    """
    future = asyncio.ensure_future(work)
    cancelled = await wait_for_end(future)
    if cancelled is not None:
        raise cancelled
    return future.result()


async def in_thread(
    function: Callable[..., T], *arguments: object, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """Call a function that blocks in a worker thread, and wait until it has returned.

    Args:
        function: what is called.
        arguments: its arguments.
        limiter: bounds how many such calls run at once; by default all of the loop share one.

    Raises:
        BaseException: what the function has raised, or the cancellation that came meanwhile.
    """
    call = partial(function, *arguments)
    return await until_done(anyio.to_thread.run_sync(call, limiter=limiter))


__all__ = ["in_thread", "until_done", "wait_for_end"]
