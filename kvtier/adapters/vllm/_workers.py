"""What workers report to the scheduler in the status table: failed copies, lost devices, pinned memory."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier._core.shared import Count
from kvtier._memory.worker_status import StatusField, StatusTable
from kvtier.adapters.vllm._metrics import Gauges

_COUNTED: Mapping[StatusField, Count] = {
    StatusField.STORES_REPEATED: ("copy_failed", "store", "repeated"),
    StatusField.STORES_DROPPED: ("copy_failed", "store", "dropped"),
    StatusField.LOADS_REPEATED: ("copy_failed", "load", "repeated"),
    StatusField.LOADS_STAGED: ("copy_failed", "load", "staged"),
    StatusField.LOADS_RECOMPUTED: ("copy_failed", "load", "recomputed"),
    StatusField.AUDITED: ("audited",),
}


class Workers:
    """Reads the status table in the scheduler's thread. Nothing here waits.

    Args:
        status_table: the rows of all workers.
    """

    def __init__(self, status_table: StatusTable) -> None:
        self._status_table = status_table
        self._counted: dict[Count, int] = {}
        self.gauges: Gauges = {}

    @property
    def have_found_damage(self) -> bool:
        """Whether an audit of any worker has ever failed."""
        return any(row[StatusField.AUDITS_FAILED] for row in self._status_table.rows)

    @property
    def have_lost_device(self) -> bool:
        """Whether a worker has given up its device."""
        return self._status_table.is_lost

    def failed_to_store(self, slots: list[int]) -> bool:
        """Return, once, whether the store into these slots that has just ended failed at any worker."""
        return self._status_table.take_marks(slots)

    def take_counts(self) -> dict[Count, float]:
        """Take what was counted since the last call, and bring the gauges up to date."""
        if not self._status_table.has_changed():
            return {}
        rows = self._status_table.rows
        self.gauges = {
            key: value
            for rank, row in enumerate(rows)
            for key, value in {
                ("kvtier_pinned_bytes", (str(rank),)): row[StatusField.PINNED_BYTES],
                ("kvtier_pinning_failed", (str(rank),)): row[StatusField.PINNING_FAILED],
                ("kvtier_device_up", (str(rank),)): 1 - row[StatusField.LOST],
            }.items()
        }
        totals = {count: sum(row[word] for row in rows) for word, count in _COUNTED.items()}
        new = {count: total - self._counted.get(count, 0) for count, total in totals.items()}
        self._counted = totals
        return {count: number for count, number in new.items() if number}
