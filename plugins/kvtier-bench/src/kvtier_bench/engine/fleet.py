"""An engine that is asked for prompts which another one computed, over each tier that both share.

Pairs of engines, all alive at once: in each pair the first computes prompts, and the second is asked for the
same ones when the first has stored them. They share only the tier, not even a tier process. Then the first is
asked again, and has them on its device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    Engine,
    Sample,
    block_bytes,
    make_prompt,
    measure,
    open_engines,
    spread_of_median,
)
from kvtier_bench.engine.server import free_port
from kvtier_bench.machine import Machine, files_below, open_folder

FILES, NIXL, COMPUTED, DEVICE = "files", "nixl", "computed", "device"
PROMPT_TOKENS, OUTPUT_TOKENS, CHUNK_TOKENS = 1280, 8, 256
_ROOM = 20  # size of primary tiers, and of a tier's own memory, in prompts of a round
_SECOND = "{} (second)"


@dataclass(frozen=True)
class Served:
    """Time to the first token of the second engine, by the tier that it shares with the first

    Attributes:
        way: the tier; ``computed`` is the first engine, which finds nothing and computes; ``device`` is the
            first engine when it is asked again.
        ttft_ms: median over rounds of the median over prompts.
        ratio: the time divided by the time with files in the same round; median over rounds.
        low, high: 95 % of the medians of resampled rounds lie between them.
        from_cache: prompt tokens that the engine did not compute, of all.
        wrong: answers that differ from the first engine's, of all.
    """

    way: str
    ttft_ms: float
    ratio: float
    low: float
    high: float
    from_cache: str
    wrong: str


class Answers(NamedTuple):
    """The results of a pair's engines in one round."""

    first: Sample
    second: Sample
    again: Sample


@dataclass(frozen=True)
class Work:
    """The workload of each pair in each round"""

    model: str
    rounds: int
    prompts: int = 4

    def of_round(self, way: str, number: int) -> list[list[int]]:
        """Return the prompts, which no other round and no other pair has."""
        return [make_prompt(f"{way} {number} {i}", PROMPT_TOKENS) for i in range(self.prompts)]

    @property
    def bytes_in_all(self) -> int:
        """Bytes that a pair stores in all of its rounds."""
        blocks = self.prompts * PROMPT_TOKENS // BLOCK_TOKENS
        return (self.rounds + 1) * blocks * block_bytes(self.model)


def run(root: Path | None, work: Work, tiers: Sequence[str], *, nixl: bool) -> list[Served | Work | Machine]:
    """Measure.

    Args:
        root: directory for the files, which are removed afterwards. Default: a temporary one.
        tiers: settings of tiers, as JSON; both engines of a pair get the same.
        nixl: whether one more pair reads each other's memory over NIXL.
    """
    with open_folder(root) as folder, open_folder(None) as logs:
        machine = Machine.here(folder)
        ways = {FILES: (files_below(folder),) * 2}
        for way, pair in [*map(_way, tiers), *([(NIXL, _peers(work))] if nixl else [])]:
            if way in ways:
                raise ConfigError(f"--tier: there are two with the type {way!r}; name each type once")
            ways[way] = pair
        settings = {
            name: _connector(tier, work)
            for way, pair in ways.items()
            for name, tier in zip((way, _SECOND.format(way)), pair, strict=True)
        }
        length = PROMPT_TOKENS + OUTPUT_TOKENS
        blocks = (work.prompts + 1) * -(-length // BLOCK_TOKENS)
        arguments: dict[str, Any] = {"max_model_len": length, "num_gpu_blocks_override": blocks}
        with open_engines(logs, work.model, settings, **arguments) as engines:
            firsts = {way: engines[way] for way in ways}
            answers: dict[str, list[Answers]] = {way: [] for way in ways}
            measure(
                firsts,
                range(-1, work.rounds),
                lambda way, first, number: _ask(
                    first, engines[_SECOND.format(way)], work.of_round(way, number), answers[way]
                ),
            )
    return [*table({way: rows[1:] for way, rows in answers.items()}), work, machine.again()]


def _ask(first: Engine, second: Engine, prompts: Sequence[Sequence[int]], answers: list[Answers]) -> Sample:
    """Have the first engine compute and store, ask the second, and the first again; return the second's."""
    found = []
    for engine in (first, second, first):
        answer = engine.ask("generate", prompts=prompts, output_tokens=OUTPUT_TOKENS, together=False)
        counts = {"cached": sum(answer["cached"])}
        sample = Sample(answer["wall_s"], answer["ttft_s"], answer["answers"], counts)
        found.append(sample)
        engine.ask("settle")
    answers.append(Answers(*found))
    return found[1]


def table(answers: Mapping[str, Sequence[Answers]]) -> list[Served]:
    """Compare each way with files, round by round."""
    base = [median(it.second.ttft_s) for it in answers[FILES]]
    firsts = {way: [it.first for it in found] for way, found in answers.items()}
    rows = {way: [it.second for it in found] for way, found in answers.items()}
    served = [_served(way, rows[way], firsts[way], base) for way in answers]
    again = [it.again for it in answers[FILES]]
    return [
        *served,
        _served(COMPUTED, firsts[FILES], firsts[FILES], base),
        _served(DEVICE, again, firsts[FILES], base),
    ]


def _served(way: str, rows: Sequence[Sample], firsts: Sequence[Sample], base: Sequence[float]) -> Served:
    times = [median(row.ttft_s) for row in rows]
    ratios = [time / one for time, one in zip(times, base, strict=True)]
    low, high = spread_of_median(ratios)
    answers = [
        pair
        for row, first in zip(rows, firsts, strict=True)
        for pair in zip(row.answers, first.answers, strict=True)
    ]
    cached = sum(row.counts["cached"] for row in rows)
    return Served(
        way,
        ttft_ms=median(times) * 1e3,
        ratio=median(ratios),
        low=low,
        high=high,
        from_cache=f"{cached:.0f} of {PROMPT_TOKENS * len(answers)}",
        wrong=f"{sum(mine != its for mine, its in answers)} of {len(answers)}",
    )


def _way(text: str) -> tuple[str, tuple[dict[str, Any], dict[str, Any]]]:
    try:
        tier = json.loads(text)
        return tier["type"], (tier, tier)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--tier {text!r} is not a tier's settings as JSON with a type: {error!r}"
        ) from None


def _peers(work: Work) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of two engines that read from each other's memory."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    common = {"type": "nixl", "peers": addresses, "serve_bytes": work.bytes_in_all}
    return {**common, "listen": addresses[0]}, {**common, "listen": addresses[1]}


def _connector(tier: Mapping[str, Any], work: Work) -> dict[str, Any]:
    return {
        "spec_name": "KVTierOffloadingSpec",
        "cpu_bytes_to_use": work.bytes_in_all,
        "block_size": CHUNK_TOKENS,
        "secondary_tiers": [dict(tier)],
    }
