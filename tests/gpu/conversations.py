"""Many conversations over host memory, with room for few on the device: `python -m tests.gpu.conversations`.

One engine after the other: without a connector, with kvtier, with vLLM's own tiering. In each turn all
conversations are sent at once. The history of each comes from host memory, or is computed again. A trial on
the CPU: ``--model tiny --conversations 6 --tokens 300 --host-gib 0.05``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from kvtier_bench.engine.compared import (
    MODELS,
    PLAIN,
    START_S,
    Engine,
    engine_arguments,
    make_model,
    make_prompt,
    say,
)
from tests.gpu.first_token import ON_GPU, SPECS, await_pinned

TURNS, NEW_TOKENS, OUTPUT_TOKENS = 4, 96, 32
AT_ONCE = 16  # maximum number of requests in the engine's batch


@dataclass(frozen=True)
class Conversations:
    """One system.

    Attributes:
        ready_s: seconds until the engine was started.
        pinned_s: seconds from then until all host memory was page-locked.
        first_s: seconds of the first turn, which computes everything.
        turn_s: seconds of a later turn, median.
        cached: tokens of the later turns that were not computed, out of all their prompt tokens.
        stop_s: seconds of the engine's shutdown.
    """

    system: str
    host_gib: float
    ready_s: float
    pinned_s: float
    first_s: float
    turn_s: float
    cached: str
    stop_s: float


def measure(folder: Path, system: str, args: argparse.Namespace) -> Conversations:
    """Start the engine of one system, run the conversations, and stop it."""
    longest = args.tokens + TURNS * (NEW_TOKENS + OUTPUT_TOKENS)
    host_bytes = int(args.host_gib * 2**30)
    settings = SPECS[system] and {
        **SPECS[system],
        "cpu_bytes_to_use": host_bytes,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "files")}] if args.files else [],
    }
    arguments = {"load_format": "dummy", "max_model_len": longest, "max_num_seqs": AT_ONCE}
    on_gpu = ON_GPU | {"num_gpu_blocks_override": AT_ONCE * longest // 32, "max_num_batched_tokens": 8192}
    blocks = {"num_gpu_blocks_override": AT_ONCE * longest // 64}
    with Engine(system, folder, variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as engine:
        engine.ask("load", START_S)
        started = engine_arguments(make_model(folder, args.model), settings or None, arguments | blocks)
        began = time.monotonic()
        engine.ask("start", START_S, arguments=started, on_gpu=on_gpu)
        ready = time.monotonic()
        await_pinned(engine, host_bytes if system != PLAIN else 0)
        pinned = time.monotonic()
        turns = list(hold(engine, args.conversations, args.tokens))
        stopping = time.monotonic()
        engine.ask("stop")
        stopped = time.monotonic()
    cached, sent = (sum(column) for column in zip(*((it[1], it[2]) for it in turns[1:]), strict=True))
    return Conversations(
        system,
        args.host_gib,
        ready - began,
        pinned - ready,
        turns[0][0],
        median(it[0] for it in turns[1:]),
        f"{cached:,} of {sent:,}",
        stopped - stopping,
    )


def hold(engine: Engine, count: int, tokens: int) -> Iterator[tuple[float, int, int]]:
    """Run the conversations; yield the seconds of each turn, its cached tokens and its prompts' tokens."""
    histories: Sequence[list[int]] = [
        make_prompt(f"conversation {number}", tokens) for number in range(count)
    ]
    for turn in range(TURNS):
        got = engine.ask("generate", prompts=histories, output_tokens=OUTPUT_TOKENS)
        say(f"turn {turn}: {got['wall_s']:.2f} s")
        yield got["wall_s"], sum(got["cached"]), sum(map(len, histories))
        new = [make_prompt(f"turn {turn} {number}", NEW_TOKENS) for number in range(count)]
        histories = [
            [*history, *answer, *more]
            for history, answer, more in zip(histories, got["answers"], new, strict=True)
        ]


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="8b")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096, help="of the first prompt of each [4096]")
    parser.add_argument("--host-gib", type=float, default=48.0, help="host memory of each system [48]")
    parser.add_argument("--files", action="store_true", help="with a tier of files")
    parser.add_argument("--systems", choices=SPECS, nargs="+", default=[PLAIN, "kvtier", "vLLM's tiering"])
    args = parser.parse_args()
    found = []
    for system in args.systems:
        with tempfile.TemporaryDirectory() as name:
            found.append(asdict(measure(Path(name), system, args)))
    print(json.dumps({"Conversations": found}, indent=1))


if __name__ == "__main__":
    main()
