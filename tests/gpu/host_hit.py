"""Break down the time of a hit in host memory: ``python -m tests.gpu.host_hit kvtier``.

The engine runs in this process. The calls of ``TRACED`` are timed from the request on to the first token.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier_bench.engine import process
from kvtier_bench.engine.compared import engine_arguments, make_model, make_prompt
from tests.gpu.first_token import ON_GPU, SPECS

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
TRACED = {
    "vllm.v1.engine.core:EngineCore": ("step",),
    "vllm.v1.core.sched.scheduler:Scheduler": ("schedule",),
    "vllm.v1.worker.gpu_worker:Worker": ("execute_model", "sample_tokens"),
    f"{_CONNECTOR}.worker:OffloadingConnectorWorker": ("start_kv_transfers", "get_finished"),
    f"{_CONNECTOR}.scheduler:OffloadingConnectorScheduler": ("get_num_new_matched_tokens",),
    "vllm.v1.kv_offload.cpu.gpu_worker:SingleDirectionOffloadingHandler": ("transfer_async", "wait"),
    "kvtier.adapters.vllm._worker:KVTierWorker": ("submit_load", "wait"),
    "kvtier._device.plan:CopyPlanner": ("load",),
    "kvtier._device._queues:QueueThread": ("submit", "_enqueue", "_finish"),
    "kvtier._device._engine:TransferEngine": ("_end",),
}
REPEATS = 5


@dataclass(frozen=True)
class Call:
    """One call: milliseconds after the request, and its own milliseconds."""

    start_ms: float
    ms: float
    thread: str
    name: str


class Tracer:
    """Times calls of the traced functions, in all threads."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float, str, str]] = []
        for place, names in TRACED.items():
            module, _, owner = place.partition(":")
            for name in names:
                self._wrap(getattr(importlib.import_module(module), owner), name)

    def _wrap(self, owner: type, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begun
                self._calls.append((begun, took, threading.current_thread().name, f"{owner.__name__}.{name}"))

        setattr(owner, name, timed)

    def take(self, begun: float) -> list[Call]:
        """Return the calls since ``begun``, in the order of their starts, and clear them."""
        calls, self._calls = self._calls, []
        return [
            Call((at - begun) * 1e3, took * 1e3, *rest) for at, took, *rest in sorted(calls) if at >= begun
        ]


def hits(engine: process.Engine, tracer: Tracer, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the time to the first token of each repeated hit, and the calls until then."""
    order = {"prompts": [make_prompt(f"hit {tokens}", tokens)], "output_tokens": 2}
    for number in range(REPEATS + 2):  # computed, then a first hit that is not measured
        process.forget(engine._llm)
        engine.settle({})
        tracer.take(0)
        begun = time.perf_counter()
        ttft_ms = engine.generate(order)["ttft_s"][0] * 1e3
        calls = [asdict(call) for call in tracer.take(begun) if call.start_ms < ttft_ms]
        if number > 1:
            yield {"tokens": tokens, "ttft_ms": ttft_ms, "calls": calls}
        engine.settle({})


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=[name for name, spec in SPECS.items() if spec])
    parser.add_argument("--model", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--host-gib", type=float, default=4.0)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    longest = max(args.tokens) + 64
    arguments = {"load_format": "dummy", "max_model_len": longest, "num_gpu_blocks_override": longest // 8}
    with tempfile.TemporaryDirectory() as name:
        settings = {
            **SPECS[args.system],
            "cpu_bytes_to_use": int(args.host_gib * 2**30),
            "secondary_tiers": [],
        }
        started = engine_arguments(make_model(Path(name), args.model), settings, arguments)
        engine = process.Engine()
        engine.load({})
        engine.start({"arguments": started, "on_gpu": ON_GPU})
        tracer = Tracer()
        found = [hit for tokens in args.tokens for hit in hits(engine, tracer, tokens)]
        engine.stop({})
    print(json.dumps({"system": args.system, "HostHit": found}))


if __name__ == "__main__":
    main()
