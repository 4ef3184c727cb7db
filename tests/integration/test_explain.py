"""Requests that ask for an explanation get one line each, and leave nothing behind.

The test calls the manager as vLLM's scheduler does. ``test_damage`` has the lines of a real engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.kv_offload.base import ReqContext

from kvtier._core.requests import Request
from kvtier._telemetry import explanation
from kvtier._telemetry.explanation import Explanation
from kvtier.adapters.vllm._telemetry.explain import Explainer
from kvtier.keys import OffloadKey, pack_key
from kvtier_tools.explain import read
from tests.integration.test_bridge import AnyTier, World, dummy, files, prompt

pytestmark = pytest.mark.releases

CHUNK_TOKENS = 16
ASKED = {"kvtier": {"explain": True}}
SAYS_WHERE = hasattr(ReqContext, "get_offload_key_position")


def _end(tokens: int) -> int | None:
    """Return the end of a prefix, if this vLLM reports where in a prompt a chunk is."""
    return tokens if SAYS_WHERE else None


class Ticking:
    """A clock that advances by a millisecond per reading."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Engine(World):
    """A manager, with the test in place of a scheduler whose requests are explained."""

    def __init__(self, *tiers: AnyTier, rate: float = 0.0, chance: float = 0.5) -> None:
        names = [f"{tier.config.type}{index}" for index, tier in enumerate(tiers)]
        self.explainer = Explainer(names, {0: CHUNK_TOKENS}, rate, clock=Ticking(), chance=lambda: chance)
        super().__init__(*tiers, explainer=self.explainer)

    def arrives(self, name: str, keys: list[OffloadKey], params: Any = ASKED) -> ReqContext:
        context = ReqContext(req_id=name, kv_transfer_params=params)
        self.manager.on_new_request(context)
        if SAYS_WHERE:
            for place, key in enumerate(keys):
                context.set_offload_key_position(key, (place + 1) * CHUNK_TOKENS)
        return context

    def loads(self, keys: list[OffloadKey], context: ReqContext, *, fails: bool = False) -> None:
        found = keys[: self.find(keys, context)]
        if found:
            self.manager.prepare_load(found, context)
            self.step()
            if fails:
                self.manager.fail_loads([context.req_id])
            self.manager.complete_load(set(found), context)

    def serves(self, name: str, keys: list[OffloadKey], params: Any = ASKED) -> None:
        """Look a request up, load its hits, schedule it, store it and end it."""
        context = self.arrives(name, keys, params)
        self.loads(keys, context)
        self.step(new=[name])
        self.store(keys, context)
        self.settle()
        self.manager.on_request_finished(context)


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(*tiers: AnyTier, **more: Any) -> Engine:
            engine = Engine(*tiers, **more)
            stack.callback(engine.manager.shutdown)
            return engine

        yield make


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Explanation]]:
    """Return the explanations logged so far."""
    caplog.set_level(logging.INFO, logger=explanation.logger.name)

    def lines() -> list[Explanation]:
        found = list(read(record.getMessage().encode() for record in caplog.records))
        return [one for one in found if isinstance(one, Explanation)]

    return lines


Lines = Callable[[], list[Explanation]]


@pytest.mark.parametrize("call", ["complete_load", "complete_store"])
def test_request_id_forges_no_line(make: Make, call: str, caplog: pytest.LogCaptureFixture) -> None:
    it = make()
    getattr(it.manager, call)(set(), ReqContext(req_id="a\nERROR forged"))
    assert "ignored" in caplog.text
    assert "\nERROR forged" not in caplog.text


def test_line_tells_found_and_lost(make: Make, tmp_path: Path, lines: Lines) -> None:
    before, keys = make(files(tmp_path)), prompt(1, 6)
    before.serves("cold", keys[:4])
    before.serves("warm", keys)
    before.manager.shutdown()
    it = make(files(tmp_path))
    it.serves("restarted", [*keys, *prompt(2, 1)])

    cold, warm, restarted = lines()
    absent: dict[str, Any] = {"reason": "absent", "tiers": {"fs0": "absent"}}
    waited = [one.waited_s > 0 for one in (cold, warm, restarted)]
    assert waited == [True] * 3
    expected = [
        Explanation(request="cold", tokens={}, prefix_end=_end(0), waited_s=cold.waited_s, **absent),
        Explanation(
            request="warm", tokens={"cpu": 64}, prefix_end=_end(64), waited_s=warm.waited_s, **absent
        ),
        Explanation(
            request="restarted",
            tokens={"fs0": 96},
            prefix_end=_end(96),
            waited_s=restarted.waited_s,
            **absent,
        ),
    ]
    assert [cold, warm, restarted] == expected


def test_response_has_explanation(make: Make, lines: Lines) -> None:
    it, keys = make(rate=1.0), prompt(1, 4)
    it.serves("cold", keys)
    for name, params in (("asked", ASKED), ("drawn", None)):
        it.loads(keys, it.arrives(name, keys, params))
        assert it.manager.response_params(name, params) is None, "it is not scheduled yet"
        it.step(new=[name])
    told = it.manager.response_params("asked", ASKED)
    assert told is not None
    assert Explanation(**told["kvtier"]["explained"]) == lines()[1]
    assert it.manager.response_params("drawn", None) is None, "its client would not know what that is"
    it.manager.on_request_finished(ReqContext(req_id="asked"))
    assert it.manager.response_params("asked", ASKED) is None


