"""Transfers in the native helper's threads: submitted from the event loop, completed through a descriptor.

Between two turns an event loop looks at its descriptors, and gives the interpreter lock away for that.
Beside an engine that computes it waits up to a switch interval until it has the lock again. So there is
one turn for a batch and not two: the waiter resumes synchronously inside the completion callback.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
from array import array
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import anyio

from kvtier import native
from kvtier.tiers.fs.files.call import FileCall, Verb
from kvtier.tiers.fs.files.index import Index

PART_BYTES: Final = 256 * 1024
"""What a thread takes at once: a part costs a lock and a wake-up, microseconds."""

_ENDED_AT_ONCE: Final = 64


class ImmediateFuture(asyncio.Future[None]):
    """A future whose waiter resumes within the call of ``finish``, not at the event loop's next turn.

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
        """See ``asyncio.Future.cancel``: the waiter hears of it at the next turn, as always."""
        is_cancelled = super().cancel(msg)
        if is_cancelled and self._waiter is not None:
            fn, context = self._waiter
            super().add_done_callback(fn, context=context)
        return is_cancelled

    def finish(self) -> None:
        """End it, and resume the waiter now."""
        if self.done():
            return
        self.set_result(None)
        if self._waiter is not None:
            fn, context = self._waiter
            (context or contextvars.copy_context()).run(fn, self)


class _Transfer:
    """A put or a get in the native pool. It keeps the call's memory until the pool has done with it."""

    def __init__(self, call: FileCall) -> None:
        self._call = call
        self._waiters: list[ImmediateFuture] = []
        self.added: int | None = None

    async def end(self) -> asyncio.CancelledError | None:
        """Wait for its end, whatever happens. Returns the cancellation that came meanwhile; it stops it."""
        try:
            await self._wait()
            return None
        except asyncio.CancelledError as cancelled:
            self._call.stop.set()
            # The scope keeps anyio from cancelling again and again, the loop bears Task.cancel().
            with anyio.CancelScope(shield=True):
                while self.added is None:
                    with suppress(asyncio.CancelledError):
                        await self._wait()
            return cancelled

    def complete(self, added: int) -> None:
        """Note that it has ended. Waiters resume before this returns."""
        self.added = added
        for waiter in self._waiters:
            waiter.finish()

    async def _wait(self) -> None:
        if self.added is None:
            waiter = ImmediateFuture()
            self._waiters.append(waiter)
            await waiter


class NativePool:
    """The native helper's threads, which put and get chunks. Made in the event loop.

    Args:
        library: ``kvtier.native.library``, not None.
        readers: threads that prefer gets.
        writers: threads that prefer puts.

    Raises:
        OSError: the threads cannot be had.
        NotImplementedError: the event loop cannot watch a descriptor.
    """

    def __init__(self, library: ctypes.CDLL, readers: int, writers: int) -> None:
        assert native.holding is not None
        self._library, self._holding = library, native.holding
        self._work = {
            Verb.PUT: ctypes.cast(library.kvt_files_put, ctypes.c_void_p),
            Verb.GET: ctypes.cast(library.kvt_files_get, ctypes.c_void_p),
        }
        self._tokens = count(1)
        self._begun: dict[int, _Transfer] = {}
        self._loop = asyncio.get_running_loop()
        self._address = library.kvt_pool_open(readers, writers)
        if not self._address:
            raise OSError("no threads for the native helper's pool")
        self._fd = int(library.kvt_pool_fd(self._address))
        try:
            self._loop.add_reader(self._fd, self._on_readable)
        except NotImplementedError:
            library.kvt_pool_close(self._address)
            raise

    async def transfer(
        self, call: FileCall, verb: Verb, end: int, index: Index
    ) -> tuple[int, asyncio.CancelledError | None]:
        """Put or get the call's first ``end`` chunks, at least one, whatever happens meanwhile.

        Chunks that are there may be noted in ``index``: ``call.is_noted`` says whether they are.

        Returns:
            The bytes that a put has added to the file system, and the cancellation to be raised.

        Raises:
            MemoryError: there is none for it.
        """
        call.note_in(index)
        token, transfer = next(self._tokens), _Transfer(call)
        part = max(1, PART_BYTES // call.place.chunk_bytes)
        self._begun[token] = transfer
        submit = self._holding.kvt_pool_submit
        if submit(self._address, self._work[verb], call.address, end, part, verb is Verb.GET, token):
            del self._begun[token]
            raise MemoryError("no memory for a task of the native helper's pool")
        cancelled = await transfer.end()
        return transfer.added or 0, cancelled

    async def drain(self) -> asyncio.CancelledError | None:
        """Wait for the end of all that was begun. Returns the cancellation that came meanwhile."""
        cancelled = None
        for transfer in tuple(self._begun.values()):
            cancelled = await transfer.end() or cancelled
        self._loop.remove_reader(self._fd)
        return cancelled

    def close(self) -> None:
        """End the threads when all is done. Blocks."""
        self._library.kvt_pool_close(self._address)

    def _on_readable(self) -> None:
        tokens, sums = array("Q", bytes(8 * _ENDED_AT_ONCE)), array("q", bytes(8 * _ENDED_AT_ONCE))
        ended: list[tuple[_Transfer, int]] = []
        found = _ENDED_AT_ONCE
        while found == _ENDED_AT_ONCE:
            take = self._holding.kvt_pool_ended
            found = take(self._address, tokens.buffer_info()[0], sums.buffer_info()[0], _ENDED_AT_ONCE)
            ended += [(self._begun.pop(tokens[i]), sums[i]) for i in range(found)]
        self._complete(ended)

    def _complete(self, ended: list[tuple[_Transfer, int]]) -> None:
        try:
            while ended:
                transfer, added = ended.pop()
                transfer.complete(added)
        finally:
            if ended:  # a waiter ends the process: the others resume all the same
                self._loop.call_soon(self._complete, ended)
