"""An epoch in use by an opener: the place of its chunks, the index of known ones, and its lock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvtier.keys import OffloadKey
from kvtier.tiers.fs._files import chunk_files
from kvtier.tiers.fs._files.call import GONE, THERE, FileCall, Place, StopFlag
from kvtier.tiers.fs._files.index import Index
from kvtier.tiers.fs._layout import PART, names_in
from kvtier.tiers.fs._locks import close_lock

_FRESH_MARKS: Final = 65_536
_MANY_MARKS: Final = 64
_MAX_GONE: Final = 65_536
_BREATH_S: Final = 0.001


class Epoch:
    """An epoch in use. Transfers that begin before a reset update their own epoch, not the next.

    Attributes:
        index: the chunks that are known to exist: those that were met, and those that were listed.
        listed: how many there were when the epoch was listed last; -1 before.
    """

    def __init__(self, number: int, place: Place, lock_fd: int | None) -> None:
        self.number = number
        self.place = place
        self.index = Index()
        self.listed = -1
        self._gone: deque[OffloadKey] = deque(maxlen=_MAX_GONE)
        self._lock_fd = lock_fd
        self._holds = 0
        self._retired = False

    # ----------------------------------------------------------------------- in the event loop only

    @contextmanager
    def hold(self) -> Iterator[Epoch]:
        """Keep the epoch's files from being swept."""
        self._holds += 1
        try:
            yield self
        finally:
            self._holds -= 1
            self._release_unused()

    def retire(self) -> None:
        """Give the epoch up as soon as no transfer holds it."""
        self._retired = True
        self._release_unused()

    def _release_unused(self) -> None:
        if self._retired and not self._holds and self._lock_fd is not None:
            close_lock(self._lock_fd)
            self._lock_fd = None

    # ------------------------------------------------------------------------------ in any thread

    def learn(self, call: FileCall) -> Sequence[OffloadKey]:
        """Note which chunks of a call are gone. Returns those that are there, which the pool has noted."""
        if not any(call.results):
            return call.keys
        found = list(zip(call.keys, call.results, strict=True))
        self.forget([key for key, result in found if result in GONE])
        return [key for key, result in found if result in THERE]

    def forget(self, gone: Sequence[OffloadKey]) -> None:
        """Note that chunks are gone."""
        if gone:
            self._gone.extend(gone)  # before: a list may be about to bring them back
            self.index.discard(gone)

    def list(self, stop: StopFlag) -> None:
        """List the chunks, the first time and when many of the index may be gone. Blocks.

        Raises OSError in the end if a directory cannot be read: its chunks are looked up on the disk.
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
            index.discard(tuple(self._gone))  # those that left since they were listed
            if len(marks) > _MANY_MARKS:
                time.sleep(_BREATH_S)  # an engine that computes wants the interpreter as well
        self.index, self.listed = index, len(index)
        if unread:
            raise OSError(unread[0].errno, f"{len(unread)} directories cannot be read", unread[0].filename)
