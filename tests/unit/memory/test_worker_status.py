"""The status table returns workers' entries unchanged, each to its own reader only."""

from __future__ import annotations

import pytest

from kvtier._memory.worker_status import (
    StatusField,
    StatusTable,
    Unfilled,
    WorkerStatus,
    status_table_bytes,
)
from kvtier._reasons import DROPPED

SLOTS = 300
WORKERS = 3


class Desk:
    """A table in plain memory: the workers' rows, and the scheduler's view."""

    def __init__(self) -> None:
        self.bytes = memoryview(bytearray(status_table_bytes(SLOTS, WORKERS)))
        self.workers = [WorkerStatus(self.bytes, SLOTS, rank) for rank in range(WORKERS)]
        self.scheduler = StatusTable(self.bytes, SLOTS, WORKERS)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_rows_are_aligned(desk: Desk) -> None:
    for rank, row in enumerate(desk.workers):
        for word in StatusField:
            row[word] = 2**63 + rank * 100 + word
        row.mark(range(SLOTS))
    desk.scheduler.take_marks(range(SLOTS))
    for rank, row in enumerate(desk.scheduler.rows):
        assert [row[word] for word in StatusField if word is not StatusField.MARKED] == [
            2**63 + rank * 100 + word for word in StatusField if word is not StatusField.MARKED
        ]
    assert status_table_bytes(SLOTS, WORKERS) % (WORKERS * 8) == 0


def test_marks_are_taken_once(desk: Desk) -> None:
    desk.workers[1].mark([5, 6, 299], Unfilled.INCOMPLETE)
    assert not desk.scheduler.take_marks([0, 4, 7])
    assert desk.scheduler.take_marks([6, 7]) == {6: Unfilled.INCOMPLETE}
    assert not desk.scheduler.take_marks([6, 7])
    desk.workers[2].mark([5])
    assert desk.scheduler.take_marks([5]) in ({5: Unfilled.INCOMPLETE}, {5: Unfilled.FAILED})
    assert not desk.scheduler.take_marks([5])
    assert desk.scheduler.take_marks([299])


def test_marks_have_counted_reasons() -> None:
    assert {why.name.lower() for why in Unfilled} | {
        "neighbour"
    } == DROPPED.keys()  # that one belongs to the scheduler


def test_changes_are_told_once(desk: Desk) -> None:
    assert desk.scheduler.notice_change()
    assert not desk.scheduler.notice_change()
    desk.workers[2].count(StatusField.LOADS_REPEATED)
    assert desk.scheduler.notice_change()
    assert not desk.scheduler.notice_change()


def test_first_stop_begins_shutdown(desk: Desk) -> None:
    assert desk.scheduler.stopped_s is None
    desk.workers[2][StatusField.STOPPED_MS] = 7_500
    desk.workers[0][StatusField.STOPPED_MS] = 9_000
    assert desk.scheduler.stopped_s == 7.5


def test_findings_reach_all(desk: Desk) -> None:
    assert not desk.scheduler.is_lost
    assert not desk.scheduler.have_found_damage()
    desk.workers[2].count(StatusField.AUDITS_FAILED)
    assert desk.scheduler.have_found_damage()
    assert not desk.scheduler.is_lost
    desk.workers[1][StatusField.LOST] = 1
    assert desk.scheduler.is_lost
