"""Entries of slots: valid from the trailer on until the slot is filled anew, or the engine is reset."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier._core.slot_trailers import SlotTrailers, slot_trailers_bytes

TRAILER, OTHER = b"a" * 128, b"b" * 128


@pytest.fixture
def table() -> SlotTrailers:
    return SlotTrailers(memoryview(bytearray(slot_trailers_bytes(4))), 4)


def fill(table: SlotTrailers, slot: int, trailer: bytes = TRAILER) -> None:
    table.fill([slot])
    table.write(slot, trailer)


def test_new_table_has_no_entries(table: SlotTrailers) -> None:
    assert table.adopt() == []


def test_entry_is_valid_once_its_trailer_is_there(table: SlotTrailers) -> None:
    table.fill([2])
    assert table.adopt() == []
    table.write(2, TRAILER)
    assert table.adopt() == [(2, TRAILER)]


@pytest.mark.parametrize("voids", [SlotTrailers.fill, SlotTrailers.drop])
def test_filling_or_dropping_a_slot_voids_its_entry(
    table: SlotTrailers, voids: Callable[[SlotTrailers, list[int]], None]
) -> None:
    fill(table, 2)
    fill(table, 3, OTHER)
    voids(table, [2])
    assert table.adopt() == [(3, OTHER)]


def test_trailer_of_a_dropped_chunk_is_void(table: SlotTrailers) -> None:
    table.fill([2])
    table.drop([2])
    table.write(2, TRAILER)
    assert table.adopt() == []


def test_reset_voids_also_entries_that_come_later(table: SlotTrailers) -> None:
    fill(table, 1)
    table.fill([2])
    table.reset()
    table.write(2, TRAILER)
    fill(table, 3)
    assert table.adopt() == []


def test_entries_of_the_engine_after_a_reset_count(table: SlotTrailers) -> None:
    fill(table, 1)
    table.reset()
    assert table.adopt() == []
    fill(table, 2, OTHER)
    assert table.adopt() == [(2, OTHER)]


@pytest.mark.parametrize("bit", range(64))
def test_flipped_bit_revives_no_entry(bit: int) -> None:
    memory = memoryview(bytearray(slot_trailers_bytes(4)))
    table, void = SlotTrailers(memory, 4), memory.cast("Q")[1:2]
    for slot in range(4):
        fill(table, slot)
    table.reset()
    void[0] ^= 1 << bit
    assert table.complete() == []
    void[0] ^= 1 << bit
    assert table.adopt() == []
    void[0] ^= 1 << bit
    assert table.complete() == []


def whole(trailer: bytes) -> bool:
    return trailer == TRAILER


def test_new_engine_has_verified_nothing(table: SlotTrailers) -> None:
    fill(table, 1)
    assert table.is_verified(1)
    assert table.adopt() == [(1, TRAILER)]
    assert not table.is_verified(1)


def test_sound_chunks_are_verified_by_last_use(table: SlotTrailers) -> None:
    for slot, trailer in ((0, TRAILER), (1, OTHER), (2, TRAILER)):
        fill(table, slot, trailer)
    table.adopt()
    assert table.unverified() == [2, 1, 0]
    assert [table.verify(slot, whole) for slot in (0, 1, 2, 3)] == [True, False, True, False]
    assert [table.is_verified(slot) for slot in (0, 1, 2, 3)] == [True, False, True, False]
    assert table.unverified() == [1]


@pytest.mark.parametrize("voids", [fill, lambda table, _: table.reset(), lambda table, _: table.drop([1])])
def test_nothing_that_is_voided_meanwhile_is_verified(
    table: SlotTrailers, voids: Callable[[SlotTrailers, int], None]
) -> None:
    def is_whole(trailer: bytes) -> bool:
        voids(table, 1)
        return trailer == TRAILER

    fill(table, 1)
    table.adopt()
    table.verify(1, is_whole)
    assert not table.is_verified(1)


def test_entries_come_by_last_use(table: SlotTrailers) -> None:
    for slot in (0, 1, 2):
        fill(table, slot)
        table.use([slot])
    table.use([0])
    assert [slot for slot, _ in table.adopt()] == [1, 2, 0]
