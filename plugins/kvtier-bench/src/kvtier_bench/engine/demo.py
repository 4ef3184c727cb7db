"""The demo: a real engine keeps its KV cache over a restart, and every token is compared.

Each engine runs in a process of its own, so that the restart is one. What is shown was measured by the
engines in this run: time to the first token, and the tokens that each tier gave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from kvtier_bench import figures
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    Engine,
    make_prompt,
    open_engines,
    over_files,
    say,
)
from kvtier_bench.machine import Machine, open_folder

MODEL = "medium"
PROMPTS = (1, 2, 3)
FILLERS = (101, 102, 103)
WARM_UP = 10**6
PROMPT_TOKENS = 3000
OUTPUT_TOKENS = 16
DEVICE_BLOCKS = 225  # the engine's own cache: two prompts of 94 blocks, and not three
PRIMARY_BYTES = 2**30
HITS = {"cpu_hit": "cpu", "restart_fs_hit": "fs"}


@dataclass(frozen=True)
class Phase:
    """Median time to first token, and prompt tokens by source.

    Attributes:
        phase: nothing cached, hits in the primary tier, hits in files after a restart.
        ttft_ms: median time to the first token.
        computed: tokens of the prompts that the engine computed.
        from_cpu, from_fs: tokens that a tier gave.
        speed_up: of the time to the first token, against the first phase.
        identical: whether every answer was that of an engine without a connector.
    """

    phase: str
    ttft_ms: float
    computed: int
    from_cpu: int
    from_fs: int
    speed_up: float
    identical: bool


@dataclass
class Round:
    """What an engine did with a round of prompts: times to the first token, answers, tokens by tier."""

    ttft_s: list[float] = field(default_factory=list)
    answers: list[Sequence[int]] = field(default_factory=list)
    loaded: Counter[str] = field(default_factory=Counter)


def main(as_json: bool) -> int:
    """Run the demo; return 0 if every token was identical and every tier served, else 1."""
    with open_folder(None) as folder:
        machine = Machine.here()
        rounds = _run_engines(folder)
    phases = compare(rounds)
    figures.report([*phases, machine.again()], as_json)
    problems = find_problems(phases)
    for problem in problems:
        Console(stderr=True).print(f"[red]{problem}")
    return 1 if problems else 0


def compare(rounds: Mapping[str, Round]) -> list[Phase]:
    """Compare the rounds with the first one, and their answers with the engine's without a connector."""
    tokens = PROMPT_TOKENS * len(PROMPTS)
    cold_s = median(rounds["cold"].ttft_s)
    return [
        Phase(
            name,
            median(row.ttft_s) * 1e3,
            tokens - row.loaded.total(),
            row.loaded["cpu"],
            row.loaded["fs"],
            cold_s / median(row.ttft_s),
            row.answers == rounds["reference"].answers,
        )
        for name, row in rounds.items()
        if name in ("cold", *HITS)
    ]


def find_problems(phases: Sequence[Phase]) -> list[str]:
    """Return what went wrong: tokens that differ, tiers that gave nothing."""
    problems = []
    for it in phases:
        if not it.identical:
            problems.append(f"{it.phase}: answers differ from those of the engine without a connector")
        if it.phase in HITS and not getattr(it, f"from_{HITS[it.phase]}"):
            problems.append(f"{it.phase}: tier {HITS[it.phase]} gave nothing")
    return problems


def _run_engines(folder: Path) -> dict[str, Round]:
    kvtier = over_files(PRIMARY_BYTES, folder / "files")
    rounds: dict[str, Round] = {}
    for title, settings, prompts in (
        ("engine without a connector", None, {"reference": PROMPTS}),
        ("engine over kvtier", kvtier, {"cold": PROMPTS, "fill": FILLERS, "cpu_hit": PROMPTS}),
        ("new engine on the same root", kvtier, {"restart_fs_hit": PROMPTS}),
    ):
        arguments = {"num_gpu_blocks_override": DEVICE_BLOCKS, "max_model_len": 4096}
        with open_engines(folder, MODEL, {title: settings}, **arguments) as engines:
            _ask(engines[title], WARM_UP, 2 * BLOCK_TOKENS, Round())
            for name, seeds in prompts.items():
                rounds[name] = Round()
                for seed in seeds:
                    _ask(engines[title], seed, PROMPT_TOKENS, rounds[name])
                    say(f"{name}: TTFT {rounds[name].ttft_s[-1]:.3f} s")
    return rounds


def _ask(engine: Engine, seed: int, tokens: int, into: Round) -> None:
    before = _loaded_tokens(engine)
    prompt = make_prompt(seed, tokens)
    answer = engine.ask("generate", prompts=[prompt], output_tokens=OUTPUT_TOKENS)
    into.ttft_s += answer["ttft_s"]
    into.answers += answer["answers"]
    into.loaded += _loaded_tokens(engine) - before


def _loaded_tokens(engine: Engine) -> Counter[str]:
    """Return how many tokens each tier has given so far, by the engine's own metrics."""
    loaded: Counter[str] = Counter()
    for name, labels, value in engine.ask("metrics")["samples"]:
        if name == "kvtier_loaded_chunks_total":
            loaded[labels["tier"]] += int(value) * BLOCK_TOKENS
    return loaded
