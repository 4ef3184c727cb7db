"""The process of one engine of a benchmark: reads orders from a socket, its standard input, and answers.

Orders and answers are JSON, one a line. Run by ``kvtier_bench.engines``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Order = Mapping[str, Any]
Answer = dict[str, Any]

_HEAVY = ("torch", "transformers", "vllm", "vllm.entrypoints.llm", "kvtier.adapters.vllm.spec")
_MANAGER_CALLS = (
    "on_new_request",
    "on_request_finished",
    "lookup",
    "prepare_load",
    "get_load_source",
    "complete_load",
    "prepare_store",
    "complete_store",
    "touch",
    "on_schedule_end",
    "has_pending_work",
    "take_events",
    "get_stats",
)
_WORKER_CALLS = ("submit_store", "submit_load", "get_finished", "wait")
_METRICS = ("kvtier_", "vllm:kv_offload")
_USAGE = "vllm:kv_offload_cpu_cache_usage_perc"
_STEP = [2, 3]  # a prompt that fills no block: nothing of it is stored
_SETTLE_S = 60.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Carry out orders until the other end hangs up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # none outlives the benchmark
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # else what the engine starts would keep the socket open
    engine = Engine()
    with channel, channel.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            order = json.loads(line)
            carry_out: Callable[[Order], Answer] = getattr(engine, order["do"])
            try:
                answer = carry_out(order)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    engine.stop({})


class Engine:
    """One engine in this process, and the orders that it understands."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._spent: Counter[str] = Counter()

    def make_model(self, order: Order) -> Answer:
        """Make a random Llama-style model from the fields of its configuration. Nothing is downloaded."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(20261121)
        model = LlamaForCausalLM(LlamaConfig(**order["fields"]))
        model.to(getattr(torch, order["dtype"])).save_pretrained(Path(order["directory"]))
        return {}

    def load(self, order: Order) -> Answer:  # noqa: ARG002
        """Import what an engine needs."""
        for module in _HEAVY:
            importlib.import_module(module)
        return {}

    def start(self, order: Order) -> Answer:
        """Start the engine with the given arguments, and let its primary tier get all of its slots."""
        import vllm

        self._llm = vllm.LLM(**order["arguments"])
        _wait_for_slots()
        return {"vllm": str(vllm.__version__)}

    def generate(self, order: Order) -> Answer:
        """Generate for prompts of token ids, all sent at once; report times, tokens and processor time."""
        prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        threads, started = _thread_seconds(), time.perf_counter()
        outputs = self._llm.generate(prompts, _sampling(order["output_tokens"]), use_tqdm=False)
        wall_s = time.perf_counter() - started
        return {
            "wall_s": wall_s,
            "threads": _spent_since(threads),
            "ttft_s": [output.metrics.first_token_latency for output in outputs],
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
        }

    def settle(self, order: Order) -> Answer:  # noqa: ARG002
        """Have the engine step until all stores, puts and fetches have ended; report what it took."""
        threads, started = _thread_seconds(), time.perf_counter()
        while True:
            self._llm.generate([{"prompt_token_ids": _STEP}], _sampling(2), use_tqdm=False)
            if self._is_idle():
                break
            if time.perf_counter() - started > _SETTLE_S:
                raise TimeoutError(f"transfers do not end within {_SETTLE_S:g} s")
        return {"wall_s": time.perf_counter() - started, "threads": _spent_since(threads)}

    def counts(self, order: Order) -> Answer:  # noqa: ARG002
        """Return the samples of all metrics of offloading."""
        return {"samples": [[name, labels, value] for name, labels, value in _samples()]}

    def watch(self, order: Order) -> Answer:  # noqa: ARG002
        """Measure from now on what the engine's thread spends in the connector's manager and worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

        connector = self._connector()
        if connector is not None:
            self._time(connector.connector_scheduler.manager, _MANAGER_CALLS)
            worker_side = get_kv_transfer_group()
            assert isinstance(worker_side, OffloadingConnector)
            self._time(worker_side.connector_worker.worker, _WORKER_CALLS)
        return {}

    def spent(self, order: Order) -> Answer:  # noqa: ARG002
        """Take the seconds that were measured since the last time, by call."""
        spent = dict(self._spent)
        self._spent.clear()
        return {"seconds": spent}

    def stop(self, order: Order) -> Answer:  # noqa: ARG002
        """Stop the engine in an orderly way."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        return {}

    def _connector(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector

    def _is_idle(self) -> bool:
        """Whether the connector has no copies under way and its primary tier nothing pinned or filling."""
        connector = self._connector()
        if connector is None:
            return True
        used = [value for name, _, value in _samples() if name == _USAGE]
        return not connector.connector_scheduler.has_pending_push_work() and not any(used)

    def _time(self, target: Any, names: tuple[str, ...]) -> None:
        for name in names:
            if hasattr(target, name):
                setattr(target, name, self._timed(name, getattr(target, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent[name] += clock() - started  # type: ignore[assignment]

        return timed


def _wait_for_slots() -> None:
    """Wait for the memory of the primary tier: what a benchmark offers before it is there is not stored."""
    from kvtier._memory.population import THREAD_NAME

    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(_SETTLE_S)
            if thread.is_alive():
                raise TimeoutError(f"the primary tier has no memory within {_SETTLE_S:g} s")


def _sampling(output_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def _thread_seconds() -> dict[int, tuple[str, float]]:
    """Return the name and the processor time of each thread, by its kernel id: of this process, and of that
    of the tiers where there is one."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names[os.getpid()] = "engine"  # after a fork Python still has the parent's id of it
    found = {}
    for task in _tasks_of("self"):
        with suppress(OSError):  # it has ended
            found[int(task.name)] = (names.get(int(task.name)) or _name_of_foreign(task), _seconds_of(task))
            for child in (task / "children").read_text().split():
                if b"kvtier._isolation" in Path("/proc", child, "cmdline").read_bytes():
                    for other in _tasks_of(child):
                        found[int(other.name)] = ("tiers-process", _seconds_of(other))
    return found


def _tasks_of(process: str) -> Iterator[Path]:
    return Path("/proc", process, "task").iterdir()


def _seconds_of(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def _name_of_foreign(task: Path) -> str:
    """Name a thread that Python did not start: kvtier's helper blocks all signals in its own."""
    for line in (task / "status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            return "kvtier-files" if int(line.split()[1], 16) & 1 else "compute"
    return "compute"


def _spent_since(earlier: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    spent: Counter[str] = Counter()
    for task, (name, seconds) in _thread_seconds().items():
        spent[name] += seconds - earlier.get(task, ("", 0.0))[1]  # type: ignore[assignment]
    return dict(spent)


def _samples() -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client import REGISTRY

    for metric in REGISTRY.collect():
        if metric.name.startswith(_METRICS):
            for sample in metric.samples:
                yield sample.name, dict(sample.labels), sample.value


if __name__ == "__main__":
    main()
