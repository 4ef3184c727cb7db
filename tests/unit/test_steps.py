"""How fast the engine computes, from the calls that vLLM makes in each step. Needs no vLLM."""

from __future__ import annotations

import pytest

from kvtier._core.tiering import Tiering
from kvtier.adapters.vllm._steps import StepMeter
from tests.unit.core import world
from tests.unit.core.world import keys

CHUNK_S = 0.01


class Engine:
    """Steps as vLLM makes them, with a clock of its own."""

    def __init__(self, *, stores_decodes: bool = False, ends_last: bool = False) -> None:
        self.core: Tiering = world.make(load_gate="latency")  # type: ignore[arg-type]
        self.now_s = 100.0
        self.meter = StepMeter(
            self.core, lambda: self.now_s, stores_decodes=stores_decodes, ends_last=ends_last
        )
        self._ends_last = ends_last

    def schedule(self, *offers: tuple[str, int], again: bool = False) -> None:
        """Schedule a step that completes so many chunks of each request."""
        if not self._ends_last:
            self.meter.begin()
        for req_id, count in offers:
            self.meter.computed(req_id, keys(req_id, count), again=again)
        if self._ends_last:
            self.meter.begin()

    def step(self, seconds: float, *offers: tuple[str, int], again: bool = False) -> None:
        self.schedule(*offers, again=again)
        self.now_s += seconds
        self.meter.end()

    @property
    def chunk_s(self) -> float:
        """What the core takes a chunk to cost."""
        return self.core.shared.gate.compute.seconds(1)

    @property
    def is_known(self) -> bool:
        return bool(self.core.shared.gate.compute.rates)


@pytest.mark.parametrize("ends_last", [False, True])
def test_a_step_is_what_was_offered_in_it(ends_last: bool) -> None:
    it = Engine(ends_last=ends_last)
    it.step(5.0)
    assert not it.is_known, "it has computed nothing"
    it.step(10.5 * CHUNK_S, ("a", 10))
    assert it.chunk_s == pytest.approx(CHUNK_S), "half a chunk more, on average"
    it.step(0.001)
    it.step(10 * CHUNK_S, ("a", 10))
    assert it.core.shared.gate.compute.rates[4] == pytest.approx(CHUNK_S), "further on in its prompt"


@pytest.mark.parametrize("ends_last", [False, True])
def test_steps_ahead_of_each_other(ends_last: bool) -> None:
    """Asynchronous scheduling: the next step is scheduled before the last one has ended."""
    it = Engine(ends_last=ends_last)
    it.schedule(("a", 10))
    for req_id in "bcd":
        it.schedule((req_id, 10))
        it.now_s += 10.5 * CHUNK_S
        it.meter.end()
        assert it.chunk_s == pytest.approx(CHUNK_S)


def test_the_time_between_steps_does_not_count() -> None:
    it = Engine()
    it.step(10.5 * CHUNK_S, ("a", 10))
    it.now_s += 1000.0
    it.step(10.5 * CHUNK_S, ("b", 10))
    assert it.chunk_s == pytest.approx(CHUNK_S)


def test_what_is_offered_again_counts_once() -> None:
    it = Engine()
    it.step(10.5 * CHUNK_S, ("a", 10), again=True)
    it.step(0.0001, ("a", 10), again=True)
    it.step(0.0001, ("a", 10))
    assert it.chunk_s == pytest.approx(CHUNK_S)


def test_generated_chunks_do_not_count() -> None:
    it = Engine(stores_decodes=True)
    it.step(10.5 * CHUNK_S, ("a", 10))
    for _ in range(5):
        it.step(0.0001, ("a", 1))
    assert it.chunk_s == pytest.approx(CHUNK_S)


def test_an_engine_that_asks_for_no_statistics_measures_nothing() -> None:
    it = Engine()
    for number in range(100):
        it.schedule((f"{number}", 10))
    assert not it.is_known
