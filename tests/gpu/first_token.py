"""vLLM's time to the first token, by the place of the prefix: ``python -m tests.gpu.first_token``.

One engine after the other: without a connector, with kvtier, with vLLM's own tiering. Each prompt is
computed, then comes from host memory, after the engine has forgotten its own cache, then from the device.
At the end other prompts fill the host memory, and the first prompts come from files, after a request to the
kernel to drop them from its page cache. A trial on the CPU: ``--model tiny --tokens 256 700 --host-gib
0.02``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvtier_bench.engine.compared import (
    MODELS,
    PLAIN,
    SERVER,
    START_S,
    Engine,
    engine_arguments,
    make_model,
    make_prompt,
    say,
)
from kvtier_bench.machine import drop_from_page_cache

PACKED = "kvtier, layers packed"
SPECS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "kvtier": {"spec_name": "KVTierOffloadingSpec"},
    PACKED: {"spec_name": "KVTierOffloadingSpec"},
    "vLLM's tiering": {
        "spec_name": "NativeTieringSpec",
        "spec_module_path": "kvtier_bench.managers.vllm_tiering",
    },
}
PLACES = ("computed", "device", "host memory", "files")
OUTPUT_TOKENS = 4
ON_GPU = {
    "dtype": "bfloat16",
    "block_size": 16,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": False,
    # Graphs of whole steps avoid minutes of compilation.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128],
    },
}


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token of a prompt, median of the repeats.

    Attributes:
        place: the place of the prefix, one of ``PLACES``.
        cached: tokens of the prompt that were not computed.
        speed_up: factor over the same engine's computed prompt.
        identical: whether all answers equal the same engine's computed ones.
    """

    system: str
    tokens: int
    place: str
    ttft_ms: float
    cached: int
    speed_up: float
    identical: bool


@dataclass(frozen=True)
class Asked:
    """One prompt, sent once."""

    ttft_s: float
    cached: int
    answer: Sequence[int]


class Prompts:
    """The prompts of one engine, and its answers, by number of tokens and place."""

    def __init__(self, engine: Engine, tokens: Sequence[int], repeats: int) -> None:
        self.asked: dict[tuple[int, str], list[Asked]] = defaultdict(list)
        self._engine = engine
        self._all = [(length, number) for length in tokens for number in range(repeats)]

    def warm_up(self) -> None:
        """Send a prompt of each length twice: the first use compiles and tunes kernels."""
        for length in dict.fromkeys(length for length, _ in self._all):
            for _ in range(2):
                self._ask(make_prompt(f"warm {length}", length))
                self._engine.ask("settle")
                self._forget()

    def compute_and_repeat(self, *, has_host_memory: bool) -> None:
        """Compute each prompt, then repeat it from host memory and from the device."""
        for it in self._all:
            self._forget()
            self._note(it, "computed")
            self._engine.ask("settle")
            if has_host_memory:
                self._forget()
                self._note(it, "host memory")
            self._note(it, "device")

    def read_files(self, folder: Path, fillers: int) -> None:
        """Fill the host memory with other prompts, and repeat the first ones from files."""
        longest = max(length for length, _ in self._all)
        for number in range(fillers):
            self._ask(make_prompt(f"filler {number}", longest))
        self._engine.ask("settle")
        self._forget()
        drop_from_page_cache(folder)
        for it in self._all:
            self._note(it, "files")

    def _note(self, it: tuple[int, int], place: str) -> None:
        self.asked[it[0], place].append(self._ask(make_prompt(f"prompt {it}", it[0])))

    def _ask(self, prompt: Sequence[int]) -> Asked:
        got = self._engine.ask("generate", prompts=[prompt], output_tokens=OUTPUT_TOKENS)
        return Asked(got["ttft_s"][0], got["cached"][0], got["answers"][0])

    def _forget(self) -> None:
        self._engine.ask("call", module=SERVER, function="forget", arguments={})


def await_pinned(engine: Engine, host_bytes: int) -> None:
    """Wait until kvtier's host memory is page-locked, if locking has begun: only on a GPU."""
    while 0 < _pinned(engine) < host_bytes:
        engine.ask("settle")


def _pinned(engine: Engine) -> float:
    samples = engine.ask("metrics")["samples"]
    return sum(float(value) for name, _, value in samples if name == "kvtier_pinned_bytes")


def rows(system: str, asked: Mapping[tuple[int, str], Sequence[Asked]]) -> Iterator[FirstToken]:
    """Return a row for each length and place."""
    for (tokens, place), them in asked.items():
        computed = asked[tokens, "computed"]
        ttft_s, base_s = (median(it.ttft_s for it in of) for of in (them, computed))
        identical = [it.answer for it in them] == [it.answer for it in computed]
        yield FirstToken(system, tokens, place, ttft_s * 1e3, them[0].cached, base_s / ttft_s, identical)


def measure(model: Path, size: str, folder: Path, args: argparse.Namespace) -> Iterator[FirstToken]:
    """Measure one system after the other."""
    longest = max(args.tokens)
    arguments = {
        "load_format": "dummy",
        "max_model_len": longest + 64,
        "max_num_batched_tokens": min(16384, longest + 64),
        "max_num_seqs": 16,
    }
    shape, item_bytes = MODELS[size], 2 if size == "8b" else 4
    heads = shape["num_key_value_heads"] * shape["head_dim"]
    token_bytes = 2 * item_bytes * shape["num_hidden_layers"] * heads
    host_bytes = int(args.host_gib * 2**30)
    fillers = host_bytes // (token_bytes * longest) + 2
    for system in args.systems:
        spec = SPECS[system]
        files = folder / system.replace(" ", "-")
        settings = spec and {
            **spec,
            "cpu_bytes_to_use": host_bytes,
            "eviction_policy": "lru",  # other policies keep chunks that were hit once
            "secondary_tiers": [{"type": "fs", "root_dir": str(files)}],
        }
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not args.in_process))}
        if system == PACKED:
            variables["VLLM_KV_CACHE_LAYOUT"] = "BLHNC"
        with Engine(system, folder, variables=variables) as engine:
            engine.ask("load", START_S)
            blocks = {"num_gpu_blocks_override": 3 * (longest + 64) // 32}
            blocks_on_gpu = {"num_gpu_blocks_override": 3 * (longest + 64) // 16}
            started = engine_arguments(model, settings or None, arguments | blocks)
            engine.ask("start", START_S, arguments=started, on_gpu=ON_GPU | blocks_on_gpu)
            say(f"{system}: engine ready")
            prompts = Prompts(engine, args.tokens, args.repeats)
            prompts.warm_up()
            await_pinned(engine, host_bytes)
            prompts.compute_and_repeat(has_host_memory=bool(spec))
            if spec:
                prompts.read_files(files, fillers)
            engine.ask("stop")
        yield from rows(system, prompts.asked)


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--host-gib", type=float, default=6.0, help="host memory of each system [6]")
    parser.add_argument("--in-process", action="store_true", help="engines in this process")
    parser.add_argument(
        "--systems", choices=SPECS, nargs="+", default=[name for name in SPECS if name != PACKED]
    )
    parser.add_argument("--root", type=Path, help="directory on the disk to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.root) as name:
        folder = Path(name)
        found = [asdict(it) for it in measure(make_model(folder, args.model), args.model, folder, args)]
    print(json.dumps({"FirstToken": found}, indent=1))


if __name__ == "__main__":
    main()
