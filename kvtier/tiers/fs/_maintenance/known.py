"""Which chunks of an epoch an opener knows to exist: those that it met, and those that it has listed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvtier.keys import OffloadKey
from kvtier.tiers.fs._files import chunk_files
from kvtier.tiers.fs._files.call import GONE, THERE, FileCall, Place, StopFlag
from kvtier.tiers.fs._files.index import Index
from kvtier.tiers.fs._layout import PART
from kvtier.tiers.fs._namespace import Namespace

_FRESH_MARKS: Final = 65_536
_MANY_MARKS: Final = 64
_MAX_GONE: Final = 65_536
_BREATH_S: Final = 0.001


class KnownChunks:
    """The known chunks of one epoch. What began before a reset learns for its own epoch, not for the next."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.index = Index()
        self.listed = -1  # how many there were when the epoch was listed last
        self._gone: deque[OffloadKey] = deque(maxlen=_MAX_GONE)

    def learn(self, call: FileCall) -> Sequence[OffloadKey]:
        """Note which chunks of a call are gone. Returns those that are there, which the pool has noted."""
        if not any(call.results):
            return call.keys
        found = list(zip(call.keys, call.results, strict=True))
        self.forget([key for key, result in found if result in GONE])
        return [key for key, result in found if result in THERE]

    def forget(self, gone: Sequence[OffloadKey]) -> None:
        """Note that chunks are gone. Any thread may call it."""
        if gone:
            self._gone.extend(gone)  # before: a list may be about to bring them back
            self.index.discard(gone)

    def list(self, namespace: Namespace, stop: StopFlag) -> None:
        """List the chunks, the first time and when many of the index may be gone. Blocks. OSError."""
        index = self.index
        if self.listed >= 0:
            if len(index) <= 2 * self.listed + _FRESH_MARKS:
                return
            index = Index()
        for part in filter(PART.fullmatch, namespace.names(self.place.data_dir)):
            self._gone.clear()
            marks = chunk_files.fingerprints(self.place, part, stop)
            index.add_listed(marks)
            index.discard(tuple(self._gone))  # what has left since it was listed
            if len(marks) > _MANY_MARKS:
                time.sleep(_BREATH_S)  # an engine that computes wants the interpreter as well
        self.index, self.listed = index, len(index)
