"""Load or compute: time to the first token while a tier is throttled, and after it has recovered.

Three engines get the same prompts one at a time, in turns: one without a connector, one that loads everything
found in its tier (``load_gate`` ``off``), and one that chooses (``latency``). This module slows the tier down
in the engines' processes. The device cache and the primary tier hold about one prompt each.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import anyio

from kvtier.keys import OffloadKey
from kvtier.tiers import Batch, Outcome, SecondaryTier
from kvtier.tiers._registry import load
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    PLAIN,
    Engine,
    Settings,
    block_bytes,
    kv_groups,
    make_prompt,
    measure,
    open_engines,
    say,
    spread_of_median,
)
from kvtier_bench.engine.compared import Sample as Answered
from kvtier_bench.machine import Machine, open_folder

ALWAYS, GATED = "off", "latency"
FAST, BANDWIDTH, LATENCY, NEAR = "fast", "20 MB/s", "0.5 s latency", "50 ms latency"
THROTTLES: Mapping[str, Mapping[str, float]] = {
    FAST: {"bytes_s": 0.0, "latency_s": 0.0},
    BANDWIDTH: {"bytes_s": 20e6, "latency_s": 0.0},
    LATENCY: {"bytes_s": 0.0, "latency_s": 0.5},
    NEAR: {"bytes_s": 0.0, "latency_s": 0.05},
}
PHASES = (FAST, BANDWIDTH, FAST, LATENCY, FAST, NEAR)
PAUSE_S = 1.0  # pause between two requests after a throttle has ended, to simulate low traffic
PATIENCE_S = 60.0


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token, without the first requests of each phase.

    Attributes:
        phase: the tier's speed.
        load_gate: the engine's setting; none if it has no connector.
        p50_ms, p95_ms: percentiles of the requests.
        ratio: this engine's time divided by the better median of the other two; median over requests.
        low, high: bounds of the central 95 % of the medians of resampled requests.
        loaded: requests that loaded chunks from the tier, out of all.
        first_ms: slowest of the first requests, which the figures above exclude.
        wrong: answers that differ from the answers of the engine without a connector.
    """

    phase: str
    load_gate: str
    p50_ms: float
    p95_ms: float
    ratio: float
    low: float
    high: float
    loaded: str
    first_ms: float
    wrong: int


@dataclass(frozen=True)
class Recovery:
    """After a throttle has ended, with a request a second: until one was loaded."""

    after: str
    seconds: float
    requests: int


