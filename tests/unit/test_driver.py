"""What both owners of a core do with it: submit commands, log changes, end copies that audits saw."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import pytest

from kvtier._core.admission import Limits, TierGate
from kvtier._core.messages import (
    Answer,
    Command,
    Event,
    Fetch,
    Fetched,
    Put,
    PutEnded,
    Reset,
    SlotsReady,
    TransferHealth,
)
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier._driver import Driver
from kvtier._memory.heap import HeapMemory
from kvtier._memory.slot_checksums import Fault, SlotChecksums
from kvtier.keys import OffloadKey
from kvtier.policies._lru import LRU

KEYS = [OffloadKey(bytes([number]) * 36) for number in range(3)]
CHUNK_BYTES = 64


class World:
    """A driver between a core of eight slots with one tier and a list of what it submits."""

    def __init__(self) -> None:
        self.core = Tiering(LRU(), [TierGate("one")], Limits(promotion_budget=1.0, landing_reserve=0.5))
        self.submitted: list[Command] = []
        self.known_at_submit: list[bool] = []
        self.slot_checksums = SlotChecksums.private(HeapMemory(8, CHUNK_BYTES), 1.0, CHUNK_BYTES)
        self.has_damage = False
        self.driver = Driver(
            self.core,
            self,
            logging.getLogger("kvtier.test"),
            slot_checksums=self.slot_checksums,
            has_damage=lambda: self.has_damage,
            clock=lambda: 0.0,
        )
        self.driver.on_event(SlotsReady(range(8)))

    def submit(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Fetch):
                self.known_at_submit += [
                    self.slot_checksums.expected(slot, 0) is not None for slot in command.slots
                ]
            self.submitted.append(command)

    def store(self) -> None:
        reservation = self.core.reserve(KEYS)
        assert reservation is not None
        self.driver.inspect(reservation)
        self.driver.commit(reservation)

    def bring(self) -> Request:
        """Have the tier bring the chunks for a request; return it."""
        request = Request("r")
        assert [self.core.lookup(key, request) for key in KEYS] == [Lookup.RETRY] * 3
        self.driver.settle()
        fetch = self.submitted[-1]
        assert isinstance(fetch, Fetch)
        self.driver.on_events(deque[Event]([Fetched(fetch.id, [Answer.LANDED] * 3)]))
        assert [self.core.lookup(key, request) for key in KEYS] == [Lookup.HIT] * 3
        return request


@pytest.fixture(autouse=True)
def _evidence(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def test_what_follows_from_a_store_an_event_and_a_reset_is_submitted_at_once() -> None:
    it = World()
    it.store()
    (put,) = it.submitted
    assert isinstance(put, Put)
    it.driver.on_event(PutEnded(put.id, [True] * 3))
    it.driver.reset()
    assert it.submitted[1:] == [Reset(0, 1)]
    assert not it.core.take_commands()


def test_slots_are_forgotten_before_a_fetch_into_them_is_submitted() -> None:
    it = World()
    for slot in range(8):
        it.slot_checksums.expect(slot, 0, 7)
    it.bring()
    assert it.known_at_submit == [False] * 3


@pytest.mark.parametrize("failed", [False, True])
def test_a_load_that_failed_is_dropped_and_its_request_computed(failed: bool) -> None:
    it = World()
    request = it.bring()
    it.driver.end_load(it.core.acquire(KEYS, request), request, failed=failed)
    assert it.core.lookup(KEYS[0], request) is (Lookup.MISS if failed else Lookup.HIT)
    assert len(it.core.table.visible) == (0 if failed else 3)


@pytest.mark.parametrize("failed", [False, True])
def test_a_chunk_that_has_changed_in_its_slot_is_never_given_again_and_its_tier_is_distrusted(
    failed: bool,
) -> None:
    it = World()
    pinned = it.core.acquire(KEYS, it.bring())
    it.slot_checksums.blame(pinned.slots[1], 0, Fault.SLOT)
    it.has_damage = True
    it.driver.end_load(pinned, failed=failed)
    assert not it.core.table.visible
    assert not it.core.is_distrusted
    assert it.core.take_counts()["audit_failed", "one"] == 1


def test_damage_in_a_store_ends_everything() -> None:
    it = World()
    reservation = it.core.reserve(KEYS)
    assert reservation is not None
    it.slot_checksums.blame(reservation.slots[0], 0, Fault.COPY)
    it.has_damage = True
    it.driver.inspect(reservation)
    it.driver.commit(reservation)
    assert it.core.is_distrusted
    assert not it.submitted
    assert not it.core.table.visible


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    it = World()
    for _ in range(6):  # failures in a row: the breaker opens at the fifth
        for put in [command for command in it.submitted if isinstance(command, Put)]:
            it.submitted.remove(put)
            it.driver.on_event(PutEnded(put.id, [False] * 3, {"error": 3}, 0.1, TransferHealth.BAD))
        it.driver.reset()
        it.store()
    lines = [record.message for record in caplog.records if "tier one" in record.message]
    assert len(lines) == 1
    assert "several in a row have failed" in lines[0]