def test_full_prompt_has_no_reason(make: Make, lines: Lines) -> None:
    it, keys = make(), prompt(1, 4)
    it.serves("cold", keys)
    it.serves("warm", keys)
    cold, warm = lines()
    assert (cold.reason, cold.tiers) == ("absent", {})
    assert (warm.tokens, warm.prefix_end, warm.reason) == ({"cpu": 64}, _end(64), None)


def test_failed_load_is_the_reason(make: Make, lines: Lines) -> None:
    it, keys = make(), prompt(1, 4)
    it.serves("cold", keys, None)
    context = it.arrives("a", keys)
    it.loads(keys, context, fails=True)
    assert it.scan(keys, context) == (0, False)
    it.step(new=["a"])
    (line,) = lines()
    assert (line.tokens, line.prefix_end, line.reason) == ({}, _end(0), "load_failed")


def test_last_scan_gives_reason(make: Make, lines: Lines) -> None:
    it, keys = make(), prompt(1, 4)
    there, own = it.arrives("there", keys), it.arrives("own", keys)
    for context in (there, own):
        assert it.scan(keys, context) == (0, False)
    it.step()
    it.serves("other", keys, None)
    it.loads(keys, there)
    it.step(new=["there", "own"])  # the engine's own cache has all of "own" by now: no lookup
    found = {line.request: (line.tokens, line.prefix_end, line.reason) for line in lines()}
    assert found == {"there": ({"cpu": 64}, _end(64), None), "own": ({}, None, None)}


@pytest.mark.skipif(not SAYS_WHERE, reason="this vLLM does not say where in a prompt a chunk is")
def test_prefix_ends_between_chunks(make: Make, lines: Lines) -> None:
    it, keys, (boundary,) = make(), prompt(1, 4), prompt(2, 1)
    it.serves("cold", keys[:2], None)
    context = it.arrives("warm", keys)
    context.set_offload_key_position(boundary, 2 * CHUNK_TOKENS + 8)
    found = keys[: it.find(keys, context)]
    it.scan([boundary], context)  # vLLM looks it up after the whole chunks, in the same step
    it.manager.prepare_load(found, context)
    it.step()
    it.manager.complete_load(set(found), context)
    it.step(new=["warm"])
    (line,) = lines()
    assert (line.tokens, line.prefix_end, line.reason) == ({"cpu": 32}, 32, "absent")
    reached = it.arrives("short", keys[:2])
    reached.set_offload_key_position(boundary, 2 * CHUNK_TOKENS + 8)
    assert it.scan(keys[:2], reached) == (2, False)
    it.scan([boundary], reached)
    it.manager.prepare_load(keys[:2], reached)
    it.step()
    it.manager.complete_load(set(keys[:2]), reached)
    it.step(new=["short"])
    assert (lines()[-1].prefix_end, lines()[-1].reason) == (32, None)


BOUNDARY = 2 * CHUNK_TOKENS + 8
LAST_FROM = {"dummy0": {"cpu": 16, "dummy0": 24}, "cpu": {"cpu": 40}}


@pytest.mark.skipif(not SAYS_WHERE, reason="this vLLM does not say where in a prompt a chunk is")
@pytest.mark.parametrize("last_from", LAST_FROM)
def test_shared_tokens_count_once(make: Make, last_from: str) -> None:
    """Two groups: full attention, and recurrent state with only its last two chunks stored."""
    it = make(dummy())
    it.explainer = Explainer(["dummy0"], {0: CHUNK_TOKENS, 1: CHUNK_TOKENS})
    context = ReqContext(req_id="hybrid", kv_transfer_params=ASKED)
    it.explainer.follow(context, Request("hybrid"), is_asked=True)
    attention, state = (
        [pack_key(bytes([group, number]) * 16, group) for number in range(3)] for group in (0, 1)
    )
    keys = [*attention, *state[1:]]
    for place in range(3):
        for key in (attention[place], state[place]):
            context.set_offload_key_position(key, min((place + 1) * CHUNK_TOKENS, BOUNDARY))
    origin = 0 if last_from == "dummy0" else None
    it.explainer.loaded("hybrid", keys, [None, None, None, origin, origin])
    tracked = it.explainer.tracked["hybrid"]
    assert (tracked.tokens, tracked.end) == (LAST_FROM[last_from], BOUNDARY)


