"""Time to the first token of prompts that another engine computed, for each tier that both engines share.

All pairs of engines run at once. In each pair, the first engine computes and stores prompts. Then the second
engine gets the same prompts. The two share only the tier, not even a tier process. Finally the first engine
gets the prompts again and finds them on its device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier_bench.engine import fleet_faults
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    Engine,
    Sample,
    Settings,
    block_bytes,
    make_prompt,
    measure,
    open_engines,
    spread_of_median,
)
from kvtier_bench.engine.fleet_faults import Fault, Faults, Seen
from kvtier_bench.engine.pair import OUTPUT_TOKENS, Pair, Way
from kvtier_bench.engine.server import free_port
from kvtier_bench.machine import Machine, files_below, open_folder

FILES, NIXL, COMPUTED, DEVICE = "files", "nixl", "computed", "device"
FETCH, KVCR = "nixl, kv.fetch", "KVCR, kv.fetch"
PROMPT_TOKENS, CHUNK_TOKENS = 1280, 256
_ROOM = 20  # Size of primary tiers and of a tier's own memory, counted in prompts of one round.
_SECOND = "{} (second)"


@dataclass(frozen=True)
class Served:
    """Time to the first token of the second engine, by the tier that it shares with the first

    Attributes:
        way: the tier, with ``kv.fetch`` if each request names the first engine as its source; ``computed`` is
            the first engine, which finds nothing and computes; ``device`` is the first engine when it gets
            the prompts again.
        ttft_ms: median over rounds of the median over prompts.
        ratio: the time divided by the time with files in the same round; median over rounds.
        low, high: bounds of the central 95 % of the medians of resampled rounds.
        from_cache: prompt tokens that the engine did not compute, out of all.
        wrong: answers that differ from the first engine's, out of all.
    """

    way: str
    ttft_ms: float
    ratio: float
    low: float
    high: float
    from_cache: str
    wrong: str


class Answers(NamedTuple):
    """The results of both engines of a pair in one round."""

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
        """Return the prompts, which are unique to this round and pair."""
        return [make_prompt(f"{way} {number} {i}", PROMPT_TOKENS) for i in range(self.prompts)]

    @property
    def bytes_in_all(self) -> int:
        """Number of bytes that a pair stores in all of its rounds."""
        blocks = self.prompts * PROMPT_TOKENS // BLOCK_TOKENS
        return (self.rounds + 1) * blocks * block_bytes(self.model)


def run(
    root: Path | None, work: Work, tiers: Sequence[str], *, nixl: bool, kvcr: str | None = None
) -> list[Served | Fault | Work | Machine]:
    """Measure.

    Args:
        root: directory for the files, which are removed afterwards; default: a temporary directory.
        tiers: settings of tiers, as JSON; both engines of a pair get the same.
        nixl: whether to add a pair whose engines read each other's memory over NIXL.
        kvcr: interpreter for all engines, with KVCR installed. Times and answers after faults are compared
            between KVCR and kvtier over NIXL, both with hints. KVCR's engines run after the others.
    """
    with open_folder(root) as folder, open_folder(None) as logs:
        machine = Machine.here(folder)
        ways = {FILES: _of_kvtier((files_below(folder),) * 2, work)}
        for name, tier in map(_parse, tiers):
            if name in ways:
                raise ConfigError(f"--tier: there are two with the type {name!r}; name each type once")
            ways[name] = _of_kvtier((tier, tier), work)
        if nixl or kvcr:
            ways[NIXL] = _peers(work)
        if kvcr is None:
            return [*table(_measure(logs, work, ways, sys.executable)), work, machine.again()]
        answers = _measure(logs, work, {**ways, FETCH: _HINTED[FETCH](work)}, kvcr)
        # KVCR runs alone, because a thread of NIXL spins in each of its engines and would slow the others.
        answers |= _measure(logs, work, {KVCR: _HINTED[KVCR](work)}, kvcr)
        faults = [fault for name, make in _HINTED.items() for fault in _fail(logs, work, name, make, kvcr)]
        return [*table(answers), *faults, work, machine.again()]


@contextmanager
def _open_pairs(logs: Path, work: Work, ways: Mapping[str, Way], python: str) -> Iterator[dict[str, Pair]]:
    settings = {
        name: one
        for way, pair in ways.items()
        for name, one in zip((way, _SECOND.format(way)), pair.settings, strict=True)
    }
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    blocks = (work.prompts + 1) * -(-length // BLOCK_TOKENS)
    arguments: dict[str, Any] = {"max_model_len": length, "num_gpu_blocks_override": blocks}
    variables = {"PYTHONHASHSEED": "0"}  # Engines must hash alike; routers require it, too.
    with open_engines(logs, work.model, settings, python=python, variables=variables, **arguments) as engines:
        yield {
            name: Pair(way, engines[name], engines[_SECOND.format(name)], logs) for name, way in ways.items()
        }


def _measure(logs: Path, work: Work, ways: Mapping[str, Way], python: str) -> dict[str, list[Answers]]:
    """Return the answers of each pair in each round."""
    answers: dict[str, list[Answers]] = {way: [] for way in ways}

    def ask(way: str, first: Engine, number: int) -> Sample:
        """Query the first engine, which computes and stores; then the second engine, then the first again."""
        pair, prompts = pairs[way], work.of_round(way, number)
        found = Answers(pair.ask(first, prompts), pair.fetch(prompts), pair.ask(first, prompts))
        answers[way].append(found)
        return found.second

    with _open_pairs(logs, work, ways, python) as pairs:
        measure({name: pair.first for name, pair in pairs.items()}, range(-1, work.rounds), ask)
    return {way: rows[1:] for way, rows in answers.items()}


def _fail(logs: Path, work: Work, name: str, make: Callable[[Work], Way], python: str) -> list[Fault]:
    """Return the answers of pairs after faults. Their memory holds the prompts of two rounds."""
    seen: list[Seen] = []
    small = replace(work, rounds=1)
    # These engines are new, because KVCR's do not serve again after they were stopped.
    for _ in range(work.rounds):
        with _open_pairs(logs, small, {name: make(small)}, python) as pairs:
            faults = Faults(
                pairs[name],
                prompts=lambda fault: small.of_round(f"{name} {fault}", 0),
                memory_bytes=small.bytes_in_all,
                chunk_bytes=CHUNK_TOKENS // BLOCK_TOKENS * block_bytes(work.model),
            )
            seen += faults.run()
    return fleet_faults.table(name, seen)


def table(answers: Mapping[str, Sequence[Answers]]) -> list[Served]:
    """Compare each way with the fs tier, round by round."""
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


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    try:
        tier: dict[str, Any] = json.loads(text)
        return tier["type"], tier
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--tier {text!r} is not a tier's settings as JSON with a type: {error!r}"
        ) from None


def _of_kvtier(tiers: tuple[Settings, Settings], work: Work, source: str | None = None) -> Way:
    first, second = (
        {"spec_name": "KVTierOffloadingSpec", **_host_memory(work), "secondary_tiers": [tier]}
        for tier in tiers
    )
    return Way((first, second), source)


def _peers(work: Work, *, has_hints: bool = False) -> Way:
    """Return two engines that read from each other's memory."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    common = {"type": "nixl", "peers": addresses, "serve_bytes": work.bytes_in_all}
    first, second = ({**common, "listen": address} for address in addresses)
    return _of_kvtier((first, second), work, addresses[0] if has_hints else None)


def _of_kvcr(work: Work) -> Way:
    """Return two engines with vLLM's own tiering that read from each other's memory through KVCR."""
    ports = [free_port() for _ in range(2)]
    host = "127.0.0.1"
    # By default a source stops serving permanently if its thread stalls for 1 s. An engine's start stalls it
    # for longer.
    patience = {"operation_timeout_ms": 2500}
    tier = {"type": "kvcr", **patience, "router_capabilities": ["router_hint"], "control_host": host}
    first, second = (
        {
            "spec_name": "NativeTieringSpec",
            "spec_module_path": "kvtier_bench.managers.vllm_tiering",
            **_host_memory(work),
            "secondary_tiers": [{**tier, "control_advertise_host": host, "control_ports": [port]}],
        }
        for port in ports
    )
    return Way((first, second), f"tcp://{host}:{ports[0]}", is_stepped=True)


def _host_memory(work: Work) -> dict[str, Any]:
    return {"cpu_bytes_to_use": work.bytes_in_all, "block_size": CHUNK_TOKENS}


_HINTED: Mapping[str, Callable[[Work], Way]] = {FETCH: partial(_peers, has_hints=True), KVCR: _of_kvcr}
"""Pairs whose requests name their source."""
