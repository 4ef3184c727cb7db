"""The bridge keeps vLLM's rules: driven step by step as its scheduler does, without an engine.

The tiers and their thread are real; the test makes the workers' copies, into an anonymous region.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as connector_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
)

from kvtier import Identity
from kvtier._core.kv_events import KVEvent
from kvtier._core.limits import Limits
from kvtier._core.messages import Command, PutEnded, Removed, SlotsReady, TierDown, Touch
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.breaker import Breaker
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._execution.executor import Executor, ExecutorThread
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import Fault, SlotChecksums
from kvtier._memory.worker_status import StatusField, StatusTable, Unfilled, status_table_bytes
from kvtier.adapters.vllm._compat import REPORTS_RESET_FLUSH, limit_refusals
from kvtier.adapters.vllm._manager import EngineFacts, KVTierManager, Slots
from kvtier.adapters.vllm._telemetry.events import EventStream, location_of
from kvtier.adapters.vllm._telemetry.explain import Explainer
from kvtier.adapters.vllm._telemetry.metrics import Published
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec
from kvtier.keys import OffloadKey, pack_key
from kvtier.policies import LRU
from kvtier.tiers import SecondaryTier
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier_testing import invariants
from kvtier_testing.dummy import DummyConfig, DummyTier
from tests.common import named_tier, wait_until
from tests.integration.harness import PATIENCE_S

pytestmark = pytest.mark.releases

CHUNK_BYTES = 4096
HIT, MISS = LookupResult.HIT, LookupResult.MISS
WAIT = (LookupResult.RETRY, LookupResult.HIT_PENDING)
AnyTier = SecondaryTier[Any]


def prompt(name: int, length: int) -> list[OffloadKey]:
    return [pack_key(name.to_bytes(16, "big") + index.to_bytes(16, "big")) for index in range(length)]


def content(key: OffloadKey, version: int = 0) -> bytes:
    return random.Random(key + bytes([version])).randbytes(CHUNK_BYTES)


def dummy(**settings: object) -> DummyTier:
    return DummyTier(DummyConfig.model_validate({"deadline_s": PATIENCE_S, **settings}))


def files(root: Path) -> FsTier:
    return FsTier(FsConfig(root_dir=root, n_threads=2, min_free_bytes=0, deadline_s=PATIENCE_S))


class Clock:
    """A clock that moves only on request."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """A manager, with the test in place of vLLM's scheduler and workers."""

    def __init__(
        self,
        *tiers: AnyTier,
        slots: int = 32,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        steps_ahead: int = 2,
        self_describing: bool = False,
        kv_events: bool = True,
        workers: StatusTable | None = None,
        explainer: Explainer | None = None,
        addresses: Mapping[int, str] = MappingProxyType({}),
        peers: Collection[str] = (),
    ) -> None:
        names = [f"{tier.config.type}{index}" for index, tier in enumerate(tiers)]
        gates = [
            TierStatus(
                name, tier.config.deadline_s, breaker=partial(Breaker, pause_s=tier.config.breaker_pause_s)
            )
            for name, tier in zip(names, tiers, strict=True)
        ]
        self.core = Tiering(LRU(), gates, limits or Limits(), track_kv_events=kv_events)
        self.region = Region.anonymous(slots, CHUNK_BYTES)
        self.slot_checksums = SlotChecksums.private(self.region, 1.0, CHUNK_BYTES)
        named = [named_tier(name, tier) for name, tier in zip(names, tiers, strict=True)]
        self.thread = ExecutorThread(partial(Executor, named, Identity.make("model", {}), self.region))
        self.thread.start()
        self.thread.events.append(SlotsReady(range(slots)))
        self.shutdowns = 0
        self.has_blocks = False  # requests have some of their blocks on the device
        self.why_not_stored: str | None = None
        published = Published(
            self.core,
            self.thread.activity,
            workers,
            locations=[location_of(tier) for tier in tiers],
            self_describing=self_describing,
        )
        self.manager = KVTierManager(
            self.core,
            self.thread,
            published,
            EngineFacts(
                steps_ahead=steps_ahead,
                has_blocks=lambda: self.has_blocks,
                why_not_stored=lambda _: self.why_not_stored,
            ),
            explainer=explainer,
            addresses=addresses,
            peers=peers,
            clock=clock,
            on_shutdown=self._shut_down,
            slot_checksums=self.slot_checksums,
        )

    def _shut_down(self) -> None:
        self.shutdowns += 1
        assert self.thread.close(1.0, PATIENCE_S)  # a machine may be busy when the test ends
        self.region.close()

    def step(self, new: Sequence[str] = (), preempted: Sequence[str] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new, preempted))
        invariants.check(self.core)

    def request(self, name: str, wanted: TierFilter = TierFilter.ALL) -> ReqContext:
        context = ReqContext(req_id=name, load_tier_filter=wanted)
        assert self.manager.on_new_request(context).policy == OffloadPolicy("chunk_level")
        return context

    def scan(self, keys: Sequence[OffloadKey], context: ReqContext) -> tuple[int, bool]:
        """Look up chunks as vLLM does, from the front to the first MISS. Return the run, and if it must
        wait."""
        wait = False
        for index, key in enumerate(keys):
            answer = self.manager.lookup(key, context)
            if answer is MISS:
                return index, wait
            wait = wait or answer in WAIT
        return len(keys), wait

    def find(self, keys: Sequence[OffloadKey], context: ReqContext) -> int:
        """Look up once per step until there is an answer; leave the last step open for a load."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            found, wait = self.scan(keys, context)
            if not wait:
                return found
            self.step()
            time.sleep(0.001)
        raise AssertionError("the request waits for ever")

    def store(self, keys: Sequence[OffloadKey], context: ReqContext, version: int = 0) -> list[OffloadKey]:
        """Store chunks, including the workers' copy; return the stored keys."""
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return []
        self.write(output, version)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        return output.keys_to_store

    def write(self, output: PrepareStoreOutput, version: int = 0) -> None:
        for key, slot in zip(output.keys_to_store, slots_of(output.store_spec), strict=True):
            self.region.view(slot)[:] = content(key, version)

    def read(self, spec: object) -> list[bytes]:
        return [bytes(self.region.view(slot)) for slot in slots_of(spec)]

    def settle(self) -> None:
        """Step until the tiers are idle."""
        end = time.monotonic() + PATIENCE_S
        while not self.core.is_idle or self.manager.has_pending_work():
            assert time.monotonic() < end
            self.step()
            time.sleep(0.001)

    def check_idle(self) -> None:
        """Assert that nothing is pinned."""
        self.settle()
        invariants.check(self.core)
        assert not any(chunk.pins for chunk in self.core.table.all)


