"""The demo: a real engine keeps its KV cache across restarts, and every token is compared.

Each engine runs in its own process, so the restarts are real. One engine is killed, and the next one adopts
its host memory. The last engine has only the files. All figures are measured in this run: time to the first
token, and the tokens loaded from each tier.

The answers must equal those of the control, an engine without a connector that gets the same prompts. The
control answers each prompt twice: first by computing it, then from its device cache. In bfloat16 the two
answers may differ, because the shapes of the batches differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

from rich.console import Console

from kvtier_bench import figures
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    Engine,
    Settings,
    make_prompt,
    open_engines,
    over_files,
    say,
    wait_until_verified,
)
from kvtier_bench.machine import Machine, open_folder

MODEL = "medium"
PROMPTS = (1, 2, 3)
FILLERS = (101, 102, 103)
WARM_UP = 10**6  # from here on: one prompt per engine that is not in the files
PROMPT_TOKENS = 3000
OUTPUT_TOKENS = 16
DEVICE_BLOCKS = 225  # The engine's own cache holds two prompts of 94 blocks, but not three.
PRIMARY_BYTES = 2**30
ON_GPU = {"dtype": "bfloat16"}  # with float32, vLLM does not use FlashAttention
HITS = {"cpu_hit": "cpu", "restart_host_hit": "adopted", "restart_fs_hit": "fs"}
CONTROLS = {"cold": "computed", **dict.fromkeys(HITS, "device_hit")}
KEPT, NO_MORE = {"keep_host_memory_s": 300}, {"keep_host_memory_s": 0.1}  # seconds
KILLED = "engine over kvtier"


@dataclass(frozen=True)
class Phase:
    """Median time to first token, and prompt tokens by source.

    Attributes:
        phase: nothing cached; hits in host memory, in a killed engine's host memory, and in files.
        ttft_ms: median time to the first token.
        computed: prompt tokens that the engine computed.
        from_cpu, from_adopted, from_fs: prompt tokens loaded from a tier.
        speed_up: time to the first token in the first phase, divided by the time in this phase.
        identical: whether every answer equals the control's.
    """

    phase: str
    ttft_ms: float
    computed: int
    from_cpu: int
    from_adopted: int
    from_fs: int
    speed_up: float
    identical: bool


@dataclass
class Round:
    """A round of prompts: times to the first token, answers, tokens by tier."""

    ttft_s: list[float] = field(default_factory=list)
    answers: list[Sequence[int]] = field(default_factory=list)
    loaded: Counter[str] = field(default_factory=Counter)


def main(as_json: bool) -> int:
    """Run the demo. Return 0 if all tokens were identical and every tier returned chunks, else 1."""
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
    """Return a row for each phase, which compares times with the first phase and answers with the control."""
    tokens = PROMPT_TOKENS * len(PROMPTS)
    cold_s = median(rounds["cold"].ttft_s)
    return [
        Phase(
            name,
            median(row.ttft_s) * 1e3,
            tokens - row.loaded.total(),
            row.loaded["cpu"],
            row.loaded["adopted"],
            row.loaded["fs"],
            cold_s / median(row.ttft_s),
            row.answers == rounds[control].answers,
        )
        for name, control in CONTROLS.items()
        for row in (rounds[name],)
    ]


def find_problems(phases: Sequence[Phase]) -> list[str]:
    """Return a line for each phase with wrong tokens and for each tier that returned no tokens."""
    problems = []
    for it in phases:
        if not it.identical:
            problems.append(f"{it.phase}: answers differ from the engine's without a connector")
        if it.phase in HITS and not getattr(it, f"from_{HITS[it.phase]}"):
            problems.append(f"{it.phase}: tier {HITS[it.phase]} gave nothing")
    return problems


def _run_engines(folder: Path) -> dict[str, Round]:
    kvtier = over_files(PRIMARY_BYTES, folder / "files")
    rounds: dict[str, Round] = {}
    plan: Sequence[tuple[str, Settings | None, Sequence[tuple[Sequence[str], Sequence[int]]]]] = (
        ("engine without a connector", None, [(("computed", "device_hit"), PROMPTS)]),
        (KILLED, {**kvtier, **KEPT}, [(("cold",), PROMPTS), (("fill",), FILLERS), (("cpu_hit",), PROMPTS)]),
        ("new engine with its host memory", {**kvtier, **NO_MORE}, [(("restart_host_hit",), PROMPTS)]),
        ("new engine on the same root", kvtier, [(("restart_fs_hit",), PROMPTS)]),
    )
    for warm_up, (title, settings, prompts) in enumerate(plan, WARM_UP):
        with open_engines(
            folder,
            MODEL,
            {title: settings},
            ON_GPU,
            num_gpu_blocks_override=DEVICE_BLOCKS,
            max_model_len=4096,
        ) as engines:
            if "restart_host_hit" in prompts[0][0]:
                wait_until_verified(engines[title])
            _ask(engines[title], warm_up, PROMPT_TOKENS, Round())
            for names, seeds in prompts:
                for seed, name in product(seeds, names):
                    into = rounds.setdefault(name, Round())
                    _ask(engines[title], seed, PROMPT_TOKENS, into)
                    say(f"{name}: TTFT {into.ttft_s[-1]:.3f} s")
            if title == KILLED:
                engines[title].ask("settle")
                engines[title].kill()
    return rounds


def _ask(engine: Engine, seed: int, tokens: int, into: Round) -> None:
    before = _loaded_tokens(engine)
    prompt = make_prompt(seed, tokens)
    answer = engine.ask("generate", prompts=[prompt], output_tokens=OUTPUT_TOKENS)
    into.ttft_s += answer["ttft_s"]
    into.answers += answer["answers"]
    into.loaded += _loaded_tokens(engine) - before


def _loaded_tokens(engine: Engine) -> Counter[str]:
    """Return the number of tokens loaded from each tier so far, from the engine's metrics."""
    loaded: Counter[str] = Counter()
    for name, labels, value in engine.ask("metrics")["samples"]:
        if name == "kvtier_loaded_chunks_total":
            loaded[labels["tier"]] += int(value) * BLOCK_TOKENS
    return loaded