@dataclass(frozen=True)
class Work:
    """The workload of each engine in each phase"""

    model: str
    requests: int
    tier: str  # the tier's settings, as JSON
    warmup: int = 20
    prompts: int = 8
    prompt_tokens: int = 2016
    output_tokens: int = 2

    @property
    def blocks(self) -> int:
        """Blocks of one prompt, in all KV cache groups."""
        return -(-(self.prompt_tokens + self.output_tokens) // BLOCK_TOKENS) * kv_groups(self.model)

    def prompt(self, number: int) -> list[int]:
        """Return the prompt of a request. Each prompt recurs after the caches have evicted it."""
        return make_prompt(f"gate {number % self.prompts}", self.prompt_tokens)


def run(work: Work) -> list[FirstToken | Recovery | Work | Machine]:
    """Measure."""
    machine = Machine.here()
    records: list[FirstToken | Recovery] = []
    with open_folder(None) as logs:
        arguments: dict[str, Any] = {
            "num_gpu_blocks_override": work.blocks * 5 // 4,
            "max_model_len": work.prompt_tokens + work.output_tokens + BLOCK_TOKENS,
        }
        settings = {PLAIN: None, ALWAYS: _settings(work, ALWAYS), GATED: _settings(work, GATED)}
        with open_engines(logs, work.model, settings, **arguments) as engines:
            numbers = itertools.count()
            for number in itertools.islice(numbers, work.prompts):
                for engine in engines.values():
                    _ask(engine, work, number)
            for before, phase in itertools.pairwise(("", *PHASES)):
                _throttle(engines, work, phase)
                if before and phase == FAST:
                    records.append(_recover(engines[GATED], work, before, numbers))
                records += _measure(engines, work, phase, next(numbers))
    return [*records, work, machine.again()]


def _settings(work: Work, mode: str) -> Settings:
    # one prompt is being loaded while another is being put
    primary_bytes = 2 * work.blocks * block_bytes(work.model)
    return {
        "spec_name": "KVTierOffloadingSpec",
        "cpu_bytes_to_use": primary_bytes,
        "eviction_policy": "lru",  # other policies would keep parts of recurring prompts
        "block_size": BLOCK_TOKENS,
        "promotion_budget": 1.0,
        "isolation": "thread",
        "load_gate": mode,
        "namespace": mode,  # both engines may share the tier
        "secondary_tiers": [json.loads(work.tier)],
    }


def _throttle(engines: Mapping[str, Engine], work: Work, phase: str) -> None:
    say(f"the tier is {phase} now")
    for name, engine in engines.items():
        if name != PLAIN:
            arguments = {**THROTTLES[phase], "tier": json.loads(work.tier)["type"]}
            engine.ask("call", module=__name__, function="throttle", arguments=arguments)


def _ask(engine: Engine, work: Work, number: int) -> Answered:
    before = _loaded(engine)
    answer = engine.ask("generate", prompts=[work.prompt(number)], output_tokens=work.output_tokens)
    engine.ask("settle")
    counts = {"loaded": _loaded(engine) - before}
    return Answered(answer["wall_s"], answer["ttft_s"], answer["answers"], counts)


def _loaded(engine: Engine) -> float:
    samples = engine.ask("metrics")["samples"]
    return sum(
        value
        for name, labels, value in samples
        if name == "kvtier_loaded_chunks_total" and labels["tier"] != "cpu"
    )


def _recover(engine: Engine, work: Work, before: str, numbers: Any) -> Recovery:
    started = time.monotonic()
    for count, number in enumerate(numbers, 1):
        found = _ask(engine, work, number)
        seconds = time.monotonic() - started
        if found.counts["loaded"] or seconds > PATIENCE_S:
            return Recovery(before, seconds, count)
        time.sleep(PAUSE_S)
    raise AssertionError("numbers do not end")


def _measure(engines: Mapping[str, Engine], work: Work, phase: str, first: int) -> list[FirstToken]:
    ask = lambda _, engine, number: _ask(engine, work, first + number)  # noqa: E731
    samples = measure(engines, range(work.warmup + work.requests), ask)
    late = {name: [row.ttft_s[0] for row in rows[work.warmup :]] for name, rows in samples.items()}
    best_s = min(median(late[PLAIN]), median(late[ALWAYS]))
    return [_first_token(phase, name, samples, late[name], best_s, work.warmup) for name in samples]


def _first_token(
    phase: str,
    name: str,
    samples: Mapping[str, Sequence[Answered]],
    ttft_s: Sequence[float],
    best_s: float,
    warmup: int,
) -> FirstToken:
    rows, low_high = samples[name], spread_of_median(ttft_s)
    pairs = zip(rows, samples[PLAIN], strict=True)
    return FirstToken(
        phase,
        name,
        p50_ms=median(ttft_s) * 1e3,
        p95_ms=sorted(ttft_s)[int(0.95 * (len(ttft_s) - 1))] * 1e3,
        ratio=median(ttft_s) / best_s,
        low=low_high[0] / best_s,
        high=low_high[1] / best_s,
        loaded=f"{sum(row.counts['loaded'] > 0 for row in rows[warmup:])} of {len(ttft_s)}",
        first_ms=max(row.ttft_s[0] for row in rows[:warmup]) * 1e3,
        wrong=sum(row.answers != plain.answers for row, plain in pairs),
    )


# --- in the engine's process ---------------------------------------------------------------------


class _Link:
    """The slow link to the tier, which delays its gets and lookups."""

    bytes_s = 0.0
    latency_s = 0.0
    lock: anyio.Lock | None = None
    slowed: ClassVar[set[str]] = set()  # types of tiers


def throttle(llm: object, bytes_s: float, latency_s: float, tier: str = "dummy") -> dict[str, Any]:  # noqa: ARG001
    """Throttle every tier of a type in this process; 0 removes the limit."""
    _Link.bytes_s, _Link.latency_s = bytes_s, latency_s
    if tier not in _Link.slowed:
        _Link.slowed.add(tier)
        _slow_down(load(tier))
    return {}


def _slow_down(made: Any) -> None:
    get, contains = made.get, made.contains

    async def throttled_get(tier: SecondaryTier[Any], batch: Batch) -> Outcome:
        await anyio.sleep(_Link.latency_s)
        if _Link.bytes_s:
            _Link.lock = _Link.lock or anyio.Lock()
            async with _Link.lock:
                await anyio.sleep(sum(view.nbytes for view in batch.views) / _Link.bytes_s)
        outcome: Outcome = await get(tier, batch)
        return outcome

    async def throttled_contains(tier: SecondaryTier[Any], keys: Sequence[OffloadKey]) -> Sequence[bool]:
        await anyio.sleep(_Link.latency_s)
        found: Sequence[bool] = await contains(tier, keys)
        return found

    made.get, made.contains = throttled_get, throttled_contains