def slots_of(spec: object) -> list[int]:
    assert isinstance(spec, Slots)
    return spec.slots


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*tiers: AnyTier, **settings: Any) -> World:
        made.append(World(*tiers, **settings))
        return made[-1]

    yield make
    for world in made:
        world.manager.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-executor"]


Make = Callable[..., World]


def test_chunks_without_room_return(make: Make) -> None:
    it = make(slots=2)
    context = it.request("a")
    under_way = it.manager.prepare_store(prompt(1, 2), context)
    assert under_way is not None
    assert it.manager.prepare_store(prompt(2, 2), context) is None
    it.manager.complete_store(under_way.keys_to_store, context)
    it.check_idle()


def test_refusals_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    limit_refusals()
    limit_refusals()
    vllms = connector_scheduler.logger
    vllms.addHandler(caplog.handler)
    try:
        for step in range(600):
            vllms.warning("Request %s: cannot store chunks", step)
        vllms.warning("another line")
    finally:
        vllms.removeHandler(caplog.handler)
    assert len({line for line in caplog.messages if "cannot store" in line}) <= 1
    assert "another line" in caplog.messages


def test_removals_wait_without_events(make: Make) -> None:
    it = make(dummy(), kv_events=False)
    for key in prompt(1, 1000):
        it.thread.events.append(Removed(0, [key]))
    assert not any(event.keys for event in it.thread.events if isinstance(event, Removed))


