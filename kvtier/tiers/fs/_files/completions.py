"""Transfers in the native helper's threads: submitted from the event loop, completed through a descriptor."""

from __future__ import annotations

import asyncio
import ctypes
from array import array
from itertools import count
from typing import Final

from kvtier import _native as native
from kvtier.tiers._drain import wait_for_end
from kvtier.tiers.fs._files.call import FileCall, Verb
from kvtier.tiers.fs._files.index import Index

PART_BYTES: Final = 256 * 1024
"""What a thread takes at once: a part costs a lock and a wake-up, microseconds."""

_ENDED_AT_ONCE: Final = 64


class _Transfer:
    """A put or a get in the native pool. It keeps the call's memory until the pool has done with it."""

    def __init__(self, call: FileCall) -> None:
        self.added = 0
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._waiters: list[asyncio.Future[None]] = []

    async def end(self) -> asyncio.CancelledError | None:
        """Wait for its end, whatever happens. Returns the cancellation that came meanwhile; it stops it."""
        if self._ended.done():
            return None
        # Not wait_for_end at once: asyncio.wait takes one turn of the loop more, some 8 % of a small get.
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
            return None
        except asyncio.CancelledError as cancelled:
            self._call.stop.set()
            await wait_for_end(self._ended)
            return cancelled

    def complete(self, added: int) -> None:
        """Note that it has ended."""
        self.added = added
        for future in (self._ended, *self._waiters):
            if not future.done():
                future.set_result(None)


class NativePool:
    """The native helper's threads, which put and get chunks. Made in the event loop.

    Args:
        library: ``kvtier._native.library``, not None.
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
        self, call: FileCall, verb: Verb, index: Index
    ) -> tuple[int, asyncio.CancelledError | None]:
        """Put or get chunks, at least one, whatever happens meanwhile.

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
        if submit(self._address, self._work[verb], call.address, len(call), part, verb is Verb.GET, token):
            del self._begun[token]
            raise MemoryError("no memory for a task of the native helper's pool")
        cancelled = await transfer.end()
        return transfer.added, cancelled

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
        found = _ENDED_AT_ONCE
        while found == _ENDED_AT_ONCE:
            take = self._holding.kvt_pool_ended
            found = take(self._address, tokens.buffer_info()[0], sums.buffer_info()[0], _ENDED_AT_ONCE)
            for i in range(found):
                self._begun.pop(tokens[i]).complete(sums[i])
