"""The demo: a real engine keeps its KV cache over a restart, and every token is compared.

Each engine runs in a process of its own, so that the restart is one. What is shown was measured by the
engines in this run: time to the first token, and the tokens that each tier gave.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtier_bench.engines import BLOCK_TOKENS, FS, PLAIN, Engine, connectors, make_prompt, open_engines, say
from kvtier_bench.machine import open_folder

MODEL = "medium"
PROMPTS = (1, 2, 3)
FILLERS = (101, 102, 103)
WARM_UP = 10**6
PROMPT_TOKENS = 3000
OUTPUT_TOKENS = 32
DEVICE_BLOCKS = 225  # the engine's own cache: two prompts of 94 blocks, and not three
PRIMARY_BYTES = 2**30
HITS = {"cpu_hit": "cpu", "restart_fs_hit": "fs"}


@dataclass
class Phase:
    """What was seen of one round of prompts."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    loaded: Counter[str] = field(default_factory=Counter)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @property
    def ttft_median_s(self) -> float:
        """Median time to the first token, in seconds."""
        return statistics.median(self.ttft_s)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts of the round."""
        return PROMPT_TOKENS * len(self.ttft_s)

    def add(self, seed: int, ttft_s: float, tokens: list[int], loaded: Counter[str]) -> None:
        """Take in one prompt: its time to the first token, the answer, and the tokens each tier gave."""
        self.ttft_s.append(ttft_s)
        self.tokens[seed] = tokens
        self.loaded.update(loaded)


def main(as_json: bool) -> int:
    """Run the demo; return 0 if every token was identical and every tier served, else 1."""
    started = time.monotonic()
    with open_folder(None) as folder:
        phases = _run_engines(folder)
    reference = phases.pop("reference")
    problems = find_problems(reference, phases)
    identical = not any(phase.tokens != reference.tokens for phase in _compared(phases))
    if not as_json:
        Console().print(as_table(phases))
        Console().print(f"tokens identical: {'yes' if identical else 'no'}")
    for problem in problems:
        Console(stderr=as_json).print(f"[red]{problem}")
    Console(stderr=as_json).print(f"[dim]{_machine()}; {time.monotonic() - started:.0f} s in all")
    if as_json:
        print(json.dumps(as_record(phases, identical), indent=2))
    return 1 if problems else 0


def find_problems(reference: Phase, phases: dict[str, Phase]) -> list[str]:
    """Return what went wrong: tokens that differ, tiers that gave nothing."""
    problems = [
        f"{phase.name}: prompt {seed} was answered differently than by the engine without a connector"
        for phase in _compared(phases)
        for seed, tokens in reference.tokens.items()
        if phase.tokens.get(seed) != tokens
    ]
    problems += [
        f"{name}: the tier {tier} gave nothing"
        for name, tier in HITS.items()
        if not phases[name].loaded[tier]
    ]
    return problems


def as_table(phases: dict[str, Phase]) -> Table:
    """Make the table that the demo ends with."""
    table = Table(title="The same prompts, three times; tokens computed and loaded")
    table.add_column("phase", no_wrap=True)
    for column in ("TTFT median", "computed", "from cpu", "from fs", "speed-up"):
        table.add_column(column, justify="right")
    cold_s = phases["cold"].ttft_median_s
    for phase in _compared(phases):
        cpu, fs = phase.loaded["cpu"], phase.loaded["fs"]
        table.add_row(
            phase.name,
            f"{phase.ttft_median_s * 1000:.0f} ms",
            str(phase.prompt_tokens - cpu - fs),
            str(cpu),
            str(fs),
            f"{cold_s / phase.ttft_median_s:.1f}x",
        )
    return table


def as_record(phases: dict[str, Phase], identical: bool) -> dict[str, object]:
    """Make the record that ``--json`` writes."""
    return {
        "identical": identical,
        "phases": [
            {
                "name": phase.name,
                "ttft_median_s": phase.ttft_median_s,
                "prompt_tokens": phase.prompt_tokens,
                "loaded_tokens": {tier: phase.loaded[tier] for tier in ("cpu", "fs")},
            }
            for phase in _compared(phases)
        ],
    }


def _compared(phases: dict[str, Phase]) -> list[Phase]:
    return [phase for name, phase in phases.items() if name in ("cold", *HITS)]


def _run_engines(folder: Path) -> dict[str, Phase]:
    settings = connectors(PRIMARY_BYTES, BLOCK_TOKENS, folder, native=False)
    phases: dict[str, Phase] = {}
    for title, connector, rounds in (
        ("engine without a connector", PLAIN, {"reference": PROMPTS}),
        ("engine over kvtier", FS, {"cold": PROMPTS, "fill": FILLERS, "cpu_hit": PROMPTS}),
        ("new engine on the same root", FS, {"restart_fs_hit": PROMPTS}),
    ):
        with open_engines(
            folder,
            MODEL,
            {title: settings[connector]},
            num_gpu_blocks_override=DEVICE_BLOCKS,
            max_model_len=4096,
        ) as engines:
            _ask(engines[title], WARM_UP, 2 * BLOCK_TOKENS, Phase("warm-up"))
            for name, seeds in rounds.items():
                phases[name] = _run_phase(engines[title], name, seeds)
    return phases


def _run_phase(engine: Engine, name: str, seeds: Sequence[int]) -> Phase:
    phase = Phase(name)
    for seed in seeds:
        _ask(engine, seed, PROMPT_TOKENS, phase)
        say(f"{name}, prompt {len(phase.ttft_s)}: TTFT {phase.ttft_s[-1]:.3f} s")
    return phase


def _ask(engine: Engine, seed: int, tokens: int, phase: Phase) -> None:
    before = _loaded_tokens(engine)
    prompt = make_prompt(seed, tokens)
    answer = engine.ask("generate", prompts=[prompt], output_tokens=OUTPUT_TOKENS)
    (ttft_s,), (output,) = answer["ttft_s"], answer["answers"]
    phase.add(seed, ttft_s, output, _loaded_tokens(engine) - before)


def _loaded_tokens(engine: Engine) -> Counter[str]:
    """Return how many tokens each tier has given so far, by the engine's own metrics."""
    loaded: Counter[str] = Counter()
    for name, labels, value in engine.ask("counts")["samples"]:
        if name == "kvtier_loaded_chunks_total":
            loaded[labels["tier"]] += int(value) * BLOCK_TOKENS
    return loaded


def _machine() -> str:
    return f"{os.cpu_count()} cores, {sys.platform}, Python {sys.version.split()[0]}"