def test_sleep_makes_nothing_overdue(make: Make) -> None:
    clock = Clock()
    it = make(dummy(), slots=16, clock=clock)
    it.store(prompt(1, 2), it.request("a"))
    wait_until(lambda: any(isinstance(event, PutEnded) for event in it.thread.events))
    clock.now += 3600
    it.step()
    assert it.core.shared.tiers[0].works
    assert ("overdue", "dummy0", "put") not in it.core.take_counts()


def test_resumed_request_stops_waiting(make: Make) -> None:
    """vLLM names it in no step, and skips its lookup if the device's cache has all of its prompt."""
    clock = Clock()
    it = make(dummy(hang_rate=1.0), slots=16, clock=clock)
    context = it.request("a")
    it.step(new=["a"])
    it.store(prompt(1, 2), context)
    it.step(preempted=["a"])
    assert it.scan(prompt(1, 4), context) == (4, True)
    it.step()
    assert any(chunk.pins for chunk in it.core.table.all if chunk.key == prompt(1, 1)[0])
    it.step()
    it.store(prompt(1, 5)[4:], context)
    it.step()
    assert not it.core.holds.pending
    assert it.core.shared.gate.running
    clock.now += 3600
    it.step()
    assert ("expired",) not in it.core.shared.counts


@pytest.mark.parametrize("chunks", [1, 64])
def test_host_hit_is_one_message(make: Make, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """The chunks are found in the first step and loaded in one transfer; the tiers get one message."""
    sent: list[list[Command]] = []
    submit = ExecutorThread.submit

    def noted(thread: ExecutorThread, commands: Sequence[Command]) -> None:
        sent.append(list(commands))
        submit(thread, commands)

    monkeypatch.setattr(ExecutorThread, "submit", noted)
    it = make(dummy(), slots=4 * chunks)
    first, second = it.request("a"), it.request("b")
    keys = it.store(prompt(1, chunks), first)
    it.manager.on_request_finished(first)
    it.settle()
    sent.clear()
    assert it.scan(keys, second) == (chunks, False)
    assert len(slots_of(it.manager.prepare_load(keys, second))) == chunks
    it.step(new=["b"])
    it.manager.complete_load(keys, second)
    it.step()
    it.manager.on_request_finished(second)
    it.check_idle()
    assert sent == [[Touch(0, keys)]]


def test_store_may_come_first(make: Make) -> None:
    it = make(slots=8)
    assert it.store(prompt(1, 4), it.request("a")) == prompt(1, 4)
    assert it.find(prompt(1, 4), it.request("b")) == 4


def test_unfilled_chunks_miss(make: Make) -> None:
    status_table = StatusTable(memoryview(bytearray(status_table_bytes(8, 2))), slots=8, workers=2)
    it = make(slots=8, workers=status_table)
    context = it.request("a")
    output = it.manager.prepare_store(prompt(1, 4), context)
    assert output is not None
    it.write(output)
    slots = slots_of(output.store_spec)
    status_table.rows[0].mark(slots[2:3], Unfilled.INCOMPLETE)
    status_table.rows[1].mark(slots[3:], Unfilled.CHANGED)
    it.manager.complete_store(set(output.keys_to_store), context)
    assert it.find(prompt(1, 4), it.request("b")) == 2
    assert len(it.core.table.free) == 6
    counts = it.core.shared.counts
    assert [counts["dropped", "store", why] for why in ("incomplete", "changed", "failed")] == [1, 1, 0]


@pytest.mark.parametrize("why", [Unfilled.FAILED, Unfilled.CHANGED])
def test_audits_skip_changed_blocks(make: Make, why: Unfilled) -> None:
    status_table = StatusTable(memoryview(bytearray(status_table_bytes(8, 1))), slots=8, workers=1)
    it = make(slots=8, workers=status_table)
    context = it.request("a")
    for seed in (1, 2):  # the second store gets the slot of the first one
        output = it.manager.prepare_store(prompt(seed, 1), context)
        assert output is not None
        if seed == 1:
            it.slot_checksums.blame(slots_of(output.store_spec)[0], 0, Fault.COPY)
            status_table.rows[0].count(StatusField.AUDITS_FAILED)
            status_table.rows[0].mark(slots_of(output.store_spec), why)
        it.manager.complete_store(set(output.keys_to_store), context)
        assert it.core.refusal == ("audit" if why is Unfilled.FAILED else None)
        if it.core.refusal:
            return
    assert it.find(prompt(2, 1), context) == 1


@pytest.mark.parametrize(
    ("keys", "counts"),
    [
        ([], []),
        ([pack_key(b"a"), pack_key(b"b")], [2]),
        ([pack_key(b"a", 1)], [0, 1]),
        ([pack_key(b"a"), pack_key(b"a", 2), pack_key(b"b", 2)], [1, 0, 2]),
    ],
)
def test_workers_know_chunks_per_group(make: Make, keys: list[OffloadKey], counts: list[int]) -> None:
    it = make(slots=8)
    output = it.manager.prepare_store(keys, it.request("a"))
    assert output is not None
    assert isinstance(output.store_spec, Slots)
    assert output.store_spec.chunks == counts


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_failed_store_waits_for_device(make: Make, is_lost: bool, is_reset: bool) -> None:
    status_table = StatusTable(memoryview(bytearray(status_table_bytes(8, 1))), slots=8, workers=1)
    it = make(dummy(), slots=8, workers=status_table)
    context = it.request("a")
    output = it.manager.prepare_store(prompt(1, 8), context)
    assert output is not None
    if is_lost:
        status_table.rows[0][StatusField.LOST] = 1
    status_table.rows[0].mark(slots_of(output.store_spec))
    if is_reset:
        it.manager.reset_cache()
        it.manager.on_reset_flushed()
    else:
        it.manager.complete_store(set(prompt(1, 8)), context)
    assert len(it.core.table.free) == (0 if is_lost else 8)
    assert it.find(prompt(1, 8), context) == 0
    assert it.core.shared.counts["dropped", "store", "failed"] == 8


def test_lowest_priority_shows_uses(make: Make) -> None:
    """The device may hold the front of the prompt, which vLLM offers only under the policy "chunk_level"."""
    it = make(slots=8)
    low = ReqContext(req_id="low", kv_transfer_params={"kvtier": {"priority": 0}})
    assert it.manager.on_new_request(low).policy == OffloadPolicy("chunk_level")
    it.store(prompt(1, 2), low)
    other = ReqContext(req_id="other")
    assert it.manager.on_new_request(other).policy == OffloadPolicy("request_level")
    it.manager.prepare_store(prompt(1, 2), other)
    it.request("the lowest priority is gone")
    high = ReqContext(req_id="high", kv_transfer_params={"kvtier": {"priority": 2}})
    assert it.manager.on_new_request(high).policy == OffloadPolicy("request_level")
    it.check_idle()


PREFILL = {"do_remote_decode": True}


def test_claims_end_with_their_requests(make: Make) -> None:
    it = make()
    context = ReqContext(req_id="same", kv_transfer_params={"kvtier": {"pin": "agent", "ttl_s": 0.001}})
    for _ in range(2):  # an earlier request with this id has not ended
        it.manager.on_new_request(context)
        it.store(prompt(1, 2), context)
        it.step()
        assert len(it.core.claims.pinned) == 2
    it.manager.on_request_finished(context)
    time.sleep(0.002)
    it.step()
    assert it.core.claims.is_empty


def test_decode_wait_covers_put(make: Make) -> None:
    it = make(dummy(), slots=8, limits=Limits(max_wait_s=3600.0))
    (tier,) = it.core.shared.tiers
    told = it.manager.response_params("a", PREFILL)
    assert told is not None
    assert told["kvtier"]["wait_s"] > tier.deadline_s, "puts begin after the response"
    assert it.manager.response_params("a", {}) is None
    assert make(slots=8).manager.response_params("a", PREFILL) is None, "there is no tier"


def test_tiers_get_prefill_address(make: Make) -> None:
    peer = "10.0.0.1:18570"
    limits = Limits(max_wait_s=3600.0)
    it = make(dummy(), dummy(), slots=8, limits=limits, addresses={1: peer}, peers=[peer])
    told = it.manager.response_params("a", PREFILL)
    assert told is not None
    assert told["kvtier"]["from"] == ["10.0.0.1:18570"]
    it.core.on_event(TierDown(1, "gone"), 0.0)
    assert "from" not in (it.manager.response_params("a", PREFILL) or {})["kvtier"]
    it.manager.on_new_request(ReqContext(req_id="b", kv_transfer_params=told))
    assert it.manager.requests["b"].addresses == ("10.0.0.1:18570",)


@pytest.mark.parametrize("how", ["reset", "down", "audit", "refused", "disabled", "request"])
def test_decode_skips_unput_chunks(make: Make, how: str) -> None:
    it = make(dummy(), slots=8)
    if how == "reset":
        it.manager.reset_cache()
    elif how == "down":
        it.core.on_event(TierDown(0, "gone"), 0.0)
    elif how == "audit":
        it.core.disable_after_audit(0, "in a test")
    elif how == "disabled":
        it.core.disable_after_audit(None, "in a test")
    elif how == "request":
        it.why_not_stored = "pruned"
    else:
        it.core.refusal = "device_lost"
    assert it.manager.response_params("a", PREFILL) is None


def test_reset_stops_stores(make: Make) -> None:
    """Their blocks have the old weights, and the device's prefix cache shares them with other requests."""
    it = make(slots=32)
    running = it.request("running")
    it.step(new=["running"])
    it.has_blocks = True
    it.manager.reset_cache()
    for context in (running, it.request("new")):
        assert it.store(prompt(1, 4), context) == []
    assert it.core.shared.counts["store_refused", "reset"] == 8
    it.has_blocks = False
    it.manager.reset_cache()
    it.step(preempted=["running"])  # after the reset
    for name, context in enumerate([running, it.request("newer")]):
        assert (
            it.find(prompt(name, 4), context) == 0
        )  # vLLM looks a preempted request up before it runs again
        assert it.store(prompt(name, 4), context) == prompt(name, 4)


@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.parametrize("ends_first", [True, False])
def test_ended_requests_store_no_old_blocks(make: Make, is_reset: bool, ends_first: bool) -> None:
    """vLLM offers the last chunks of a request in the step after its end, which another request may begin."""
    it = make(slots=32)
    ended = it.request("ended")
    it.step(new=["ended"])
    it.has_blocks = not ends_first
    (it.manager.reset_cache if is_reset else it.manager.on_new_weights)()
    it.has_blocks = False  # after its end, and a reset of the device alone
    new = it.request("new")
    it.step(new=["new"])
    assert it.store(prompt(1, 4), ended) == []
    assert it.core.shared.counts["store_refused", "reset"] == 4
    assert it.store(prompt(1, 4), new) == prompt(1, 4)


@pytest.mark.parametrize("refusal", ["device_lost", "audit"])
def test_unstored_chunks_are_counted(make: Make, refusal: str) -> None:
    it = make(slots=8)
    it.core.refusal = refusal
    assert it.store(prompt(1, 4), it.request("a")) == []
    assert it.core.shared.counts["store_refused", refusal] == 4


@pytest.mark.skipif(REPORTS_RESET_FLUSH, reason="this vLLM says when workers are through")
@pytest.mark.parametrize("steps_ahead", [2, 5])
def test_slots_held_for_steps_ahead(make: Make, steps_ahead: int) -> None:
    """A pipeline has one step in flight per stage, so copies end later."""
    it = make(slots=8, steps_ahead=steps_ahead)
    output = it.manager.prepare_store(prompt(1, 8), it.request("a"))
    assert output is not None
    it.manager.reset_cache()
    for _ in range(steps_ahead):
        it.step(preempted=["a"])
        assert it.manager.has_pending_work()
        assert it.manager.prepare_store(prompt(2, 1), it.request("b")) is None
    it.step()
    assert not it.manager.has_pending_work()


@pytest.mark.parametrize("self_describing", [False, True])
def test_fetched_chunks_announced_once(make: Make, tmp_path: Path, self_describing: bool) -> None:
    before = make(files(tmp_path))
    before.store(prompt(1, 4), before.request("a"))
    before.settle()
    before.manager.shutdown()
    it = make(files(tmp_path), self_describing=self_describing)
    context = it.request("b")
    assert it.find(prompt(1, 4), context) == 4
    found = [
        (Medium.STORAGE, False, "fs0", set(prompt(1, 4))),
        (Medium.CPU, False, None, set(prompt(1, 4))),
    ]
    told = _told(it) if not self_describing else []
    assert _told(it) == []  # vLLM does not know yet that a request loads them
    it.manager.prepare_load(prompt(1, 4), context)
    told += _told(it)
    assert sorted(told, key=str) == sorted(found, key=str)
    assert _told(it) == []


def test_loads_leave_nothing_without_events(make: Make) -> None:
    it = make(self_describing=True, kv_events=False)
    it.store(prompt(1, 4), it.request("a"))
    it.settle()
    it.manager.prepare_load(prompt(1, 4), it.request("b"))
    assert _told(it) == []
    assert not it.manager._published.stream._describable


def _told(it: World) -> list[tuple[Medium, bool, str | None, set[OffloadKey]]]:
    events = it.manager.take_events()
    return [(event.medium, event.removed, event.ownership, set(event.keys)) for event in events]


def _indexed(keys: Sequence[OffloadKey], events: Iterable[OffloadingEvent]) -> dict[str | None, int]:
    """Return how many blocks of a prompt a router indexes, by tier; it drops a block without a parent."""
    indexed: defaultdict[str | None, set[OffloadKey]] = defaultdict(set)
    for event in events:
        known = indexed[event.ownership]
        for key in event.keys:
            place = keys.index(key)
            if place == 0 or keys[place - 1] in known:
                known.add(key)
    return {owner: len(known) for owner, known in indexed.items()}


def test_router_indexes_after_restart(make: Make, tmp_path: Path) -> None:
    before = make(files(tmp_path))
    before.store(prompt(1, 16), before.request("a"))
    before.settle()
    before.manager.shutdown()
    it = make(files(tmp_path), slots=64, self_describing=True)
    context = it.request("b")
    assert it.find(prompt(1, 16), context) == 16
    it.manager.prepare_load(prompt(1, 16), context)
    assert _indexed(prompt(1, 16), it.manager.take_events()) == {"fs0": 16, None: 16}


def test_child_waits_for_parent() -> None:
    stream, keys = EventStream(["fs0"], self_describing=True), prompt(1, 8)
    assert list(stream.events([KVEvent(keys[:4], 0, removed=False, found=True)])) == []
    stream.loaded(keys)
    late = stream.events([KVEvent(keys[4:], 0, removed=False, found=True)])
    assert _indexed(keys, late) == {"fs0": 8}


def test_found_chunks_told_after_store() -> None:
    stream, keys = EventStream(["fs0"], self_describing=True), prompt(1, 4)
    assert list(stream.events([KVEvent(keys, 0, removed=False, found=True)])) == []
    told = stream.events([KVEvent(keys, None, removed=False)])
    assert _indexed(keys, told) == {None: 4, "fs0": 4}


def test_shutdown_is_idempotent(make: Make) -> None:
    it = make(dummy())
    context = it.request("a")
    it.store(prompt(1, 2), context)
    it.manager.shutdown()
    it.manager.shutdown()
    assert it.shutdowns == 1
    it.scan(prompt(2, 2), context)
    it.step()
    it.step()
    assert it.scan(prompt(2, 2), context) == (0, False)
    it.manager.reset_cache()
    it.manager.on_request_finished(context)
    it.step()


# --- a random scheduler --------------------------------------------------------------------------


FILTERS = [
    TierFilter(),
    *(TierFilter((TierMatcher(medium, None),)) for medium in (Medium.CPU, Medium.STORAGE)),
]


class Job:
    """A request on its way through the scheduler."""

    def __init__(self, name: int, keys: list[OffloadKey], context: ReqContext) -> None:
        self.name = name
        self.keys = keys
        self.context = context
        self.state = "waiting"
        self.starts = 0
        self.weights = 0  # the step that started it


class Scheduler:
    """Acts as vLLM's scheduler of some version; random wherever vLLM's behaviour may vary."""

    def __init__(self, it: World, seed: int, version: str) -> None:
        self.it = it
        self.chance = random.Random(seed)
        self.version = version
        self.jobs: list[Job] = []
        self.copies: list[
            tuple[int, Callable[[], None], list[int]]
        ] = []  # step in which the copy ends, the request's end, slots
        self.cut_off: list[tuple[int, list[int]]] = []  # last step in which workers write, slots
        self.weights = 0
        self.steps = 0
        self.reset: list[str] = []  # requests that a reset preempted since the last step
        self.loaded = 0
        self.requests = 0
        self.stats = OffloadingConnectorStats()
        self.belief: defaultdict[object, set[OffloadKey]] = defaultdict(set)

    def run(self, *, until_loaded: int) -> None:
        """Let requests arrive for at least 400 steps, and until ``until_loaded`` chunks were loaded."""
        end = time.monotonic() + PATIENCE_S
        while self.steps < 400 or self.loaded < until_loaded:
            assert time.monotonic() < end, self.loaded
            self.step(arriving=True)

    def end(self) -> None:
        """Let all requests and copies end."""
        end = time.monotonic() + PATIENCE_S
        while self.jobs or self.copies or self.cut_off:
            assert time.monotonic() < end, [job.state for job in self.jobs]
            self.step(arriving=False)

    def step(self, *, arriving: bool) -> None:
        manager = self.it.manager
        self.steps += 1
        if arriving and len(self.jobs) < 8:
            self._arrive()
        preempted = self._preempt()
        started = [job for job in self.jobs if job.state == "waiting" and self._schedule(job)]
        new, resumed = [str(job.name) for job in started if job.starts == 1], [str(job) for job in preempted]
        ended = ScheduleEndContext(new, resumed + self.reset)
        self.reset = []
        if self.version == "0.32":
            manager.on_schedule_end(ended)
        for job in [job for job in self.jobs if job.state == "running"]:
            self._run(job)
        if self.version == "0.33":
            manager.on_schedule_end(ended)
        self._work()
        if arriving and self.chance.random() < 0.02:
            self._reset()
        stats = manager.get_stats()
        if stats is not None:
            self.stats.aggregate(stats)
        self._follow(manager.take_events())
        invariants.check(self.it.core)
        if self.chance.random() < 0.3:
            time.sleep(0.0005)  # the tiers may answer at any point

    def _follow(self, events: Iterable[OffloadingEvent]) -> None:
        """Update the belief from the published events, as a router does."""
        for event in events:
            believed = self.belief[event.medium, event.ownership]
            if event.removed:
                assert believed >= set(event.keys), "removed once, and after it was stored"
                believed -= set(event.keys)
            else:
                assert believed.isdisjoint(event.keys), "stored once"
                believed |= set(event.keys)

    def _arrive(self) -> None:
        self.requests += 1
        name, length = self.chance.randrange(6), self.chance.randrange(1, 14)
        keys = (prompt(100, 6) + prompt(name, 8))[:length]
        wanted = self.chance.choice([TierFilter.ALL] * 3 + FILTERS)
        self.jobs.append(Job(self.requests, keys, self.it.request(str(self.requests), wanted)))

    def _preempt(self) -> list[int]:
        """Take the blocks of a running request; it waits again, and vLLM may look it up in the same step."""
        running = [job for job in self.jobs if job.state == "running" and self.chance.random() < 0.05]
        for job in running:
            job.state = "waiting"
        return [job.name for job in running]

    def _schedule(self, job: Job) -> bool:
        """Look up a waiting request, load its hits and run it."""
        found, wait = self.it.scan(job.keys, job.context)
        self._breathe()
        if wait or self.chance.random() < 0.1:  # the lookup is pending, or there are no free blocks
            return False
        if found:
            self._load(job, job.keys[:found])
        job.state = "loading" if found else "running"
        job.starts += 1
        job.weights = self.weights
        return True

    def _load(self, job: Job, keys: list[OffloadKey]) -> None:
        spec = self.it.manager.prepare_load(keys, job.context)
        for key in keys:
            self.it.manager.get_load_source(key, job.context)
        weights = self.weights

        def end() -> None:
            assert self.it.read(spec) == [content(key, weights) for key in keys]
            self.loaded += len(keys)
            self.it.manager.complete_load(set(keys), job.context)
            job.state = "running"

        self._copy(end, [])

    def _run(self, job: Job) -> None:
        output = self.it.manager.prepare_store(job.keys, job.context)
        if output is None and self.chance.random() < 0.5:
            return  # vLLM offers it again in the next step
        if output is not None and output.keys_to_store:
            self._store(job, output)
        self._finish(job)

    def _store(self, job: Job, output: PrepareStoreOutput) -> None:
        def end() -> None:
            self.it.write(output, job.weights)
            self.it.manager.complete_store(set(output.keys_to_store), job.context)

        self._copy(end, slots_of(output.store_spec))

    def _finish(self, job: Job) -> None:
        self.it.manager.on_request_finished(job.context)
        self.jobs.remove(job)

    def _copy(self, end: Callable[[], None], written: list[int]) -> None:
        self.copies.append((self.steps + self.chance.randrange(3), end, written))

    def _work(self) -> None:
        """Act as the workers: end copies that are due, and continue those that a reset cut off."""
        due = [copy for copy in self.copies if copy[0] <= self.steps]
        self.copies = [copy for copy in self.copies if copy[0] > self.steps]
        self.chance.shuffle(due)
        for _, end, _ in due:
            end()
            self._breathe()
        had = bool(self.cut_off)
        for _, slots in self.cut_off:
            for slot in slots:
                self.it.region.view(slot)[:] = bytes(CHUNK_BYTES)
        self.cut_off = [(until, slots) for until, slots in self.cut_off if until > self.steps]
        if had and not self.cut_off and self.version == "0.33":
            self.it.manager.on_reset_flushed()

    def _reset(self) -> None:
        """Load new weights: vLLM preempts all running requests and forgets the copies in flight.

        While a request loads, vLLM refuses the reset; without preemption vLLM's own reset fails.
        """
        is_loading = any(job.state == "loading" for job in self.jobs)
        self.it.has_blocks = is_loading
        self.it.manager.reset_cache()
        self.weights += 1
        self.cut_off += [(self.steps + 2, written) for _, _, written in self.copies]
        self.copies.clear()
        for job in self.jobs:
            if job.state == "running" and not is_loading:
                self.reset.append(str(job.name))
                job.state = "waiting"
            elif job.state == "loading":
                job.state = "running"

    def _breathe(self) -> None:
        if self.chance.random() < 0.1:
            time.sleep(0.0005)


@pytest.mark.parametrize("version", ["0.33"] if REPORTS_RESET_FLUSH else ["0.32", "0.33"])
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_corrupt_nothing(make: Make, version: str, seed: int, tmp_path: Path) -> None:
    faults = {"failure_rate": 0.1, "corruption_rate": 0.1, "complete_index": seed % 2 == 0, "seed": seed}
    latencies = {"put_latency_s": 0.001, "get_latency_s": 0.001}
    tiers: list[AnyTier] = [dummy(**faults, **latencies)]
    if seed % 3:
        tiers.append(files(tmp_path))
    deadline_s = 0.05 if seed < 3 else 5.0
    it = make(*tiers, slots=20, limits=Limits(request_deadline_s=deadline_s), self_describing=seed % 2 == 1)
    scheduler = Scheduler(it, seed, version)
    scheduler.run(until_loaded=100)
    scheduler.end()
    it.check_idle()
    declared = KVTierOffloadingSpec.build_metric_definitions({})
    for name, values in scheduler.stats.data["data"].items():
        assert all(len(labels) == len(declared[name].labelnames) for labels in values), name
