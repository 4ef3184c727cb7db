"""Runs calls of the event loop in the native library's threads; a descriptor reports their end."""

from __future__ import annotations

import asyncio
import ctypes
import errno
from array import array
from itertools import count
from typing import Final, NamedTuple

from kvtier import _native as native
from kvtier.errors import StateError
from kvtier.tiers._waiting import wait_for_end
from kvtier.tiers.fs._files.chunk_files import require_library
from kvtier.tiers.fs._files.index import Index
from kvtier.tiers.fs._files.native_call import FileCall, Verb

# Bytes in one turn of a thread. Smaller turns cost more locking and wake-ups.
_PART_BYTES: Final = 256 * 1024
_QUEUES: Final = {Verb.PUT: 0, Verb.GET: 1, Verb.CONTAINS: 2}
"""See ``kvt_pool_submit``. Look-ups go first: they take microseconds, and a get or put may follow."""

_LOOKUPS_A_PART: Final = 64
_ENDED_AT_ONCE: Final = 64


class _Task(NamedTuple):
    """A call in the native pool, which keeps the call's memory alive until it has ended."""

    call: FileCall
    ended: asyncio.Future[None]
    waiter: asyncio.Future[None]  # The caller awaits this. A cancellation ends it.


class NativePool:
    """The native library's threads, which put, get and look up chunks. Create it in the event loop.

    ``readers`` prefer gets and look-ups, ``writers`` puts. OSError if the threads cannot start.
    """

    def __init__(self, readers: int, writers: int) -> None:
        assert native.holding is not None
        library, self._holding = require_library(), native.holding
        self._library = library
        self._work = {verb: ctypes.cast(getattr(library, verb.value), ctypes.c_void_p) for verb in Verb}
        self._tokens = count(1)
        self._begun: dict[int, _Task] = {}
        self._is_closing = False
        self._loop = asyncio.get_running_loop()
        self._address = library.kvt_pool_open(readers, writers)
        if not self._address:
            raise OSError(errno.EAGAIN, "the threads of the native pool cannot be started")
        self._fd = int(library.kvt_pool_fd(self._address))
        self._loop.add_reader(self._fd, self._on_readable)

    async def run(self, call: FileCall, verb: Verb, index: Index) -> None:
        """Put, get or look up at least one chunk. Return or raise a cancellation only at its real end.

        Adds found chunks to ``index``. MemoryError if out of memory, StateError while closing.
        """
        if self._is_closing:
            raise StateError("the file tier is closing")
        call.note_in(index)
        token, task = next(self._tokens), _Task(call, self._loop.create_future(), self._loop.create_future())
        part = _LOOKUPS_A_PART if verb is Verb.CONTAINS else max(1, _PART_BYTES // call.place.chunk_bytes)
        self._begun[token] = task
        submit, queue = self._holding.kvt_pool_submit, _QUEUES[verb]
        if submit(self._address, self._work[verb], call.address, len(call), part, queue, token):
            del self._begun[token]
            raise MemoryError("no memory for a task of the native pool")
        # Not wait_for_end: its asyncio.wait takes one more turn of the loop, some 8 % of a small get.
        try:
            await task.waiter
        except asyncio.CancelledError:
            call.stop.set()
            await wait_for_end(task.ended)
            raise

    async def drain(self) -> None:
        """Refuse new calls and wait for those in flight; then raise a cancellation."""
        self._is_closing, cancelled = True, None
        for task in tuple(self._begun.values()):
            cancelled = await wait_for_end(task.ended, task.call.stop.set) or cancelled
        self._loop.remove_reader(self._fd)
        if cancelled is not None:
            raise cancelled

    def close(self) -> None:
        """End the threads after ``drain``. Blocks."""
        self._library.kvt_pool_close(self._address)

    def _on_readable(self) -> None:
        tokens, sums = array("Q", bytes(8 * _ENDED_AT_ONCE)), array("q", bytes(8 * _ENDED_AT_ONCE))
        found = _ENDED_AT_ONCE
        while found == _ENDED_AT_ONCE:
            take = self._holding.kvt_pool_ended
            found = take(self._address, tokens.buffer_info()[0], sums.buffer_info()[0], _ENDED_AT_ONCE)
            for i in range(found):
                task = self._begun.pop(tokens[i])
                task.call.added = sums[i]
                task.ended.set_result(None)
                if not task.waiter.done():
                    task.waiter.set_result(None)
