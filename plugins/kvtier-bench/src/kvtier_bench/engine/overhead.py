"""What kvtier costs where nothing is reused: real engines with and without it, asked in turns.

All engines are alive at once and alike but for the connector; while one is asked the others sleep. A
round asks each of them once, in an order of its own, with prompts that nobody has seen. Each is compared
with the plain engine in the same round, so that what a noisy machine does to both falls out. How much
noise is left a second plain engine says (``--control``).

Tokens a second count what was computed, prompts and answers, until the last token. Processor time counts
all threads of an engine, and those of a connector until its last put has ended; it moves less than tokens
a second where others use the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    PLAIN,
    Engine,
    Sample,
    block_bytes,
    connectors,
    make_prompt,
    measure,
    open_engines,
    spread_of_median,
)
from kvtier_bench.machine import Machine, open_folder

CONTROL = "none again"
GOAL_PERCENT = 1.5
"""Of kvtier's engines: tokens a second that may be lost where nothing is reused."""

PARTS = (
    ("kvtier-executor", "executor"),
    ("kvtier-supervisor", "executor"),
    ("tiers-process", "tiers' process"),
    ("kvtier-store", "copies"),
    ("kvtier-load", "copies"),
    ("kvtier-files", "file threads"),
    ("fs-", "file threads"),
    ("vllm_kv", "file threads"),
    ("vllm_offloading", "file threads"),
)
"""Beginnings of threads' names, and what the threads do for a connector."""


@dataclass(frozen=True)
class Loss:
    """Throughput and CPU time lost to the connector, against an engine without one.

    Attributes:
        connector: what the engine had: kvtier or vLLM's own tiering, host memory alone or files behind it.
        rounds: how many pairs were compared.
        tokens_s: median tokens a second.
        lost_percent: median over the rounds of the tokens a second that are missing.
        low, high: 95 % of the medians of resampled rounds lie between them.
        cpu_percent: the same median of the processor time that came on top.
        cpu_low, cpu_high: see ``low``.
        goal: whether at most ``GOAL_PERCENT`` is lost: "met" or "missed" where both bounds say so, and those
            of a second engine without a connector, if there was one, are closer to 0; else "not told".
    """

    connector: str
    rounds: int
    tokens_s: float
    lost_percent: float
    low: float
    high: float
    cpu_percent: float
    cpu_low: float
    cpu_high: float
    goal: str


@dataclass(frozen=True)
class Share:
    """CPU time of the connector by part, in percent of its engine's; all threads.

    ``engine thread`` is what the manager and the worker take there, each call measured, in a round of
    its own.
    """

    connector: str
    part: str
    percent: float
    us_a_chunk: float


@dataclass(frozen=True)
class Work:
    """The workload of each engine in each round"""

    model: str
    rounds: int
    prompts: int = 16
    prompt_tokens: int = 512
    output_tokens: int = 32
    at_once: int = 8

    @property
    def chunks(self) -> int:
        """Chunks that a round stores, of one block each."""
        return self.prompts * self.prompt_tokens // BLOCK_TOKENS

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_tokens + self.output_tokens

    @property
    def tokens(self) -> int:
        """Tokens that a round computes."""
        return self.prompts * self.prompt_length


def run(root: Path | None, work: Work, *, control: bool = False) -> list[Loss | Share | Work | Machine]:
    """Measure.

    Args:
        root: directory for the fs tiers; what is written there is removed. Default: a temporary one.
        work: what each engine does in each round; two more rounds before do not count.
        control: measure a second engine without a connector, too.
    """
    with open_folder(root) as folder, open_folder(None) as logs:
        # Two rounds fill the primary tier, then each store evicts.
        settings = connectors(2 * work.chunks * block_bytes(work.model), folder)
        if control:
            settings[CONTROL] = None
        machine = Machine.here(folder)
        with open_engines(
            logs,
            work.model,
            settings,
            # the engine's own cache has room for the prompts that run at once, twice
            num_gpu_blocks_override=2 * work.at_once * -(-work.prompt_length // BLOCK_TOKENS),
            max_model_len=work.prompt_length,
            max_num_seqs=work.at_once,
        ) as engines:
            samples = measure(
                engines,
                range(-2, work.rounds),
                lambda name, engine, number: _ask(engine, work, f"{name} {number}"),
            )
            shares = explain(engines, work, samples)
    return [*losses(samples, work.tokens), *shares, work, machine.again()]


def losses(samples: Mapping[str, Sequence[Sample]], tokens: int) -> list[Loss]:
    """Compare each engine with the plain one, round by round, in each of which it computes so many tokens."""
    plain = samples[PLAIN]
    noise = spread_of_median(_lost(samples[CONTROL], plain)) if CONTROL in samples else (0.0, 0.0)
    is_noisy = max(map(abs, noise)) > GOAL_PERCENT
    found = []
    for name, rows in samples.items():
        if name == PLAIN:
            continue
        lost = _lost(rows, plain)
        more = [100 * (row.cpu_s / base.cpu_s - 1) for row, base in zip(rows, plain, strict=True)]
        low, high = spread_of_median(lost)
        cpu_low, cpu_high = spread_of_median(more)
        found.append(
            Loss(
                name,
                len(rows),
                median(tokens / row.wall_s for row in rows),
                median(lost),
                low,
                high,
                median(more),
                cpu_low,
                cpu_high,
                "" if name == CONTROL else verdict(low, high, is_noisy),
            )
        )
    return found


def _lost(rows: Sequence[Sample], plain: Sequence[Sample]) -> list[float]:
    """Return the tokens a second that are missing in each round, in percent."""
    return [100 * (1 - base.wall_s / row.wall_s) for row, base in zip(rows, plain, strict=True)]


def verdict(low: float, high: float, is_noisy: bool) -> str:
    """Return whether the goal is met, as far as bounds of the loss tell it."""
    if is_noisy or low <= GOAL_PERCENT < high:
        return "not told"
    return "met" if high <= GOAL_PERCENT else "missed"


def part_of(thread: str) -> str | None:
    """Return what a thread does for a connector; None for one of the engine's own."""
    return next((part for beginning, part in PARTS if thread.startswith(beginning)), None)


def _ask(engine: Engine, work: Work, seed: str) -> Sample:
    prompts = [make_prompt(f"{seed} {i}", work.prompt_tokens) for i in range(work.prompts)]
    answer = engine.ask("generate", prompts=prompts, output_tokens=work.output_tokens)
    settled = engine.ask("settle")
    # Until the last put has ended the engine does steps that a busy one would not: they do not count.
    after = {thread: seconds for thread, seconds in settled["threads"].items() if part_of(thread)}
    return Sample(answer["wall_s"], Counter(answer["threads"]) + Counter(after))


def explain(
    engines: Mapping[str, Engine], work: Work, samples: Mapping[str, Sequence[Sample]]
) -> list[Share]:
    """Return what the processor time of each connector is made of."""
    shares = []
    for name, engine in engines.items():
        if name in (PLAIN, CONTROL):
            continue
        rows = samples[name]
        engine.ask("watch")
        _ask(engine, work, f"{name} watched")
        parts = {"engine thread": len(rows) * sum(engine.ask("spent")["seconds"].values())}
        for row in rows:
            for thread, seconds in row.threads.items():
                if part := part_of(thread):
                    parts[part] = parts.get(part, 0.0) + seconds
        cpu_s, chunks = sum(row.cpu_s for row in rows), work.chunks * len(rows)
        shares += [
            Share(name, part, 100 * seconds / cpu_s, seconds / chunks * 1e6)
            for part, seconds in sorted(parts.items())
        ]
    return shares