@pytest.mark.skipif(not SAYS_WHERE, reason="this vLLM does not say where in a prompt a chunk is")
def test_excess_chunks_do_not_count(make: Make) -> None:
    it = make()
    it.explainer = Explainer([], {0: CHUNK_TOKENS, 1: 4 * CHUNK_TOKENS})
    context = ReqContext(req_id="mixed", kv_transfer_params=ASKED)
    it.explainer.follow(context, Request("mixed"), is_asked=True)
    keys = [*(pack_key(bytes([number]) * 32) for number in range(3)), pack_key(b"w" * 32, 1)]
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, (place + 1) * CHUNK_TOKENS)
    it.explainer.loaded("mixed", keys, [None] * 4)
    tracked = it.explainer.tracked["mixed"]
    assert (tracked.tokens, tracked.end) == ({"cpu": 48}, 48)


def test_preempted_explained_once(make: Make, lines: Lines) -> None:
    it, keys = make(dummy()), prompt(1, 2)
    context = it.arrives("a", keys)
    it.loads(keys, context)
    it.step(new=["a"])
    it.step(preempted=["a"])
    it.loads(keys, context)
    it.step()
    assert len(lines()) == 1
    assert it.explainer.tracked == {}


def test_unscheduled_leaves_nothing(make: Make, lines: Lines) -> None:
    it = make(dummy())
    for number in range(50):
        context = it.arrives(f"aborted-{number}", keys := prompt(number, 3))
        it.scan(keys, context)
        if number % 2:
            it.step()
        it.manager.on_request_finished(context)
    assert it.explainer.tracked == {}
    it.check_idle()
    assert lines() == []


@pytest.mark.parametrize(("chance", "explained"), [(0.05, ["any", "asked"]), (0.5, ["asked"])])
def test_share_is_explained_unasked(make: Make, lines: Lines, chance: float, explained: list[str]) -> None:
    it = make(rate=0.1, chance=chance)
    it.serves("any", prompt(1, 2), None)
    it.serves("asked", prompt(1, 2))
    assert [one.request for one in lines()] == explained


def test_silent_requests_are_not_followed(make: Make, lines: Lines) -> None:
    it = make()
    params: Any
    for params in (None, {}, {"max_load_tokens": 8}, {"kvtier": {}}, {"kvtier": {"explain": False}}):
        it.arrives("a", prompt(1, 2), params)
        assert it.explainer.tracked == {}
        it.serves("b", prompt(1, 2), params)
    assert lines() == []


def test_unknown_hides_nothing_known(make: Make, lines: Lines) -> None:
    it = make()
    it.serves("a", prompt(1, 2), {"kvtier": {"explain": True, "later": 1}})
    assert len(lines()) == 1


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The exporter of a provider that the engine configured."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_refused_lookup_has_span(make: Make, exporter: InMemorySpanExporter) -> None:
    it = make()
    it.core.refusal = "device_lost"
    context = it.arrives("refused", prompt(1, 2), None)
    assert it.scan(prompt(1, 2), context) == (0, False)
    it.step(new=["refused"])
    (span,) = exporter.get_finished_spans()
    assert (span.name, (span.attributes or {})["kvtier.reason"]) == ("kvtier.lookup", "device_lost")


def test_unfinished_load_has_span(make: Make, exporter: InMemorySpanExporter) -> None:
    it, keys = make(), prompt(1, 2)
    it.serves("cold", keys, None)
    it.manager.prepare_load(keys[: it.find(keys, context := it.arrives("warm", keys, None))], context)
    it.manager.shutdown()
    last = exporter.get_finished_spans()[-1]
    assert (last.name, last.status.is_ok) == ("kvtier.load", False)


def test_step_sees_its_requests_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it, looked = make(dummy()), []
    contexts = [it.arrives(str(number), prompt(number, 2)) for number in range(20)]
    for number, context in enumerate(contexts):
        it.scan(prompt(number, 2), context)
    it.step()
    is_waiting = Request.is_waiting

    def counted(request: Request) -> bool:
        looked.append(request.name)
        return bool(is_waiting.__get__(request))

    monkeypatch.setattr(Request, "is_waiting", property(counted))
    it.explainer.step_ended([])
    assert looked == []
    it.explainer.step_ended(["7"])
    assert looked == ["7"]
    assert len(it.explainer.tracked) == 19


def test_spans_match_the_line(make: Make, lines: Lines, exporter: InMemorySpanExporter) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    it.serves("cold", keys)
    it.serves("warm", keys, None)
    for tier in it.core.shared.tiers:
        assert tier.works
    spans = exporter.get_finished_spans()
    named = [(span.name, (span.attributes or {}).get("gen_ai.request.id")) for span in spans]
    assert named == [
        ("kvtier.promotion", "cold"),
        ("kvtier.lookup", "cold"),
        ("kvtier.put", "cold"),
        ("kvtier.load", "warm"),
        ("kvtier.lookup", "warm"),
    ]
    cold, warm = (span for span in spans if span.name == "kvtier.lookup")
    (event,) = cold.events
    assert dict(event.attributes or {}) == dict(cold.attributes or {})
    assert (cold.attributes or {})["kvtier.missing.dummy0"] == "absent"
    assert (warm.attributes or {})["kvtier.tokens.cpu"] == 64
    assert (warm.start_time or 0) <= (warm.end_time or 0)
    assert warm.events == ()
    assert [one.request for one in lines()] == ["cold"]
    it.check_idle()
