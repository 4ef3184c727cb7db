"""The process of one engine of a benchmark. It reads orders from its standard input, a socket, and answers.

Each order and each answer is one line of JSON. Run by ``kvtier_bench.engine.compared``.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Order = Mapping[str, Any]
Answer = dict[str, Any]

_HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.models.llama",
    "vllm.v1.kv_offload.base",
    "kvtier._config",
    "kvtier._execution.executor",
)
_METRICS = ("kvtier_", "vllm:kv_offload", "vllm:num_preemptions", "vllm:spec_decode")
_USAGE = "vllm:kv_offload_cpu_cache_usage_perc"
_STEP = [2, 3]  # a prompt shorter than a block, so that nothing of it is stored
_SETTLE_S = 60.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Carry out orders until the other end closes the socket."""
    die_with_parent()
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        # Otherwise the engine's child processes would inherit the socket and keep it open.
        os.dup2(nothing.fileno(), 0)
    serve(channel, Engine())


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(channel: socket.socket, engine: Engine) -> None:
    """Carry out orders until the other end closes the socket. Answer an error with its message."""
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
    """One engine in this process. The methods are the orders that it accepts."""

    def __init__(self, llm: Any = None) -> None:
        self._llm = llm

    def make_model(self, order: Order) -> Answer:
        """Make a model with random weights from transformers' classes. Nothing is downloaded."""
        import torch
        import transformers

        config = getattr(transformers, order["config"])(**order["fields"])
        torch.manual_seed(order["seed"])
        model = getattr(transformers, order["architecture"])(config)
        model.to(torch.float32).save_pretrained(Path(order["directory"]))
        return {}

    def load(self, order: Order) -> Answer:  # noqa: ARG002
        """Import the modules that an engine needs."""
        for module in _HEAVY:
            importlib.import_module(module)
        from vllm.platforms import current_platform

        # On a GPU, vLLM's CPU worker must not be imported: it replaces torch's events by dummies.
        importlib.import_module(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
        return {}

    def start(self, order: Order) -> Answer:
        """Start the engine with the given arguments, and wait until its primary tier is complete.

        With ``at_once`` it does not wait. On a GPU, the arguments ``on_gpu`` replace those with the same
        name.
        """
        from vllm import LLM
        from vllm.platforms import current_platform

        on_gpu = {} if current_platform.is_cpu() else order.get("on_gpu", {})
        self._llm = LLM(**{**order["arguments"], **on_gpu})
        if order["arguments"].get("pipeline_parallel_size", 1) > 1:
            # Later stages need buffers that the CPU's eager mode does not create by itself.
            self._llm.collective_rpc(_profile)
        if not order.get("at_once"):
            _wait_for_host_memory()
        return {}

    def generate(self, order: Order) -> Answer:
        """Generate answers to prompts of token ids, all at once or one after the other.

        Returns:
            ``answers``, the token ids; ``wall_s``; ``ttft_s`` of each prompt; ``cached``, the tokens of each
            prompt that were not computed; ``logprobs`` of the tokens, if requested.
        """
        salt = {"cache_salt": order["salt"]} if order.get("salt") else {}
        prompts = [{"prompt_token_ids": prompt, **salt} for prompt in order["prompts"]]
        how = sampling(order["output_tokens"], order.get("kv_transfer_params"), order.get("logprobs"))
        batches = [prompts] if order.get("together", True) else [[prompt] for prompt in prompts]
        started = time.perf_counter()
        outputs = [output for batch in batches for output in self._llm.generate(batch, how, use_tqdm=False)]
        wall_s = time.perf_counter() - started
        return {
            "wall_s": wall_s,
            "ttft_s": [output.metrics.first_token_latency for output in outputs],
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "logprobs": [_logprobs(output.outputs[0]) for output in outputs],
        }

    def settle(self, order: Order) -> Answer:  # noqa: ARG002
        """Run engine steps until all stores, puts and fetches have ended."""
        started = time.perf_counter()
        while True:
            self._llm.generate([{"prompt_token_ids": _STEP}], sampling(2), use_tqdm=False)
            if self._is_idle():
                break
            if time.perf_counter() - started > _SETTLE_S:
                raise TimeoutError(f"transfers do not end within {_SETTLE_S:g} s")
        return {}

    def metrics(self, order: Order) -> Answer:  # noqa: ARG002
        """Return the samples of the offloading metrics, as a metrics endpoint shows them."""
        return {"samples": [[name, labels, value] for name, labels, value in _samples()]}

    def call(self, order: Order) -> Answer:
        """Call a function, named by ``module`` and ``function``, with the engine."""
        function = getattr(importlib.import_module(order["module"]), order["function"])
        answer: Answer = function(self._llm, **order["arguments"])
        return answer

    def stop(self, order: Order) -> Answer:  # noqa: ARG002
        """Shut the engine down."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        return {}

    def _is_idle(self) -> bool:
        """Return whether no copy is in flight, and no slot of the primary tier is pinned or filling."""
        used = any(value for name, _, value in _samples() if name == _USAGE)
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        if core is None:  # in its own process
            return not used
        connector = core.scheduler.connector
        if connector is None:
            return True
        if not hasattr(connector, "connector_scheduler"):
            # LMCache keeps a request, such as the one just finished, until a step after its last store.
            return len(core.scheduler.requests) <= 1
        return not connector.connector_scheduler.has_pending_push_work() and not used


def _wait_for_host_memory() -> None:
    """Wait until the primary tier is populated and pinned.

    Chunks offered earlier are refused or copied slowly. This does not wait for the memory of other processes,
    such as a second rank's.
    """
    from kvtier._device import _pinning
    from kvtier._memory import population

    # Keep this order: slots are populated first, then pinned.
    for name in (population.THREAD_NAME, _pinning.THREAD_NAME):
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join(_SETTLE_S)
                if thread.is_alive():
                    raise TimeoutError(f"{name}: host memory is not ready within {_SETTLE_S:g} s")


def _profile(worker: Any) -> None:
    worker.model_runner.profile_run()


def forget(llm: Any) -> Answer:
    """Clear the engine's own cache, but not its connector's. For the order ``call``.

    A connector may hold blocks of a finished request until a step after its last store.
    """
    deadline = time.monotonic() + _SETTLE_S
    while not llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise TimeoutError(f"blocks are not given back within {_SETTLE_S:g} s")
        llm.llm_engine.step()
    return {}


def unverified(llm: Any) -> Answer:
    """Return how many of the previous engine's chunks are not verified yet. For the order ``call``."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager
    return {"chunks": len(manager.core.table.trailers.unverified())}


def _logprobs(answer: Any) -> list[float]:
    found = zip(answer.token_ids, answer.logprobs or (), strict=False)
    return [of_step[token].logprob for token, of_step in found]


def sampling(output_tokens: int, kv_transfer_params: Any = None, logprobs: int | None = None) -> Any:
    """Return parameters that generate the likeliest tokens and return only their ids and ``logprobs``."""
    from vllm import SamplingParams

    extra = {"extra_args": {"kv_transfer_params": kv_transfer_params}} if kv_transfer_params else {}
    return SamplingParams(
        max_tokens=output_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        **extra,
    )


def _samples() -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client import REGISTRY

    for metric in REGISTRY.collect():
        if metric.name.startswith(_METRICS):
            yield metric.name, {}, 0.0  # The metric is declared, but may have no sample yet.
            for sample in metric.samples:
                yield sample.name, dict(sample.labels), sample.value


if __name__ == "__main__":
    main()
