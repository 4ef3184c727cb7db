"""An epoch that a tier has open: the place of its chunks, the index of known ones, and its lock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvtier.keys import OffloadKey
from kvtier.tiers.fs._files import chunk_files
from kvtier.tiers.fs._files.index import Index
from kvtier.tiers.fs._files.native_call import GONE, THERE, FileCall, Place, StopFlag
from kvtier.tiers.fs._layout import PART, names_in
from kvtier.tiers.fs._locks import close_lock

_FRESH_MARKS: Final = 65_536
_MANY_MARKS: Final = 64
_MAX_GONE: Final = 65_536
_BREATH_S: Final = 0.001


class OpenEpoch:
    """An epoch that a tier has open. Transfers from before a reset update their own epoch, not the next."""

    def __init__(self, number: int, place: Place, lock_fd: int | None) -> None:
        self.number = number
        self.place = place
        self.index = Index()  # chunks known to exist, from transfers and from listing
        self.listed = -1  # number of chunks in the last listing; -1 before the first
        self._gone: deque[OffloadKey] = deque(maxlen=_MAX_GONE)
        self._lock_fd = lock_fd
        self._holds = 0
        self._retired = False

    # In the event loop only:

    @contextmanager
    def hold(self) -> Iterator[OpenEpoch]:
        """Protect the epoch's files from sweeps."""
        self._holds += 1
        try:
            yield self
        finally:
            self._holds -= 1
            self._release_unused()

    def retire(self) -> None:
        """Release the epoch when no transfer holds it."""
        self._retired = True
        self._release_unused()

    def _release_unused(self) -> None:
        if self._retired and not self._holds and self._lock_fd is not None:
            close_lock(self._lock_fd)
            self._lock_fd = None

    # In any thread:

    def learn(self, call: FileCall) -> Sequence[OffloadKey]:
        """Forget the chunks that a call did not find. Return those found, which the pool has indexed."""
        if not any(call.results):
            return call.keys
        found = list(zip(call.keys, call.results, strict=True))
        self.forget([key for key, result in found if result in GONE])
        return [key for key, result in found if result in THERE]

    def forget(self, gone: Sequence[OffloadKey]) -> None:
        if gone:
            self._gone.extend(gone)  # First, because a listing in progress may add them again.
            self.index.discard(gone)

    def list(self, stop: StopFlag) -> None:
        """List the chunks, the first time and when much of the index may be stale. Blocks.

        At its end it raises OSError if a directory could not be read; its chunks are looked up on the disk.
        """
        index = self.index
        if self.listed >= 0:
            if len(index) <= 2 * self.listed + _FRESH_MARKS:
                return
            index = Index()
        unread: list[OSError] = []
        for part in filter(PART.fullmatch, names_in(self.place.root_fd, self.place.data_dir, follow=True)):
            self._gone.clear()
            try:
                marks = chunk_files.fingerprints(self.place, part, stop)
            except OSError as error:
                if stop:
                    raise
                unread.append(error)
                continue
            index.add_listed(marks)
            index.discard(tuple(self._gone))  # chunks that were removed since the listing
            if len(marks) > _MANY_MARKS:
                time.sleep(_BREATH_S)  # yields the interpreter lock to the engine
        self.index, self.listed = index, len(index)
        if unread:
            raise OSError(unread[0].errno, f"{len(unread)} directories cannot be read", unread[0].filename)
