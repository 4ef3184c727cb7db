"""The demo: a real engine keeps its KV cache over a restart, and every token is compared.

Each engine runs in a process of its own, so that the restart is one. What is shown was measured by the
engines in this run: time to the first token, and the tokens that each tier gave.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from kvtier.cli.room import files_below
from kvtier.errors import KVTierError

ENGINE = "kvtier.adapters.vllm.demo"
PROMPTS = (1, 2, 3)
FILLERS = (101, 102, 103)
PROMPT_TOKENS = 3000
OUTPUT_TOKENS = 32
DEVICE_BLOCKS = 225  # the engine's own cache: two prompts of 94 blocks, and not three
PRIMARY_BYTES = 2**30
DTYPE = "float32"  # with bfloat16, batches of another shape may round to another token
ENGINE_TIMEOUT_S = 600
HITS = {"cpu_hit": "cpu", "restart_fs_hit": "fs"}


class DemoError(KVTierError):
    """An engine of the demo did not do its work; its last output is in the message."""


class Answer(BaseModel):
    """What an engine reports of one prompt."""

    phase: str
    seed: int
    ttft_s: float
    tokens: list[int]
    loaded: dict[str, int]


@dataclass
class Phase:
    """What was seen of one round of prompts."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @property
    def ttft_median_s(self) -> float:
        """Median time to the first token, in seconds."""
        return statistics.median(self.ttft_s)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts of the round."""
        return PROMPT_TOKENS * len(self.ttft_s)

    def add(self, answer: Answer) -> None:
        """Take in what the engine says of one prompt."""
        self.ttft_s.append(answer.ttft_s)
        self.tokens[answer.seed] = answer.tokens
        for tier, count in answer.loaded.items():
            self.loaded[tier] = self.loaded.get(tier, 0) + count


def main(json_file: Path | None = None) -> int:
    """Run the demo; return 0 if every token was identical and every tier served, else 1."""
    console = Console()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as directory:
        phases = _run_engines(Path(directory), console)
    reference = phases.pop("reference")
    problems = find_problems(reference, phases)
    console.print(as_table(phases))
    identical = not any(phase.tokens != reference.tokens for phase in _compared(phases))
    console.print(f"tokens identical: {'yes' if identical else 'no'}")
    for problem in problems:
        console.print(f"[red]{problem}")
    console.print(f"[dim]{_machine()}; {time.monotonic() - started:.0f} s in all")
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(phases, identical), indent=2) + "\n")
    return 1 if problems else 0


def find_problems(reference: Phase, phases: dict[str, Phase]) -> list[str]:
    """Say what went wrong: tokens that differ, tiers that gave nothing."""
    problems = [
        f"{phase.name}: prompt {seed} was answered differently than by the engine without a connector"
        for phase in _compared(phases)
        for seed, tokens in reference.tokens.items()
        if phase.tokens.get(seed) != tokens
    ]
    problems += [
        f"{name}: the tier {tier} gave nothing"
        for name, tier in HITS.items()
        if not phases[name].loaded.get(tier)
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
        cpu, fs = phase.loaded.get("cpu", 0), phase.loaded.get("fs", 0)
        table.add_row(
            phase.name,
            f"{phase.ttft_median_s * 1000:.0f} ms",
            str(phase.prompt_tokens - cpu - fs),
            str(cpu),
            str(fs),
            f"{cold_s / phase.ttft_median_s:.1f}x",
        )
    return table


def as_json(phases: dict[str, Phase], identical: bool) -> dict[str, object]:
    """Make the record that ``--json`` writes."""
    return {
        "identical": identical,
        "phases": [
            {
                "name": phase.name,
                "ttft_median_s": phase.ttft_median_s,
                "prompt_tokens": phase.prompt_tokens,
                "loaded_tokens": {tier: phase.loaded.get(tier, 0) for tier in ("cpu", "fs")},
            }
            for phase in _compared(phases)
        ],
    }


def _compared(phases: dict[str, Phase]) -> list[Phase]:
    return [phase for name, phase in phases.items() if name in ("cold", *HITS)]


def _run_engines(directory: Path, console: Console) -> dict[str, Phase]:
    model, root = directory / "model", directory / "chunks"
    phases: dict[str, Phase] = {}
    settings = {
        "cpu_bytes_to_use": PRIMARY_BYTES,
        "secondary_tiers": [files_below(root)],
    }
    with _Progress(console) as progress:
        progress.step("making a small random model")
        _call(directory, {"make_model": str(model), "dtype": DTYPE})
        engines: list[tuple[str, list[tuple[str, Sequence[int]]], dict[str, object] | None]] = [
            ("engine without a connector", [("reference", PROMPTS)], None),
            ("engine over kvtier", [("cold", PROMPTS), ("fill", FILLERS), ("cpu_hit", PROMPTS)], settings),
            ("new engine on the same root", [("restart_fs_hit", PROMPTS)], settings),
        ]
        for title, rounds, extra_config in engines:
            progress.step(f"{title}: starting")
            for answer in _engine(directory, model, rounds, extra_config):
                phase = phases.setdefault(answer.phase, Phase(answer.phase))
                phase.add(answer)
                count = f"prompt {len(phase.ttft_s)}"
                progress.step(f"{title}: {phase.name}, {count}, TTFT {answer.ttft_s:.3f} s")
    return phases


def _engine(
    directory: Path,
    model: Path,
    rounds: list[tuple[str, Sequence[int]]],
    extra_config: dict[str, object] | None,
) -> Iterator[Answer]:
    """Run an engine to its end; yield what it reports, as it does."""
    report = directory / "report.jsonl"
    report.write_text("")
    plan = {
        "model": str(model),
        "report": str(report),
        "rounds": rounds,
        "extra_config": extra_config,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "device_blocks": DEVICE_BLOCKS,
        "dtype": DTYPE,
    }
    process, log = _start(directory, plan)
    deadline_s = time.monotonic() + ENGINE_TIMEOUT_S
    try:
        with report.open(encoding="utf-8") as lines:
            while True:
                ended = process.poll() is not None
                while line := lines.readline():
                    yield Answer.model_validate_json(line)
                if ended:
                    break
                if time.monotonic() > deadline_s:
                    raise DemoError(f"an engine did not end within {ENGINE_TIMEOUT_S} s:\n{_tail(log)}")
                time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise DemoError(f"an engine ended with status {process.returncode}:\n{_tail(log)}")


def _call(directory: Path, plan: Mapping[str, object]) -> None:
    process, log = _start(directory, plan)
    if process.wait(ENGINE_TIMEOUT_S):
        raise DemoError(f"the model could not be made:\n{_tail(log)}")


def _start(directory: Path, plan: Mapping[str, object]) -> tuple[subprocess.Popen[str], Path]:
    log = directory / "engine.log"
    # One binding of threads for all engines: vLLM chooses another one when a connector is there, and
    # then sums in another order. Without any binding its threads get in each other's way.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    env = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", ENGINE],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=directory,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        json.dump(plan, pipe)
    return process, log


def _tail(log: Path, lines: int = 100) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _machine() -> str:
    return f"{os.cpu_count()} cores, {sys.platform}, Python {sys.version.split()[0]}"


class _Progress:
    """Shows what is going on: a spinner on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots")
        self._live = Live(self._spinner, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> _Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def step(self, text: str) -> None:
        """Say what is done now."""
        self._spinner.update(text=text)
        self._console.print(f"[dim]{text}")
