"""Slot checksums: set when a slot is filled, valid until it is refilled, compared by its readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier import HeapMemory
from kvtier._core.chunks import Chunk
from kvtier._core.messages import Get, Put, Touch
from kvtier._memory.slot_checksums import Fault, SlotChecksums, SlotDamage, slot_checksums_bytes
from kvtier.keys import pack_key

SLOTS = 8
AREAS = 3
AREA_BYTES = 1000
KEY = pack_key(b"a chunk")


@pytest.fixture(autouse=True)
def _evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


class Slots(HeapMemory):
    """Slots in plain memory, with their number."""

    slots = SLOTS


def make(rate: float = 1.0) -> SlotChecksums:
    slots = Slots(SLOTS, 4096)
    for slot in range(SLOTS):
        slots.view(slot)[:] = bytes([slot + 1]) * 4096
    return SlotChecksums(
        slots, memoryview(bytearray(slot_checksums_bytes(SLOTS, AREAS))), rate, AREAS, AREA_BYTES
    )


def test_content_known_until_refill() -> None:
    slot_checksums = make()
    for area in range(AREAS):
        slot_checksums.expect(2, area, 0xFFFFFFFF - area)
    slot_checksums.expect(3, 0, 0)  # 0 is a valid checksum

    slot_checksums.forget([2], 1)
    assert [slot_checksums.expected(2, area) for area in range(AREAS)] == [0xFFFFFFFF, None, 0xFFFFFFFD]
    assert (slot_checksums.expected(3, 0), slot_checksums.expected(3, 1)) == (0, None)
    assert slot_checksums.audited([1, 2, 3]) == [1, 2]

    slot_checksums.forget([2, 3])
    assert slot_checksums.audited(range(SLOTS)) == []


def test_only_lent_slots_are_forgotten() -> None:
    slot_checksums = make()
    slot_checksums.record_checksums(range(SLOTS))
    slot_checksums.forget_promoted(
        [Put(1, 0, [KEY], [1]), Get(2, 0, [KEY, KEY], [2, 3], False), Touch(0, [KEY])]
    )
    assert slot_checksums.audited(range(SLOTS)) == [0, 1, 4, 5, 6, 7]


def test_all_taken_areas_compare(tmp_path: Path) -> None:
    for area in range(AREAS):
        slot_checksums = make()
        slot_checksums.record_checksums([4, 5])
        assert slot_checksums.are_intact([(KEY, 4), (KEY, 5)])
        slot_checksums.view(5, area)[AREA_BYTES - 1] ^= 1
        assert not slot_checksums.are_intact([(KEY, 4), (KEY, 5)])
        assert slot_checksums.are_intact([(KEY, 4), (KEY, 6)])  # the last slot has no checksum
    assert len(list((tmp_path / "kvtier" / "evidence").glob("*.json"))) == AREAS


def test_workers_sample_equally() -> None:
    slots = list(range(1000))
    one, other = make(0.05), make(0.05)
    chosen = [one.chosen(job, slots) for job in range(100)]
    assert chosen == [other.chosen(job, slots) for job in range(100)]
    assert 4_000 < sum(map(len, chosen)) < 6_000
    assert len({slot for job in chosen for slot in job}) > 900  # not the same slots again and again
    assert make(1.0).chosen(7, slots) == slots
    assert make(0.0).chosen(7, slots) == []


def test_finding_is_reported_once() -> None:
    slot_checksums = make()
    chunks = [Chunk(slot) for slot in range(SLOTS)]
    for chunk in chunks:
        chunk.key = KEY
    slot_checksums.blame(2, 1, Fault.SLOT)
    slot_checksums.blame(2, 2, Fault.COPY)
    slot_checksums.blame(6, 0, Fault.SLOT)
    slot_checksums.forget(range(SLOTS))
    slot_checksums.expect(6, 0, 1)

    found = slot_checksums.take_damage(chunks[:7], [5] * 7)
    assert found == [SlotDamage(KEY, 2, 5, Fault.SLOT | Fault.COPY), SlotDamage(KEY, 6, 5, Fault.SLOT)]
    assert [it.tier for it in found] == [None, 5]  # a faulty copy is not a tier's fault
    assert slot_checksums.take_damage(chunks, [None] * SLOTS) == []
    assert slot_checksums.expected(6, 0) == 1
