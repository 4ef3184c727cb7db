"""The engine's computing speed, measured from vLLM's calls in each step. Needs no vLLM."""

from __future__ import annotations

import pytest

from kvtier._core.tiering import Tiering
from kvtier.adapters.vllm._telemetry.steps import StepMeter
from kvtier.keys import OffloadKey
from tests.unit.core import world
from tests.unit.core.world import keys

CHUNK_S = 0.01


class Context:
    """A request, whose chunks have sixteen tokens each."""

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id
        groups = (keys(req_id, 100, group) for group in range(2))
        self._ends = {key: 16 * (index + 1) for chunks in groups for index, key in enumerate(chunks)}

    def get_offload_key_position(self, key: OffloadKey) -> int | None:
        return self._ends.get(key)


class Engine:
    """Steps as vLLM makes them, with its own clock."""

    def __init__(self, *, stores_decodes: bool = False, ends_last: bool = False) -> None:
        self.core: Tiering = world.make(load_gate="latency")  # type: ignore[arg-type]
        self.now_s = 100.0
        self.meter = StepMeter(
            self.core, lambda: self.now_s, 16, group=0, stores_decodes=stores_decodes, ends_last=ends_last
        )
        self.first: dict[str, int] = {}  # the place of the first lookup of each request
        self._ends_last = ends_last

    def schedule(self, *offers: tuple[str, int, int]) -> None:
        """Schedule a step that offers chunks of requests, from one place to another."""
        if not self._ends_last:
            self.meter.start_step()
        for req_id, begin, end in offers:
            chunks = keys(req_id, end)
            first = keys(req_id, 100)[self.first.get(req_id, 0)]
            self.meter.offered(Context(req_id), chunks[begin:], first)
        if self._ends_last:
            self.meter.start_step()

    def step(self, seconds: float, *offers: tuple[str, int, int]) -> None:
        self.schedule(*offers)
        self.now_s += seconds
        self.meter.end_step()

    @property
    def chunk_s(self) -> float:
        """Return the core's estimate of a chunk's computing time."""
        return self.core.shared.gate.compute.seconds(1)

    @property
    def is_known(self) -> bool:
        return bool(self.core.shared.gate.compute.rates)


@pytest.mark.parametrize("ends_last", [False, True])
def test_step_is_its_offers(ends_last: bool) -> None:
    it = Engine(ends_last=ends_last)
    it.step(5.0)
    assert not it.is_known, "it has computed nothing"
    it.step(10.5 * CHUNK_S, ("a", 0, 10))
    assert it.chunk_s == pytest.approx(CHUNK_S), "half a chunk more, on average"
    it.step(0.001)
    it.step(10 * CHUNK_S, ("a", 10, 20))
    assert it.core.shared.gate.compute.rates[4] == pytest.approx(CHUNK_S), "further on in its prompt"


@pytest.mark.parametrize("ends_last", [False, True])
def test_steps_ahead_of_each_other(ends_last: bool) -> None:
    """Asynchronous scheduling: the next step is scheduled before the last one has ended."""
    it = Engine(ends_last=ends_last)
    it.schedule(("a", 0, 10))
    for req_id in "bcd":
        it.schedule((req_id, 0, 10))
        it.now_s += 10.5 * CHUNK_S
        it.meter.end_step()
        assert it.chunk_s == pytest.approx(CHUNK_S)


def test_idle_time_does_not_count() -> None:
    it = Engine()
    it.step(10.5 * CHUNK_S, ("a", 0, 10))
    it.now_s += 1000.0
    it.step(10.5 * CHUNK_S, ("b", 0, 10))
    assert it.chunk_s == pytest.approx(CHUNK_S)


def test_repeated_offer_counts_once() -> None:
    it = Engine()
    it.step(10.5 * CHUNK_S, ("a", 0, 10))
    for _ in range(3):
        it.step(0.0001, ("a", 0, 10))
    assert it.chunk_s == pytest.approx(CHUNK_S)


def test_engine_hits_do_not_count() -> None:
    """vLLM offers those chunks, too: of a prompt of 100 chunks with its first lookup at 90, ten are
    computed."""
    it = Engine()
    for req_id in "abcdef":
        it.first[req_id] = 90
        it.step(10.5 * CHUNK_S, (req_id, 0, 100))
    rates = it.core.shared.gate.compute.rates
    assert rates[(95).bit_length()] == pytest.approx(CHUNK_S)


def test_chunk_after_hit_does_not_count() -> None:
    """vLLM recomputes a prompt's last chunk for sliding-window models: that time is a step's overhead."""
    it = Engine()
    it.step(20.5 * CHUNK_S, ("a", 0, 20))
    for req_id in "bcdef":
        it.meter.loaded(Context(req_id), keys(req_id, 19))
        it.step(5 * CHUNK_S, (req_id, 0, 20))
    assert it.core.shared.gate.compute.rates == pytest.approx([CHUNK_S] * 5)


def test_other_groups_do_not_count() -> None:
    it = Engine()
    it.meter.start_step()
    a, first = Context("a"), keys("a")[0]
    it.meter.offered(a, [*keys("a", 10), *keys("a", 10, group=1)], first)
    it.meter.offered(a, keys("a", 20, group=1), first)
    it.now_s += 10.5 * CHUNK_S
    it.meter.end_step()
    assert it.chunk_s == pytest.approx(CHUNK_S)
    assert it.meter.place(a, keys("a", 4)[3]) == 3


def test_preempted_is_computed_anew() -> None:
    it = Engine()
    it.step(10.5 * CHUNK_S, ("a", 0, 10))
    it.meter.forget("a")
    for _ in range(2):
        it.step(0.0001, ("b", 0, 0))
    it.step(2 * 10.5 * CHUNK_S, ("a", 0, 10))
    assert it.chunk_s > CHUNK_S


def test_no_position_no_measure() -> None:
    it = Engine()
    it.meter.start_step()
    it.meter.offered(Context("a"), keys("a", 10), None)
    it.meter.offered(Context("b"), keys("a", 10), keys("a")[0])
    it.now_s += 1.0
    it.meter.end_step()
    assert not it.is_known


def test_generated_chunks_do_not_count() -> None:
    it = Engine(stores_decodes=True)
    it.step(10.5 * CHUNK_S, ("a", 0, 10))
    for place in range(10, 15):
        it.step(0.0001, ("a", place, place + 1))
    assert it.chunk_s == pytest.approx(CHUNK_S)


def test_no_statistics_no_measure() -> None:
    it = Engine()
    for number in range(100):
        it.schedule((f"{number}", 0, 10))
    assert not it.is_known
