"""Work that the native helper's threads do, begun and ended in the event loop without a thread of Python's.

Between two turns an event loop looks at its descriptors, and gives the interpreter lock away for that.
Beside an engine that computes it waits up to a switch interval until it has the lock again. So there is
one turn for a batch and not two: who waits for it goes on within the call that learns of its end.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import anyio

from kvtier.tiers.fs.call import FileCall, FileWork, Verb


class Prompt(asyncio.Future[None]):
    """A future whose waiter goes on within the call that ends it, not at the event loop's next turn.

    One task waits for it. ``finish`` is called by the loop, in no task.
    """

    _waiter: tuple[Callable[[Any], object], contextvars.Context | None] | None = None

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: contextvars.Context | None = None
    ) -> None:
        """See ``asyncio.Future.add_done_callback``."""
        if self.done() or self._waiter is not None:
            super().add_done_callback(fn, context=context)
        else:
            self._waiter = fn, context

    def cancel(self, msg: Any | None = None) -> bool:
        """See ``asyncio.Future.cancel``: who waits hears of it at the next turn, as always."""
        is_cancelled = super().cancel(msg)
        if is_cancelled and self._waiter is not None:
            fn, context = self._waiter
            super().add_done_callback(fn, context=context)
        return is_cancelled

    def finish(self) -> None:
        """End it, and have who waits go on now."""
        if self.done():
            return
        self.set_result(None)
        if self._waiter is not None:
            fn, context = self._waiter
            (context or contextvars.copy_context()).run(fn, self)


class Begun:
    """Work that the helper's pool does, from ``Bell.begin`` to its end.

    Attributes:
        call: what is done; its memory stays until the pool has done with it.
        total: what the work has returned; None until it has ended.
    """

    def __init__(self, call: FileCall) -> None:
        self.call = call
        self.total: int | None = None
        self._waiters: list[Prompt] = []

    async def end(self) -> asyncio.CancelledError | None:
        """Wait for its end, whatever happens. Returns the cancellation that came meanwhile; it stops it."""
        try:
            await self._wait()
            return None
        except asyncio.CancelledError as cancelled:
            self.call.stop.set()
            # The scope keeps anyio from cancelling again and again, the loop bears Task.cancel().
            with anyio.CancelScope(shield=True):
                while self.total is None:
                    with suppress(asyncio.CancelledError):
                        await self._wait()
            return cancelled

    def tell(self, total: int) -> None:
        """Say that it has ended. Who waits goes on before this returns."""
        self.total = total
        for waiter in self._waiters:
            waiter.finish()

    async def _wait(self) -> None:
        if self.total is None:
            waiter = Prompt()
            self._waiters.append(waiter)
            await waiter


class Bell:
    """Begins work in the helper's pool, and learns of its end in the event loop.

    Args:
        work: what does the work.
        pool: what ``work.open_pool`` gave, not 0.

    Raises:
        NotImplementedError: the event loop cannot watch a descriptor.
    """

    def __init__(self, work: FileWork, pool: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._pool = pool
        self._tokens = count(1)
        self._begun: dict[int, Begun] = {}
        self._loop.add_reader(work.pool_fd(pool), self._ring)

    def begin(self, call: FileCall, verb: Verb) -> Begun | None:
        """Begin a put or a get of all chunks. None: it cannot be begun here."""
        token, begun = next(self._tokens), Begun(call)
        self._begun[token] = begun
        if self._work.begin(call, verb, token):
            return begun
        del self._begun[token]
        return None

    async def silence(self) -> asyncio.CancelledError | None:
        """Wait for the end of all that was begun, and listen no more. Returns a cancellation meanwhile."""
        cancelled = None
        for begun in tuple(self._begun.values()):
            cancelled = await begun.end() or cancelled
        self._loop.remove_reader(self._work.pool_fd(self._pool))
        return cancelled

    def _ring(self) -> None:
        ended = [(self._begun.pop(token), total) for token, total in self._work.ended(self._pool)]
        self._tell(ended)

    def _tell(self, ended: list[tuple[Begun, int]]) -> None:
        try:
            while ended:
                begun, total = ended.pop()
                begun.tell(total)
        finally:
            if ended:  # somebody ends the process: the others are told all the same
                self._loop.call_soon(self._tell, ended)
