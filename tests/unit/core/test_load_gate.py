"""Load or compute: the estimates, the rule for given numbers, and the core's use of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier._core.messages import Get, GetEnded
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.load_gate import ComputeSpeed, LoadGate, LoadGateMode, TierSpeed
from kvtier_testing import invariants
from tests.unit.core import world
from tests.unit.core.world import BAD, COPIED, GOOD, HIT, LOCATED, MISS, MISSING, PENDING, RETRY, keys

CHUNK_S = 0.01  # to compute one
FAST_S, SLOW_S = 0.001, 0.05  # duration of a get of one chunk


def make(mode: LoadGateMode = "latency", tiers: int = 1) -> Tiering:
    """Return a core that knows how fast the device computes."""
    core = world.make(64, tiers, budget=1.0, load_gate=mode)  # type: ignore[arg-type]
    core.note_computed(0, 10, 10 * CHUNK_S)
    return core


def know(
    core: Tiering, chunk_s: float, tier: int = 0, *, latency_s: float = 1e-9, is_probed: bool = False
) -> None:
    """Have the core know how fast a tier is, and perhaps that a probe of it is due."""
    speed = core.shared.gate._tiers[tier]
    speed.chunk_s, speed.latency_s, speed.is_closed = chunk_s, latency_s, is_probed
    speed.probe_from_s = 0.0 if is_probed else 1e9


def end(core: Tiering, get: Get, elapsed_s: float, now_s: float) -> list[Get]:
    """End a get that has copied all that it had slots for, and located the rest; return what follows."""
    answers = [COPIED] * len(get.slots) + [LOCATED] * (len(get.keys) - len(get.slots))
    core.on_event(GetEnded(get.id, answers, {}, elapsed_s, GOOD, "", elapsed_s), now_s)
    return world.fetches(core)


class Clocked:
    """A gate that knows how fast the device computes, and a tier whose gets come one after the other."""

    def __init__(self, chunk_s: float | None, mode: LoadGateMode = "latency") -> None:
        self.gate = LoadGate(mode, 1)
        self.now_s = 0.0
        if chunk_s is not None:
            self.gate.compute.note(0, 1, chunk_s)

    @property
    def speed(self) -> TierSpeed:
        return self.gate._tiers[0]

    def get(self, chunks: int, seconds: float) -> None:
        """Have a get begin and end."""
        self.now_s += 0.001 + seconds
        self.gate.get_ended(0, chunks, seconds, self.now_s)

    def expected_s(self, chunks: int) -> float:
        return self.speed.latency_s + chunks * self.speed.chunk_s

    def is_slower(self, count: int, place: int = 0) -> bool:
        return self.gate.decide_to_compute(0, count, 1, place, count, self.now_s)


# --- estimates -------------------------------------------------------------------------------------


def test_second_slow_get_counts() -> None:
    it = Clocked(None)
    for _ in range(10):
        it.get(10, 0.010)
    usual_s = it.expected_s(10)
    assert usual_s == pytest.approx(0.010)
    it.get(10, 5.0)
    it.gate.get_ended(0, 10, 5.0, it.now_s)  # of the same time
    assert it.expected_s(10) == usual_s
    it.get(10, 0.010)
    it.get(10, 5.0)
    assert it.expected_s(10) == pytest.approx(usual_s)
    it.get(10, 5.0)
    assert it.expected_s(10) == pytest.approx(5.0)


def test_sizes_tell_latency_from_bandwidth() -> None:
    it = Clocked(None)
    for _ in range(100):
        for chunks in (1, 64):
            it.get(chunks, 0.050 + chunks * 0.001)
    assert it.speed.latency_s == pytest.approx(0.050, rel=0.1)
    assert it.speed.chunk_s == pytest.approx(0.001, rel=0.1)


def test_place_gives_computing_time() -> None:
    compute = ComputeSpeed()
    compute.note(3, 4, 0.04)
    compute.note(100, 50, 1.0)
    assert compute.seconds(4) == pytest.approx(0.04)
    assert compute.seconds(110) - compute.seconds(100) == pytest.approx(0.2)
    assert compute.seconds(1000) == pytest.approx(64 * 0.01 + 936 * 0.02), "the nearest known place below"


def test_one_strange_step_is_ignored() -> None:
    compute = ComputeSpeed()
    compute.note(3, 4, 0.04)
    compute.note(3, 4, 4.0)
    assert compute.seconds(4) == pytest.approx(0.04)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 100.0)), max_size=30))
def test_estimates_are_usable(samples: list[tuple[int, float]]) -> None:
    it = Clocked(None)
    for chunks, seconds in samples:
        it.get(chunks, seconds)
        assert 0 < it.expected_s(chunks) < 1e3
        assert it.speed.latency_s > 0 < it.speed.chunk_s
        assert 1 <= it.gate.probe_size(0, it.now_s) <= 8


# --- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "while_idle", "while_busy"),
    [("latency", True, True), ("throughput", True, False), ("off", False, False)],
)
def test_modes(mode: LoadGateMode, *, while_idle: bool, while_busy: bool) -> None:
    it = Clocked(None, mode)
    assert not it.is_slower(8), "nothing is known"
    it.gate.compute.note(0, 1, CHUNK_S)
    assert not it.is_slower(8), "nothing is known of the tier"
    it.get(8, 8 * SLOW_S)
    assert it.is_slower(8) is while_idle
    it.gate.running.add("request")
    assert it.is_slower(8) is while_busy


@given(
    st.floats(1e-5, 10.0),
    st.floats(0.001, 0.3),
    st.integers(1, 200),
    st.floats(4.0, 1000.0),
    st.integers(0, 300),
)
def test_slow_tier_closes_gate(chunk_s: float, share: float, count: int, factor: float, place: int) -> None:
    """A tier quicker than the device is loaded from; throttled it is not, after two slow gets; and when the
    throttle ends it is again, after two probes at most."""
    it = Clocked(chunk_s)
    fast_s, slow_s = chunk_s * share, chunk_s * factor
    it.get(count, fast_s * count)
    assert not it.is_slower(count, place)
    for _ in range(2):
        it.get(count, slow_s * count)
    assert it.is_slower(count, place)
    for size in _probes(it, 8, count):
        it.get(size, slow_s * (count + size) / 2)
        assert it.is_slower(count, place)
    for size in _probes(it, 2, count):
        it.get(size, fast_s * size)
    assert not it.is_slower(count, place)


def _probes(it: Clocked, number: int, count: int) -> Iterator[int]:
    for _ in range(number):
        it.now_s += 5.0  # by then one is due
        size = it.gate.probe_size(0, it.now_s)
        assert 1 <= size <= 8
        it.gate.note_probe(0, it.now_s)
        assert it.gate.probe_size(0, it.now_s + 100.0) == 0, "one at a time"
        yield min(size, count)
        it.gate.note_probe_ended(0, it.now_s, found_any=True)


def test_probes_become_rare() -> None:
    it = Clocked(CHUNK_S)
    it.get(8, 8 * SLOW_S)
    assert it.is_slower(8)
    probes = []
    for tick in range(300):
        if it.gate.probe_size(0, it.now_s + tick / 10):
            it.gate.note_probe(0, it.now_s + tick / 10)
            it.gate.note_probe_ended(0, it.now_s + tick / 10, found_any=True)
            probes.append(tick / 10)
    assert probes == pytest.approx([0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 11.3, 16.3, 21.3, 26.3], abs=0.25)


@given(st.floats(1e-5, 10.0), st.lists(st.floats(0.9, 1.1), min_size=5, max_size=30))
def test_noise_causes_no_flapping(chunk_s: float, noise: list[float]) -> None:
    """Gets that take a fifth longer than computing, more or less, do not open it."""
    it = Clocked(chunk_s)
    it.get(10, 12 * chunk_s)
    for factor in noise:
        it.get(10, 12 * chunk_s * factor)
        assert it.is_slower(10)


# --- in the core -----------------------------------------------------------------------------------


def test_slow_tier_misses() -> None:
    core = make()
    know(core, SLOW_S)
    request, chunks = Request(), keys("a", 8)
    assert world.step(core, request, chunks) == []
    assert world.ask(core, request, chunks) == [MISS]
    core.settle(0.0)
    assert core.take_counts()["miss", "gate"] == 1


def test_slow_computing_loads_late_chunks() -> None:
    core = make()
    know(core, 2 * CHUNK_S)
    for _ in range(2):
        core.note_computed(20, 1, 4 * CHUNK_S)
    chunks = keys("a", 24)
    assert world.step(core, Request(), chunks[:8]) == []
    world.store(core, chunks[:16])
    (get,) = world.step(core, Request(), chunks)
    assert get.keys == chunks[16:]


def test_get_in_flight_is_joined() -> None:
    core = make()
    know(core, FAST_S)
    first, second, chunks = Request(), Request(), keys("a", 8)
    (get,) = world.step(core, first, chunks)
    know(core, SLOW_S)
    assert world.step(core, second, chunks) == []
    assert end(core, get, 0.4, 0.4) == []
    assert world.ask(core, second, chunks) == [HIT] * 8


def test_slow_front_is_computed() -> None:
    core = make()
    world.store(core, keys("other", 60))
    request, chunks = Request(), keys("a", 8)
    (get,) = world.step(core, request, chunks)
    assert len(get.slots) == 4
    assert end(core, get, 4 * SLOW_S, 0.2) == []
    assert len(core.table.visible) == 64, "nothing is evicted for what is not got"
    assert world.ask(core, request, chunks) == [HIT] * 4 + [MISS]
    core.settle(0.0)
    counts = core.take_counts()
    assert {name: count for name, count in counts.items() if name[0] == "miss"} == {("miss", "gate"): 1}
    invariants.check(core)


def test_closed_tier_is_not_probed() -> None:
    core = make()
    know(core, SLOW_S, is_probed=True)
    request, chunks = Request(), keys("a", 30)
    (probe,) = world.step(core, request, chunks)
    assert (len(probe.keys), len(probe.slots)) == (4, 4), "what takes a quarter of a second"
    assert world.ask(core, request, chunks) == [MISS], "the request does not wait for it"
    core.settle(0.0)
    assert world.step(core, Request(), keys("b", 8), 0.05) == [], "the next one comes later"
    assert end(core, probe, 4 * FAST_S, 2.0) == []
    assert world.there(core, chunks[:4]) == chunks[:4]
    (get,) = world.step(core, Request(), keys("b", 8), 2.1)
    assert len(get.keys) == 8, "the gate is open again"
    invariants.check(core)


def test_empty_probe_repeats_soon() -> None:
    core = make()
    know(core, SLOW_S, is_probed=True)
    (probe,) = world.step(core, Request(), keys("a", 8))
    core.on_event(GetEnded(probe.id, [MISSING] * len(probe.keys), {}, 0.0, GOOD, "", 0.001), 0.1)
    assert world.step(core, Request(), keys("b", 8), 0.2) == []
    assert len(world.step(core, Request(), keys("c", 8), 0.7)) == 1


def test_probed_chunk_may_be_stored() -> None:
    core = make()
    know(core, SLOW_S, is_probed=True)
    chunks = keys("a", 8)
    (probe,) = world.step(core, Request(), chunks)
    reservation = world.reserve(core, chunks)
    assert list(reservation.keys) == chunks
    core.commit(reservation, 0.1)
    (put,) = world.taken(core)
    assert list(put.keys) == chunks  # type: ignore[union-attr]
    assert end(core, probe, 0.4, 0.5) == []
    world.put_ends(core, put)  # type: ignore[arg-type]
    assert world.there(core, chunks) == chunks


def test_reset_forgets_probe() -> None:
    core = make()
    know(core, SLOW_S, is_probed=True)
    (probe,) = world.step(core, Request(), keys("a", 8))
    core.reset()
    core.take_commands()
    end(core, probe, 0.1, 0.1)
    assert world.there(core, keys("a", 8)) == []


def test_few_slots_are_not_slow() -> None:
    """A get of two chunks is slower than computing two, but twenty follow."""
    core = make()
    know(core, FAST_S, latency_s=5 * CHUNK_S)
    world.store(core, keys("other", 64))
    reservation = world.reserve(core, keys("more", 62))
    request, chunks = Request(), keys("a", 22)
    (get,) = world.step(core, request, chunks)
    assert not get.slots
    core.on_event(GetEnded(get.id, [LOCATED] * 22, {}, 0.0, GOOD), 0.1)
    (get,) = world.fetches(core)
    assert (len(get.keys), len(get.slots)) == (2, 2)
    core.abort(reservation)


def test_few_waiters_are_computed() -> None:
    """The device is busy with those in front. Those behind are loaded, if the tier is fast by then."""
    core = make()
    know(core, SLOW_S)
    requests = {Request(): keys(name, 8) for name in "abcde"}
    for request, chunks in requests.items():
        world.ask(core, request, chunks)
    core.settle(0.0)
    assert world.fetches(core) == []
    assert [len(request.why_absent) for request in requests] == [8, 8, 0, 0, 0], (
        "a tenth of a second of computing"
    )
    assert core.next_deadline_s() == pytest.approx(0.02)
    know(core, FAST_S)
    last = list(requests)[2:]
    for request in last:
        world.ask(core, request, requests[request])
    core.settle(0.1)
    assert [get.keys for get in world.fetches(core)] == [requests[request] for request in last]


def test_locating_doubles_latency() -> None:
    """Slots are freed only for chunks that were found: the first get finds them, a second one copies them."""
    for stored, is_got in ((0, True), (64, False)):
        core = make()
        world.store(core, keys("other", stored))
        know(core, FAST_S, latency_s=6 * CHUNK_S)
        assert bool(world.step(core, Request(), keys("a", 10))) is is_got


def test_queued_request_does_not_expire() -> None:
    """The device may take long to compute the chunks in front, and the engine does not ask meanwhile."""
    core = make()
    know(core, SLOW_S)
    requests = {Request(): keys(name, 8) for name in "abcde"}
    for request, chunks in requests.items():
        world.ask(core, request, chunks)
    for now_s in (0.0, 5.0, 10.0):
        core.settle(now_s)
    know(core, FAST_S)
    last = list(requests)[-1]
    world.ask(core, last, requests[last])
    core.settle(20.0)
    assert [get.keys for get in world.fetches(core)] == [requests[last]]


def test_places_count_from_front(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make()
    know(core, FAST_S)
    places: list[tuple[int, int]] = []
    decide = LoadGate.decide_to_compute

    def noted(gate: LoadGate, *asked: int) -> bool:
        places.append(asked[3:5])  # type: ignore[arg-type]
        return decide(gate, *asked)

    monkeypatch.setattr(LoadGate, "decide_to_compute", noted)
    chunks = keys("a", 30)
    world.store(core, chunks[:5])
    world.store(core, keys("other", 49))
    request = Request()
    request.base = 100
    (get,) = world.step(core, request, chunks)
    assert len(get.slots) == 10
    end(core, get, 10 * FAST_S, 0.1)
    assert places == [(105, 25), (115, 15)]


def test_probe_makes_room() -> None:
    """While a tier is closed all is computed and stored: no slot is free for long."""
    core = make()
    world.store(core, keys("other", 64))
    know(core, SLOW_S, is_probed=True)
    (probe,) = world.step(core, Request(), keys("a", 8))
    assert len(probe.slots) == 4


def test_empty_gets_close_tier() -> None:
    core = make()
    know(core, FAST_S)
    for now_s in (0.0, 3.0):
        request = Request()
        (get,) = world.step(core, request, keys(f"{now_s}", 8), now_s)
        event = GetEnded(get.id, [MISSING] * 8, {"timeout": 8}, 2.5, BAD, "", 2.5)
        core.on_event(event, now_s + 2.6)
    assert world.step(core, Request(), keys("a", 8), 6.0) == []


def test_locating_reports_slow_tier() -> None:
    core, request, chunks = make(), Request(locates=True), keys("a", 4)
    know(core, SLOW_S, is_probed=True)
    (get,) = world.step(core, request, chunks)
    assert (list(get.keys), list(get.slots)) == (chunks, [])
    assert end(core, get, 1.0, 1.0) == []
    world.ask(core, request, chunks)
    assert set(request.located) == set(chunks)
    assert not request.why_absent


def test_locating_passes_slow_tiers() -> None:
    core, loading, locating, chunks = make(tiers=2), Request(), Request(locates=True), keys("a", 4)
    know(core, FAST_S)
    know(core, SLOW_S, tier=1)
    (get,) = world.step(core, loading, chunks)
    assert world.step(core, locating, chunks) == []
    core.on_event(GetEnded(get.id, [MISSING] * 4, {}, 0.0, GOOD, "", 0.001), 0.1)
    (further,) = world.fetches(core)
    assert (further.tier, list(further.slots)) == (1, [])
    assert world.ask(core, loading, chunks) == [MISS]
    assert world.ask(core, locating, chunks)[0] is RETRY
    assert end(core, further, 0.1, 0.2) == []
    assert set(locating.located) == set(chunks)
    invariants.check(core)


# --- several groups --------------------------------------------------------------------------------


def make_windowed(window_chunks: int = 2) -> Tiering:
    core = world.make(64, 1, budget=1.0, windowed=frozenset({1}), load_gate="latency")  # type: ignore[arg-type]
    core.shared.gate.window_chunks = window_chunks
    core.note_computed(0, 10, 10 * CHUNK_S)
    return core


def scan(core: Tiering, request: Request, chunks: int) -> list[Lookup]:
    """Look a prompt up as vLLM does: the windows only as far as the prefix goes, and from the back."""
    answers = world.ask(core, request, keys("a", chunks))
    prefix = answers.index(MISS) if MISS in answers else chunks
    return answers + [core.lookup(key, request) for key in reversed(keys("a", prefix, group=1))]


def scanned(core: Tiering, request: Request, chunks: int, now_s: float = 0.0) -> list[Get]:
    """Look a prompt up; return the gets that follow."""
    scan(core, request, chunks)
    core.settle(now_s)
    return world.fetches(core)


def test_computed_front_skips_windows() -> None:
    core, request = make_windowed(), Request()
    know(core, SLOW_S)
    assert scanned(core, request, 8) == []
    assert scan(core, request, 8) == [MISS]
    core.settle(0.0)
    assert core.take_counts()["miss", "gate"] == 1
    invariants.check(core)


def test_windows_follow_loaded_front() -> None:
    core, request = make_windowed(), Request()
    know(core, FAST_S)
    front, windows = scanned(core, request, 8)
    assert (len(front.slots), len(windows.slots)) == (8, 0)
    for get in (front, windows):
        assert end(core, get, 8 * FAST_S, 0.1) == []
    assert scan(core, request, 8) == [HIT] * 8 + [PENDING] * 8
    core.settle(0.2)
    (get,) = world.fetches(core)
    assert get.keys == keys("a", 8, group=1)[::-1]


@pytest.mark.parametrize(("window_chunks", "is_got"), [(2, True), (8, False)])
def test_window_time_counts(window_chunks: int, is_got: bool) -> None:
    core = make_windowed(window_chunks)
    know(core, 0.6 * CHUNK_S)
    assert bool(scanned(core, Request(), 8)) is is_got


def test_prompt_bounds_windows() -> None:
    core = make_windowed(1000)
    know(core, 0.4 * CHUNK_S)
    assert len(scanned(core, Request(), 8)) == 2


def test_two_window_gets_cost_twice() -> None:
    """They are located before they are got."""
    core = make_windowed()
    know(core, FAST_S, latency_s=4 * CHUNK_S)
    assert scanned(core, Request(), 8) == []


@pytest.mark.parametrize(("chunk_s", "is_got"), [(3 * CHUNK_S, True), (5 * CHUNK_S, False)])
def test_window_saves_computing(chunk_s: float, is_got: bool) -> None:
    """Two chunks of windows, for a front of eight that is in the primary tier."""
    core, request = make_windowed(), Request()
    world.store(core, keys("a", 8))
    know(core, chunk_s)
    assert bool(scanned(core, request, 8)) is is_got
    answers = scan(core, request, 8)
    assert answers[:8] == [HIT] * 8
    assert answers[8:] == [RETRY if is_got else MISS] * 8
    invariants.check(core)


def test_window_tier_probes_windows() -> None:
    core = make_windowed()
    world.store(core, keys("a", 8))
    know(core, 5 * CHUNK_S, is_probed=True)
    (probe,) = scanned(core, Request(), 8)
    assert list(probe.keys) == keys("a", 8, group=1)[:3:-1], "the last ones, which are of use"
    assert len(probe.slots) == len(probe.keys)


def test_windows_only_load_all() -> None:
    core = make_windowed()
    know(core, SLOW_S)
    assert len(world.step(core, Request(), keys("a", 8, group=1))) == 1


def test_one_of_two_groups_is_computed() -> None:
    for chunk_s, is_got in ((0.4 * CHUNK_S, True), (0.6 * CHUNK_S, False)):
        core = make()
        know(core, chunk_s)
        assert bool(world.step(core, Request(), keys("a", 8) + keys("a", 8, group=1))) is is_got


def test_queued_request_seeks_no_windows() -> None:
    core = make_windowed()
    know(core, SLOW_S)
    requests = [Request() for _ in range(5)]
    for request in requests:
        scan(core, request, 8)
    core.settle(0.0)
    assert world.fetches(core) == []
    assert [len(request.why_absent) for request in requests] == [8, 8, 0, 0, 0]
