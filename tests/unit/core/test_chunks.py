"""Slots are given, pinned and given back, and never lost."""

from __future__ import annotations

import pytest

from kvtier._core.chunks import ChunkTable
from kvtier._core.states import ChunkState
from kvtier.errors import StateError
from kvtier.keys import OffloadKey, pack_key
from kvtier.policies._lru import LRU

A, B, C, D = (pack_key(name) for name in (b"a", b"b", b"c", b"d"))


@pytest.fixture
def table() -> ChunkTable:
    table = ChunkTable(LRU())
    table.add_slots(range(3))
    return table


def fill(table: ChunkTable, *keys: OffloadKey) -> None:
    table.filled(table.take(keys, visible=True))


def test_a_failed_copy_frees_the_slot_and_is_never_seen(table: ChunkTable) -> None:
    (chunk,) = table.take([A], visible=True)
    table.failed([chunk])
    assert A not in table.visible
    assert len(table.free) == 3
    with pytest.raises(StateError, match="ABSENT"):
        table.failed([chunk])


def test_a_failed_landing_leaves_the_visible_chunk_of_its_key_alone(table: ChunkTable) -> None:
    (landing,) = table.take([A], visible=False)
    fill(table, A)
    table.failed([landing])
    assert table.visible[A] is not landing
    assert A in table.policy


def test_a_chunk_cannot_be_filled_twice(table: ChunkTable) -> None:
    fill(table, A)
    with pytest.raises(StateError, match="READY: FILLED"):
        table.filled([table.visible[A]])


def test_reset_dooms_what_is_in_use_and_frees_the_rest(table: ChunkTable) -> None:
    fill(table, A, B)
    (filling,) = table.take([C], visible=True)
    pinned = table.visible[B]
    table.pin([pinned])
    table.reset()
    assert table.visible == {}
    assert len(table.policy) == 0
    assert [chunk.slot for chunk in table.free] == [0]
    assert filling.state is pinned.state is ChunkState.DOOMED
    table.unpin([pinned])
    assert table.filled([filling]) == []
    assert sorted(chunk.slot for chunk in table.free) == [0, 1, 2]


def test_a_chunk_says_what_it_is(table: ChunkTable) -> None:
    fill(table, A)
    assert repr(table.visible[A]) == "<chunk 6100000000 in slot 0, READY, 0 pins>"
