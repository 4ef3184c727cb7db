"""For authors of tiers: wait until what moves bytes has truly ended, however often that is cancelled.

Most clients and every thread go on with a transfer after the task that awaited it was cancelled, and
``asyncio.timeout`` cancels, too. Meanwhile the slot belongs to another chunk: a put then keeps bytes
that nobody put, a get writes into bytes that are not its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

T = TypeVar("T")


async def until_done(work: Awaitable[T]) -> T:
    """Wait for the end of what cannot be stopped, however often the task is cancelled meanwhile.

    A shielded scope alone is not enough: it does not hold off ``Task.cancel``, which is what
    ``asyncio.timeout`` does.

    Args:
        work: a future, or a coroutine, which then runs in a task of its own.

    Raises:
        BaseException: what the work has raised, or the cancellation that came meanwhile.
    """
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError as error:
                cancelled = error
    if not future.cancelled():
        future.exception()  # looked at, or asyncio complains where the cancellation is raised instead
    if cancelled is not None:
        raise cancelled
    await anyio.lowlevel.checkpoint_if_cancelled()
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


__all__ = ["in_thread", "until_done"]
