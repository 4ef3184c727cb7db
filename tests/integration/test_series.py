"""Each series at vLLM's endpoint says what is so: figures of tiers that are made slow, moody or lost here.

No engine: the scheduler's side is driven as in ``test_bridge``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from kvtier.adapters.vllm.workers import Workers
from kvtier.core.admission import Limits
from kvtier.core.policies.lru import LRU
from kvtier.keys import OffloadKey
from kvtier.memory.worker_status import StatusField, StatusTable, WorkerStatus, status_table_bytes
from kvtier.tiers import supervisor
from kvtier.tiers.base import Batch, Outcome, TierContext
from kvtier.tiers.dummy import DummyConfig, DummyTier
from tests.integration import test_bridge
from tests.integration.test_bridge import Clock, World, prompt

Labels = tuple[str, ...]
Series = Mapping[Labels, float]

PUT, GET = ("dummy0", "put"), ("dummy0", "get")
TIER = ("dummy0",)
FAILURES = 5  # in a row: then a breaker opens
QUEUED, IN_FLIGHT = "kvtier_queued_transfers", "kvtier_in_flight_transfers"
CASCADES = "vllm:kv_offload_tiering_active_cascade_jobs"
PROMOTIONS = "vllm:kv_offload_tiering_active_promotion_jobs"
HELD_BY_PUTS = "vllm:kv_offload_tiering_primary_read_usage_perc"
STATE = "kvtier_breaker_state"


class Led(DummyTier):
    """Does what the test says: lets so many calls go on, fails so many, opens or does not.

    Attributes:
        is_shut: puts and gets wait until they are let go on.
        errors: what the next puts and gets raise.
        is_away: it cannot be opened.
        openings: how often that was tried.
    """

    def __init__(self, **settings: object) -> None:
        # Nothing here is to be late: what a deadline does is tested elsewhere.
        super().__init__(DummyConfig.model_validate({"deadline_s": 600.0, **settings}))
        self.is_shut = False
        self.errors: list[Exception] = []
        self.is_away = False
        self.openings = 0
        self._turns = asyncio.Semaphore(0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost: Callable[[str], None] | None = None

    async def open(self, context: TierContext) -> None:
        self.openings += 1
        if self.is_away:
            raise ConnectionRefusedError("nobody listens")
        self._loop, self._lost = asyncio.get_running_loop(), context.lost
        await super().open(context)

    async def put(self, batch: Batch) -> Outcome:
        await self._be_led()
        return await super().put(batch)

    async def get(self, batch: Batch) -> Outcome:
        await self._be_led()
        return await super().get(batch)

    def let(self, count: int) -> None:
        """Let so many of the waiting puts and gets go on, or of those that come."""
        assert self._loop is not None
        for _ in range(count):
            self._loop.call_soon_threadsafe(self._turns.release)

    def lose(self) -> None:
        assert self._lost is not None
        self._lost("it was told to be")

    async def _be_led(self) -> None:
        if self.is_shut:
            await self._turns.acquire()
        if self.errors:
            raise self.errors.pop()


class Endpoint:
    """A world's series as vLLM's endpoint would show them."""

    def __init__(self, it: World) -> None:
        self._it = it
        self._stats = OffloadingConnectorStats()

    def series(self, name: str) -> Series:
        """Return the values that there are, by the values of the labels."""
        if (stats := self._it.manager.get_stats()) is not None:
            self._stats.aggregate(stats)
        return dict(self._stats.data["data"].get(name, {}))

    def until(self, expected: Mapping[str, Series]) -> None:
        """Step until all of these series are like that, and no other value of them is there."""
        end = time.monotonic() + 20
        while (shown := {name: self.series(name) for name in expected}) != expected:
            assert time.monotonic() < end, f"{shown} is not {expected}"
            self._it.step()
            time.sleep(0.001)


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[World, Endpoint]]]:
    made: list[World] = []

    def make(*tiers: DummyTier, **settings: Any) -> tuple[World, Endpoint]:
        made.append(World(*tiers, **settings))
        return made[-1], Endpoint(made[-1])

    yield make
    for world in made:
        world.manager.shutdown()


Make = Callable[..., tuple[World, Endpoint]]


def activity(puts: tuple[int, int] = (0, 0), gets: tuple[int, int] = (0, 0)) -> Mapping[str, Series]:
    """Return the series of a tier of which so many puts and gets run and wait."""
    return {
        IN_FLIGHT: {PUT: puts[0], GET: gets[0]},
        QUEUED: {PUT: puts[1], GET: gets[1]},
        CASCADES: {TIER: sum(puts)},
        PROMOTIONS: {TIER: sum(gets)},
    }


def store_each(it: World, *prompts: Sequence[OffloadKey]) -> None:
    """Store these prompts one by one, so that each of them is put by itself."""
    context = it.request("stores")
    for keys in prompts:
        assert it.store(keys, context) == keys
        it.step()


def in_the_tier_alone(it: World, *prompts: Sequence[OffloadKey]) -> None:
    store_each(it, *prompts)
    it.settle()
    it.forget_primary()


# --- what a tier is at work on, and what waits ------------------------------------------------------


def test_puts_that_run_and_wait_are_told_apart_and_added_up(make: Make) -> None:
    slow = Led(max_concurrency=1)
    it, endpoint = make(slow, slots=32, clock=Clock())
    endpoint.until(activity())
    slow.is_shut = True
    store_each(it, *(prompt(name, 2) for name in range(3)))
    endpoint.until({**activity(puts=(1, 2)), HELD_BY_PUTS: {TIER: 6 / 32}})
    slow.let(1)
    endpoint.until({**activity(puts=(1, 1)), HELD_BY_PUTS: {TIER: 4 / 32}})
    slow.let(2)
    endpoint.until({**activity(), HELD_BY_PUTS: {TIER: 0}})
    it.check_idle()


def test_gets_that_run_and_wait_are_told_apart_and_added_up(make: Make) -> None:
    slow = Led(max_concurrency=1)
    it, endpoint = make(slow, slots=32, clock=Clock(), limits=Limits(landing_reserve=0.25))
    prompts = [prompt(name, 2) for name in range(3)]
    in_the_tier_alone(it, *prompts)
    slow.is_shut = True
    requests = [it.request(str(name)) for name in range(3)]
    for keys, context in zip(prompts, requests, strict=True):
        assert it.scan(keys, context)[1], "it waits for the tier"
    endpoint.until(activity(gets=(1, 2)))
    slow.let(1)
    endpoint.until(activity(gets=(1, 1)))
    slow.let(2)
    endpoint.until(activity())
    assert [it.find(keys, context) for keys, context in zip(prompts, requests, strict=True)] == [2] * 3


# --- second attempts --------------------------------------------------------------------------------


def fail_next(tier: Led, times: int) -> None:
    tier.errors = [ConnectionResetError("for a moment")] * times


@pytest.mark.parametrize(
    ("failures", "share", "outcome"), [(1, 1.0, "helped"), (2, 1.0, "failed"), (1, 0.0, "no_budget")]
)
def test_second_attempts_are_counted_by_what_came_of_them(
    make: Make, failures: int, share: float, outcome: str
) -> None:
    tier = Led(retry_share=share)
    it, endpoint = make(tier, slots=32, clock=Clock())
    in_the_tier_alone(it, prompt(1, 2))
    assert endpoint.series("kvtier_retries") == {}
    fail_next(tier, failures)
    store_each(it, prompt(2, 2))
    it.settle()
    assert endpoint.series("kvtier_retries") == {(*PUT, outcome): 1}
    fail_next(tier, failures)
    assert it.find(prompt(1, 2), it.request("b")) == (2 if outcome == "helped" else 0)
    it.settle()
    assert endpoint.series("kvtier_retries") == {(*PUT, outcome): 1, (*GET, outcome): 1}


# --- breakers and tiers that are down ---------------------------------------------------------------


def put_one(it: World, number: int) -> None:
    store_each(it, prompt(100 + number, 1))


def get_one(it: World, number: int) -> None:
    assert it.scan(prompt(number, 1), it.request(f"gets {number}"))[1], "it waits for the tier"
    it.step()


@pytest.mark.parametrize(("mine", "other", "act"), [(PUT, GET, put_one), (GET, PUT, get_one)])
def test_a_breaker_is_closed_open_and_half_open_in_numbers_and_its_moves_are_counted(
    make: Make, mine: Labels, other: Labels, act: Callable[[World, int], None]
) -> None:
    clock, tier = Clock(), Led()
    it, endpoint = make(tier, slots=32, clock=clock)
    in_the_tier_alone(it, *(prompt(number, 1) for number in range(FAILURES + 1)))
    opened, closed = "kvtier_breaker_opened", "kvtier_breaker_closed"
    endpoint.until({STATE: {mine: 0, other: 0}, opened: {}, closed: {}})
    tier.errors = [OSError("no")] * FAILURES
    for number in range(FAILURES):
        act(it, number)
        it.settle()
    endpoint.until({STATE: {mine: 2, other: 0}, opened: {(*mine, "failures"): 1}, closed: {}})
    clock.now += 1.0
    tier.is_shut = True
    act(it, FAILURES)
    endpoint.until({STATE: {mine: 1, other: 0}, closed: {}})
    tier.let(1)
    endpoint.until({STATE: {mine: 0, other: 0}, opened: {(*mine, "failures"): 1}, closed: {mine: 1}})


def test_a_tier_goes_down_once_however_often_it_is_tried(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.02)
    tier = Led()
    tier.is_away = True
    it, endpoint = make(tier, slots=32)
    up, healthy, down = "kvtier_tier_up", "kvtier_tier_healthy", "kvtier_tier_down"
    for times in (1, 2):
        tried = tier.openings
        endpoint.until({up: {TIER: 0}, healthy: {TIER: 0}, down: {TIER: times}})
        wait_for_openings(tier, tried + 3)
        endpoint.until({up: {TIER: 0}, healthy: {TIER: 0}, down: {TIER: times}})
        tier.is_away = False
        endpoint.until({up: {TIER: 1}, down: {TIER: times}})
        store_each(it, prompt(times, 1))
        it.settle()
        endpoint.until({up: {TIER: 1}, healthy: {TIER: 1}})
        tier.is_away = True
        tier.lose()
    endpoint.until({up: {TIER: 0}, down: {TIER: 3}})


def wait_for_openings(tier: Led, number: int) -> None:
    end = time.monotonic() + 20
    while tier.openings < number:
        assert time.monotonic() < end
        time.sleep(0.001)


# --- the policy, and the workers --------------------------------------------------------------------


class Withholding(LRU):
    """Chooses nothing."""

    def evict(self, count: int) -> list[OffloadKey]:
        return []


def test_a_policy_that_was_replaced_is_counted_once_and_by_what_it_did(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_bridge, "LRU", Withholding)
    it, endpoint = make(slots=4)
    store_each(it, prompt(1, 4))
    assert endpoint.series("kvtier_policy_replaced") == {}
    for number in (2, 3):
        store_each(it, prompt(number, 4))
        assert endpoint.series("kvtier_policy_replaced") == {("withheld",): 1}


def test_what_each_worker_has_pinned_is_published(make: Make) -> None:
    status_table = memoryview(bytearray(status_table_bytes(8, 2)))
    it, endpoint = make(slots=8, workers=Workers(StatusTable(status_table, 8, 2)))
    pinned, failed = "kvtier_pinned_bytes", "kvtier_pinning_failed"
    first, second = (WorkerStatus(status_table, 8, rank) for rank in range(2))
    first[StatusField.PINNED_BYTES] = 4096
    it.step()
    endpoint.until({pinned: {("0",): 4096, ("1",): 0}, failed: {("0",): 0, ("1",): 0}})
    second[StatusField.PINNED_BYTES] = 8192
    second[StatusField.PINNING_FAILED] = 1
    endpoint.until({pinned: {("0",): 4096, ("1",): 8192}, failed: {("0",): 0, ("1",): 1}})
