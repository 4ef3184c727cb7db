"""What the scheduler learns of its workers from the board: failed copies, lost devices, pinned memory."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.adapters.vllm.metrics import DEVICE_UP, PINNED_BYTES, PINNING_FAILED, Gauges
from kvtier.core.shared import Count
from kvtier.memory.board import Board, Word

_COUNTED: Mapping[Word, Count] = {
    Word.STORES_REPEATED: ("copy_failed", "store", "repeated"),
    Word.STORES_DROPPED: ("copy_failed", "store", "dropped"),
    Word.LOADS_REPEATED: ("copy_failed", "load", "repeated"),
    Word.LOADS_STAGED: ("copy_failed", "load", "staged"),
    Word.LOADS_RECOMPUTED: ("copy_failed", "load", "recomputed"),
    Word.AUDITED: ("audited",),
}


class Workers:
    """Reads the board in the scheduler's thread. Nothing here waits.

    Args:
        board: the rows of all workers.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._counted: dict[Count, int] = {}
        self.gauges: Gauges = {}

    @property
    def have_found_damage(self) -> bool:
        """Whether an audit of any worker has ever failed."""
        return any(row[Word.AUDITS_FAILED] for row in self._board.rows)

    @property
    def have_lost_device(self) -> bool:
        """Whether a worker has given up its device."""
        return self._board.is_lost

    def failed_to_store(self, slots: list[int]) -> bool:
        """Return, once, whether the store into these slots that has just ended failed at any worker."""
        return self._board.take_marks(slots)

    def take_counts(self) -> dict[Count, float]:
        """Take what was counted since the last call, and bring the gauges up to date."""
        if not self._board.has_changed():
            return {}
        rows = self._board.rows
        self.gauges = {
            key: value
            for rank, row in enumerate(rows)
            for key, value in {
                (PINNED_BYTES, (str(rank),)): row[Word.PINNED_BYTES],
                (PINNING_FAILED, (str(rank),)): row[Word.PINNING_FAILED],
                (DEVICE_UP, (str(rank),)): 1 - row[Word.LOST],
            }.items()
        }
        totals = {count: sum(row[word] for row in rows) for word, count in _COUNTED.items()}
        new = {count: total - self._counted.get(count, 0) for count, total in totals.items()}
        self._counted = totals
        return {count: number for count, number in new.items() if number}
