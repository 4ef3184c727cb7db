"""Many requests at once whose prefixes lie in files, and a primary tier that holds a tenth of them.

Where each waiting request has its prefix promoted at once, they throw each other's chunks out of the
primary tier before anybody has loaded them, and all of it is slower than no tier at all. Here engines
with and without the file tier are given the same requests, in turns, and their tokens are compared.

An engine of its own fills the files before and is stopped. Between two rounds each engine is sent other
prompts, until nothing of the last round is in its own cache and in its primary tier, and files are
dropped from the page cache.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    FS,
    NATIVE_FS,
    PLAIN,
    PRIMARY,
    Engine,
    Sample,
    block_bytes,
    connectors,
    make_prompt,
    measure,
    open_engines,
    say,
    spread_of_median,
)
from kvtier_bench.machine import Machine, open_folder

DISTINCT, SHARED = "distinct", "shared"
FAMILIES = 5
SHARED_PARTS = 4  # in the shared scenario a quarter of each prefix is its own
_OF_KVTIER = {
    "kvtier_fetched_chunks": "fetched",
    "kvtier_loaded_chunks": "loaded{where}",
    "kvtier_expired_requests": "expired",
    "kvtier_misses": "miss {reason}",
}
_OF_VLLM = {"vllm:kv_offload_tiering_read_bytes": "fetched", "vllm:kv_offload_load_bytes": "loaded"}
TAIL_TOKENS = 48  # of each request, new in each round: one chunk of it is stored


@dataclass(frozen=True)
class Convoy:
    """All requests at once: medians over rounds; ratios are taken within a round.

    Attributes:
        scenario: whether the requests' prefixes have nothing in common, or are shared by families.
        connector: what the engine had: kvtier or vLLM's own tiering, host memory alone or files behind it.
        seconds: until the last token of all requests.
        ttft_ms: median time to the first token.
        ttft_p95_ms: what 95 % of the requests stay below.
        throughput: requests a second, as a ratio to kvtier's with the primary tier alone.
        low, high: 95 % of the medians of resampled rounds lie between them.
        cpu_s: processor time of all threads of the engine.
        wrong: answers that differ from those of the engine without a connector, of all.
    """

    scenario: str
    connector: str
    seconds: float
    requests_s: float
    ttft_ms: float
    ttft_p95_ms: float
    throughput: float
    low: float
    high: float
    cpu_s: float
    wrong: str


@dataclass(frozen=True)
class Traffic:
    """Chunks moved, summed over rounds.

    Attributes:
        in_files: chunks of the prefixes, each counted once a round.
        fetched: brought from files to the primary tier; more than ``in_files`` means more than once.
        loaded_fs: loaded to the device for the first time since they were fetched.
        loaded_cpu: loaded from the primary tier otherwise: others had them fetched, or stored.
        in_vain: fetched and never loaded.
        expired: requests whose deadline passed.
        misses: keys that were answered as a miss, by reason.
    """

    scenario: str
    connector: str
    in_files: int
    fetched: int
    loaded_fs: int
    loaded_cpu: int
    in_vain: int
    expired: int
    misses: str


@dataclass(frozen=True)
class Work:
    """The workload of each engine in each round"""

    model: str
    rounds: int
    requests: int = 50
    prefix_tokens: int = 512
    output_tokens: int = 8

    @property
    def prefix_blocks(self) -> int:
        return self.prefix_tokens // BLOCK_TOKENS

    @property
    def primary_blocks(self) -> int:
        """Blocks that the primary tier holds, a chunk each: a tenth of all prefixes."""
        return self.requests * self.prefix_blocks // 10

    @property
    def device_blocks(self) -> int:
        """Blocks of the engine's own cache: three quarters of that, and at least one request."""
        tokens = self.prefix_tokens + TAIL_TOKENS + self.output_tokens
        return max(self.primary_blocks * 3 // 4, -(-tokens // BLOCK_TOKENS) + 1) + 1

    def prefixes(self, scenario: str) -> list[list[int]]:
        """Return the prefix of each request, in the order in which they are sent."""
        if scenario == DISTINCT:
            return [make_prompt(f"{scenario} {i}", self.prefix_tokens) for i in range(self.requests)]
        common = self.prefix_blocks * (SHARED_PARTS - 1) // SHARED_PARTS * BLOCK_TOKENS
        families = [make_prompt(f"family {i}", common) for i in range(FAMILIES)]
        prefixes = [
            make_prompt(f"{scenario} {i}", self.prefix_tokens, families[i % FAMILIES])
            for i in range(self.requests)
        ]
        random.Random(0).shuffle(prefixes)
        return prefixes

    def requests_of(self, scenario: str, number: int) -> list[list[int]]:
        """Return the prompts of a round: each a prefix and a tail that is new."""
        return [
            make_prompt(f"{scenario} {number} {i}", self.prefix_tokens + TAIL_TOKENS, prefix)
            for i, prefix in enumerate(self.prefixes(scenario))
        ]

    def chunks_in_files(self, scenario: str) -> int:
        """Count the chunks of all prefixes, those that are shared once."""
        ends = range(BLOCK_TOKENS, self.prefix_tokens + 1, BLOCK_TOKENS)
        return len({tuple(prefix[:end]) for prefix in self.prefixes(scenario) for end in ends})


def run(root: Path | None, work: Work) -> list[Convoy | Traffic | Work | Machine]:
    """Measure.

    Args:
        root: directory for the files; what is written there is removed. Default: a temporary one.
        work: the requests; ``prefix_tokens`` of each lie in files.
    """
    with open_folder(root) as folder, open_folder(None) as logs:
        machine = Machine.here(folder)
        primary_bytes = work.primary_blocks * block_bytes(work.model)
        arguments = {
            "num_gpu_blocks_override": work.device_blocks,
            "max_model_len": work.prefix_tokens + TAIL_TOKENS + work.output_tokens,
            "max_num_seqs": work.requests,
        }
        # To fill the files, each primary tier has room for everything until it has been written.
        filling = connectors(20 * primary_bytes, folder, native=True)
        with_files = {name: settings for name, settings in filling.items() if name in (FS, NATIVE_FS)}
        with open_engines(logs, work.model, with_files, **arguments) as engines:
            _fill(engines, work)
        settings = connectors(primary_bytes, folder, native=True)
        with open_engines(logs, work.model, settings, **arguments) as engines:
            samples = {scenario: _measure(engines, work, scenario, folder) for scenario in (DISTINCT, SHARED)}
    return [
        *(
            convoy(scenario, name, rows, found[PRIMARY], found[PLAIN])
            for scenario, found in samples.items()
            for name, rows in found.items()
        ),
        *(
            traffic(scenario, name, found[name], work.chunks_in_files(scenario) * work.rounds)
            for scenario, found in samples.items()
            for name in (FS, NATIVE_FS)
        ),
        work,
        machine.again(),
    ]


def _measure(
    engines: Mapping[str, Engine], work: Work, scenario: str, folder: Path
) -> dict[str, list[Sample]]:
    say(f"requests whose prefixes are {scenario}")
    ask = lambda _, engine, number: _ask(engine, work, scenario, number, folder)  # noqa: E731
    return measure(engines, range(work.rounds), ask)


def _fill(engines: Mapping[str, Engine], work: Work) -> None:
    for engine in engines.values():
        for scenario in (DISTINCT, SHARED):
            engine.ask("generate", prompts=work.prefixes(scenario), output_tokens=1)
            engine.ask("settle")


def _flush(engine: Engine, work: Work, seed: str) -> None:
    """Have nothing in the engine's own cache and the primary tier but what is of no use."""
    count = -(-(work.primary_blocks + work.device_blocks) // work.prefix_blocks) + 1
    prompts = [make_prompt(f"filler {seed} {i}", work.prefix_tokens) for i in range(count)]
    engine.ask("generate", prompts=prompts, output_tokens=1)
    engine.ask("settle")


def _ask(engine: Engine, work: Work, scenario: str, number: int, folder: Path) -> Sample:
    _flush(engine, work, f"{scenario} {number}")
    _drop_from_page_cache(folder)
    before = _counts(engine, work)
    prompts = work.requests_of(scenario, number)
    answer = engine.ask("generate", prompts=prompts, output_tokens=work.output_tokens)
    engine.ask("settle")
    counts = _counts(engine, work)
    counts.subtract(before)
    return Sample(answer["wall_s"], answer["threads"], answer["ttft_s"], answer["answers"], counts)


def _counts(engine: Engine, work: Work) -> Counter[str]:
    return counts_of(engine.ask("metrics")["samples"], block_bytes(work.model))


def counts_of(samples: Sequence[tuple[str, Mapping[str, str], float]], chunk_bytes: int) -> Counter[str]:
    """Count by one set of names what an engine has done so far, from its metrics.

    kvtier's own where there are any: it speaks vLLM's, too, and nothing may count twice. vLLM's are in bytes,
    and do not say where a chunk came from.
    """
    is_kvtier = any(name.startswith("kvtier_") for name, _, _ in samples)
    names = _OF_KVTIER if is_kvtier else _OF_VLLM
    counts: Counter[str] = Counter()
    for name, labels, value in samples:
        if what := names.get(name.removesuffix("_total")):
            where = "_cpu" if labels.get("tier") == "cpu" else "_fs"
            what = what.format(where=where, reason=labels.get("reason"))
            counts[what] += value if is_kvtier else value / chunk_bytes  # type: ignore[assignment]
    return counts


def _drop_from_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the files' bytes. What is being written stays."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError), open(Path(parent, name), "rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def convoy(
    scenario: str, name: str, rows: Sequence[Sample], base: Sequence[Sample], plain: Sequence[Sample]
) -> Convoy:
    """Compare the rounds of one engine with those of kvtier without files, and its answers with none's."""
    ratios = [one.wall_s / row.wall_s for row, one in zip(rows, base, strict=True)]
    low, high = spread_of_median(ratios)
    ttft_s = sorted(seconds for row in rows for seconds in row.ttft_s)
    pairs = [
        pair
        for row, one in zip(rows, plain, strict=True)
        for pair in zip(row.answers, one.answers, strict=True)
    ]
    return Convoy(
        scenario,
        name,
        seconds=median(row.wall_s for row in rows),
        requests_s=median(len(row.answers) / row.wall_s for row in rows),
        ttft_ms=median(ttft_s) * 1e3,
        ttft_p95_ms=ttft_s[int(0.95 * (len(ttft_s) - 1))] * 1e3,
        throughput=median(ratios),
        low=low,
        high=high,
        cpu_s=median(row.cpu_s for row in rows),
        wrong=f"{sum(mine != its for mine, its in pairs)} of {len(pairs)}",
    )


def traffic(scenario: str, name: str, rows: Sequence[Sample], in_files: int) -> Traffic:
    """Add up what was moved for one engine's rounds."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row.counts)
    loaded_fs = counts["loaded_fs"] or min(counts["loaded"], counts["fetched"])
    loaded_cpu = counts["loaded_cpu"] or counts["loaded"] - loaded_fs
    misses = {what: count for what, count in sorted(counts.items()) if what.startswith("miss ") and count}
    return Traffic(
        scenario,
        name,
        in_files=in_files,
        fetched=int(counts["fetched"]),
        loaded_fs=int(loaded_fs),
        loaded_cpu=int(max(0, loaded_cpu)),
        in_vain=int(max(0, counts["fetched"] - loaded_fs)),
        expired=int(counts["expired"]),
        misses=", ".join(f"{what.removeprefix('miss ')} {count:.0f}" for what, count in misses.items())
        or "none",
    )
