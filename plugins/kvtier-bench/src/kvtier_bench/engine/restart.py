"""Restarts of real engines over kept host memory, and the cost of keeping it while an engine runs."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvtier_bench.engine.compared import (
    START_S,
    Engine,
    Sample,
    Settings,
    engine_arguments,
    make_model,
    make_prompt,
    measure,
    open_engines,
    say,
    spread_of_median,
)
from kvtier_bench.machine import Machine, drop_from_page_cache, family, files_below, open_folder, processor_s

KEPT, FILES, NOTHING = "kept memory", "files", "nothing"
HOST_BYTES = 512 * 2**20
KEEP, NO_MORE = {"keep_host_memory_s": 300}, {"keep_host_memory_s": 0.1}  # seconds
PROMPTS, PROMPT_TOKENS = 4, 1280
AT_ONCE, WORK_TOKENS, OUTPUT_TOKENS = 8, 1024, 8
PAIRS = 5  # in each round
WARM_UP = -1  # the warm-up round, which does not count
ARGUMENTS: Mapping[str, Any] = {"num_gpu_blocks_override": 640, "max_model_len": 1536}


@dataclass(frozen=True)
class FirstHit:
    """An engine is killed and starts again: medians over restarts, without its imports

    Attributes:
        way: source of the prompts that the previous engine answered.
        ready_s: seconds until the engine accepts requests.
        first_s: seconds until the first token of the first such prompt.
        ttft_ms: time to the first token of the other prompts.
        from_cache: prompt tokens that were not computed, out of all.
        wrong: answers that differ from the previous engine's, out of all.
        n: number of restarts.
    """

    way: str
    ready_s: float
    first_s: float
    ttft_ms: float
    from_cache: str
    wrong: str
    n: int


@dataclass(frozen=True)
class Keeping:
    """Cost of `keep_host_memory_s`: engines with and without it store the same prompts, in turns

    Attributes:
        tiers: secondary tiers of both engines.
        lost_percent: percent of the throughput; median over pairs.
        low, high: bounds of the central 95 % of the medians of resampled pairs.
        tokens_s: prompt tokens per second without it.
        tier_us: additional processor time of the tier process per stored chunk, in microseconds.
        core_percent: the same as a percentage of one core while the engine computes.
        cpu_percent: additional processor time of all processes, in percent.
        chunks: number of chunks stored in each run.
    """

    tiers: str
    lost_percent: float
    low: float
    high: float
    tokens_s: float
    tier_us: float
    core_percent: float
    cpu_percent: float
    chunks: int


@dataclass(frozen=True)
class _Restart:
    ready_s: float
    first_s: float
    ttft_s: Sequence[float]
    cached: int
    wrong: int


def run(size: str, rounds: int) -> list[FirstHit | Keeping | Machine]:
    """Measure engines with a model of this size."""
    with open_folder(None) as folder:
        machine = Machine.here(folder)
        restarts = _Restarts(folder, size)
        for number in range(rounds + 1):
            for way in random.Random(number).sample([KEPT, FILES, NOTHING], 3):
                restarts.restart(way, number, is_last=number == rounds)
        return [*restarts.table(), *_keeping(folder, size, rounds), machine.again()]


class _Restarts:
    """Engines that are killed and restarted on the memory and files they left behind."""

    def __init__(self, folder: Path, size: str) -> None:
        self._folder = folder
        self._model = make_model(folder, size)
        self._expected: dict[str, Sequence[Sequence[int]]] = {}
        self._found: dict[str, list[_Restart]] = {KEPT: [], FILES: [], NOTHING: []}

    def restart(self, way: str, number: int, *, is_last: bool) -> None:
        """Start an engine, send it the previous engine's prompts and then new ones, and kill it."""
        say(f"start {number}: {way}")
        files = self._folder / "restarted"
        settings = _settings(files if way == FILES else None)
        if way == KEPT:
            settings = {**settings, **(NO_MORE if is_last else KEEP)}
        with Engine(f"{way}-{number}", self._folder) as engine:
            engine.ask("load", START_S)
            drop_from_page_cache(files)
            began_s = time.perf_counter()
            arguments = engine_arguments(self._model, settings, ARGUMENTS)
            engine.ask("start", START_S, arguments=arguments, at_once=True)
            ready_s = time.perf_counter() - began_s
            if number:
                self._found[way].append(self._ask(engine, way, number - 1, ready_s))
            self._expected[way] = _generate(engine, number)["answers"]
            engine.ask("settle")
            engine.kill()

    def _ask(self, engine: Engine, way: str, number: int, ready_s: float) -> _Restart:
        answer = _generate(engine, number)
        first_s, *others_s = answer["ttft_s"]
        pairs = zip(answer["answers"], self._expected[way], strict=True)
        wrong = sum(said != expected for said, expected in pairs)
        say(f"first token after {ready_s + first_s:.2f} s")
        return _Restart(ready_s, ready_s + first_s, others_s, sum(answer["cached"]), wrong)

    def table(self) -> list[FirstHit]:
        """Return the figures for each way."""
        return [
            FirstHit(
                way,
                ready_s=median(row.ready_s for row in rows),
                first_s=median(row.first_s for row in rows),
                ttft_ms=1e3 * median(ttft_s for row in rows for ttft_s in row.ttft_s),
                from_cache=f"{sum(row.cached for row in rows)} of {len(rows) * PROMPTS * PROMPT_TOKENS}",
                wrong=f"{sum(row.wrong for row in rows)} of {len(rows) * PROMPTS}",
                n=len(rows),
            )
            for way, rows in self._found.items()
        ]


