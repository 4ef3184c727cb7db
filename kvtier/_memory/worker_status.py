"""A table in shared memory for workers' reports to their scheduler that the engine's messages lack.

Each worker writes its own row; the scheduler reads all rows in each step. A row has some numbers, then a byte
for each slot: a mark if the worker's store did not fill the slot. A worker sets a mark before the engine
learns that the store has ended, and the scheduler clears the mark when it reads it. The slot is not reused
before, so they never write a mark at the same time. A number is eight aligned bytes, written at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import product
from operator import itemgetter

_WORD_BYTES = 8
_ROW_ALIGNMENT = 128


class StatusField(IntEnum):
    """The numbers of a row; each starts as 0."""

    STORES_REPEATED = 0
    STORES_DROPPED = 1
    LOADS_REPEATED = 2
    LOADS_STAGED = 3
    LOADS_RECOMPUTED = 4
    MARKED = 5  # slots marked in total
    LOST = 6  # 1 once the device is lost
    PINNED_BYTES = 7
    PINNING_FAILED = 8  # 1 once nothing more can be pinned
    NODE = 9  # NUMA node of the worker's device, counted from 1; 0 if unknown
    AUDITED = 10  # chunks
    AUDITS_FAILED = 11  # audited chunks that were damaged
    STOPPED_MS = 12  # start of the worker's shutdown on the clock of ``time.monotonic``; 0 before
    PAGES = 13  # number for the page layout of the worker's attention backends; 0 if still unknown
    OPENED = 14  # 1 once the worker has opened the region


# Read in each step, or for each store.
_marked = itemgetter(StatusField.MARKED)
_is_lost = itemgetter(StatusField.LOST)
_failed_audits = itemgetter(StatusField.AUDITS_FAILED)


class Unfilled(IntEnum):
    """Why a store did not fill a slot; the names in lower case are ``reasons.DROPPED``."""

    FAILED = 1
    INCOMPLETE = 2
    CHANGED = 3


_WORDS_BYTES = len(StatusField) * _WORD_BYTES


def status_table_bytes(slots: int, workers: int) -> int:
    return _row_bytes(slots) * workers


def _row_bytes(slots: int) -> int:
    return -(-(_WORDS_BYTES + slots) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


class WorkerStatus:
    """One worker's row of the table."""

    def __init__(self, table: memoryview, slots: int, rank: int) -> None:
        start = rank * _row_bytes(slots)
        self.words = table[start : start + _WORDS_BYTES].cast("Q")
        self.marks = table[start + _WORDS_BYTES : start + _WORDS_BYTES + slots]

    def __getitem__(self, word: StatusField) -> int:
        return self.words[word]

    def __setitem__(self, word: StatusField, value: int) -> None:
        self.words[word] = value

    def count(self, word: StatusField) -> None:
        self.words[word] += 1

    def mark(self, slots: Iterable[int], why: Unfilled = Unfilled.FAILED) -> None:
        """Mark slots that a store does not fill. Call it before the store is reported as ended."""
        for slot in slots:
            if not self.marks[slot]:
                self.marks[slot] = why
                self.words[StatusField.MARKED] += 1


class StatusTable:
    """The scheduler's view of the table: ``status_table_bytes(slots, workers)`` bytes, zeros at first."""

    def __init__(self, table: memoryview, slots: int, workers: int) -> None:
        self.rows: Sequence[WorkerStatus] = [WorkerStatus(table, slots, rank) for rank in range(workers)]
        self._words = [row.words for row in self.rows]
        self._taken = 0
        self._seen: list[bytes] = []

    def take_marks(self, slots: Sequence[int]) -> dict[int, Unfilled]:
        """Return and clear the marks of slots that a store of any worker did not fill."""
        taken: dict[int, Unfilled] = {}
        if sum(map(_marked, self._words)) > self._taken:
            for marks, slot in product([row.marks for row in self.rows], slots):
                if why := marks[slot]:
                    taken[slot], marks[slot] = Unfilled(why), 0
                    self._taken += 1
        return taken

    def notice_change(self) -> bool:
        """Remember the numbers; return whether one has changed since the last call."""
        seen, self._seen = self._seen, [words.tobytes() for words in self._words]
        return seen != self._seen

    @property
    def missing(self) -> list[int]:
        """Ranks of workers that have not opened this region: they see other memory or have not started."""
        return [rank for rank, row in enumerate(self.rows) if not row[StatusField.OPENED]]

    @property
    def stopped_s(self) -> float | None:
        """Start of the first worker's shutdown, in seconds of ``time.monotonic``; None before."""
        stopped = [row[StatusField.STOPPED_MS] for row in self.rows if row[StatusField.STOPPED_MS]]
        return min(stopped) / 1000 if stopped else None

    @property
    def is_lost(self) -> bool:
        return any(map(_is_lost, self._words))

    def have_found_damage(self) -> bool:
        """Return whether an audit of any worker has ever failed."""
        return any(map(_failed_audits, self._words))