def _generate(engine: Engine, number: int) -> dict[str, Any]:
    prompts = [make_prompt(f"restart {number} {i}", PROMPT_TOKENS) for i in range(PROMPTS)]
    return engine.ask("generate", prompts=prompts, output_tokens=OUTPUT_TOKENS, together=False)


def _settings(files: Path | None) -> Settings:
    tiers = [] if files is None else [files_below(files)]
    return {"spec_name": "KVTierOffloadingSpec", "cpu_bytes_to_use": HOST_BYTES, "secondary_tiers": tiers}


def _keeping(folder: Path, size: str, rounds: int) -> list[Keeping]:
    found = []
    for tiers in (NOTHING, FILES):
        settings: dict[str, Settings] = {}
        for name, more in ((tiers, {}), (f"{tiers}, kept", NO_MORE)):
            settings[name] = {**_settings(folder / name if tiers == FILES else None), **more}
        with open_engines(folder, size, settings, **ARGUMENTS) as engines:
            samples = measure(engines, range(WARM_UP, PAIRS * rounds), _store)
        found.append(compare(tiers, *samples.values()))
    return found


def _store(_: str, engine: Engine, number: int) -> Sample:
    """Send prompts to an engine; return times and counts from then until all chunks are stored."""
    before = _counts(engine)
    prompts = [make_prompt(f"keeping {number} {i}", WORK_TOKENS) for i in range(AT_ONCE)]
    answer = engine.ask("generate", prompts=prompts, output_tokens=OUTPUT_TOKENS)
    engine.ask("settle")
    counts = {name: value - before[name] for name, value in _counts(engine).items()}
    return Sample(answer["wall_s"], answers=answer["answers"], counts=counts)


def _counts(engine: Engine) -> dict[str, float]:
    own, *others = family(engine.pid)
    samples = engine.ask("metrics")["samples"]
    stored = sum(value for name, _, value in samples if name == "kvtier_stored_chunks_total")
    tier_s = sum(map(processor_s, others))
    return {"cpu_s": processor_s(own) + tier_s, "tier_s": tier_s, "chunks": stored}


def compare(tiers: str, without: Sequence[Sample], kept: Sequence[Sample]) -> Keeping:
    """Compare engines that keep their host memory with engines that do not, pair by pair."""
    pairs = [*zip(without, kept, strict=True)]
    lost = [100 * (1 - one.wall_s / two.wall_s) for one, two in pairs]
    tier_s = [two.counts["tier_s"] - one.counts["tier_s"] for one, two in pairs]
    low, high = spread_of_median(lost)
    return Keeping(
        tiers,
        median(lost),
        low,
        high,
        tokens_s=median(AT_ONCE * WORK_TOKENS / one.wall_s for one in without),
        tier_us=median(1e6 * more / two.counts["chunks"] for more, two in zip(tier_s, kept, strict=True)),
        core_percent=median(100 * more / two.wall_s for more, two in zip(tier_s, kept, strict=True)),
        cpu_percent=median(100 * (two.counts["cpu_s"] / one.counts["cpu_s"] - 1) for one, two in pairs),
        chunks=round(median(two.counts["chunks"] for two in kept)),
    )
