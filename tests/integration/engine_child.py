"""What a forked child does: it runs one engine and carries out orders, JSON lines over a socket."""

from __future__ import annotations

import importlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.integration.faults import Faults

Order = Mapping[str, Any]
Answer = dict[str, Any]

_POPULATE_S = 60.0
_METRICS = (
    "kvtier_",
    "vllm:kv_offload_config_info",
    "vllm:kv_offload_cpu",
    "vllm:kv_offload_tiering",
    "vllm:num_preemptions",
    "vllm:spec_decode",
)


def serve(channel: socket.socket) -> None:
    """Carry out orders until the other end hangs up. An error is answered in words."""
    child = EngineChild()
    with channel.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            order = json.loads(line)
            carry_out: Callable[[Order], Answer] = getattr(child, order["do"])
            try:
                answer = carry_out(order)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
                if order["do"] != "start":
                    raise
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    child.stop({})


class EngineChild:
    """One engine and what can be asked of it."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._faults: Faults | None = None

    def make_model(self, order: Order) -> Answer:
        """Make a random model from the fields of its configuration. Nothing is downloaded."""
        import torch
        import transformers

        config = getattr(transformers, order["config"])(**order["fields"])
        torch.manual_seed(order["seed"])
        model = getattr(transformers, order["architecture"])(config)
        model.to(torch.float32).save_pretrained(Path(order["directory"]))
        return {}

    def make_copies_faulty(self, order: Order) -> Answer:
        """Have the copies of the engine that is started next ask whether to fail."""
        self._faults = Faults(order["file"])
        self._faults.install()
        return {}

    def fail_copies(self, order: Order) -> Answer:
        """Set how many copies fail from now on."""
        assert self._faults is not None
        self._faults.set(**{name: order[name] for name in ("stores", "loads", "staged", "rank")})
        return {}

    def start(self, order: Order) -> Answer:
        """Start the engine with the given arguments, and let its primary tier get all of its slots."""
        from vllm import LLM

        self._llm = LLM(**order["arguments"])
        if order["arguments"].get("pipeline_parallel_size", 1) > 1:
            # Later stages need buffers that the CPU's eager mode does not make by itself.
            self._llm.collective_rpc(_profile)
        _wait_for_slots()
        return {}

    def generate(self, order: Order) -> Answer:
        """Generate for prompts of token ids, one after the other or all at once."""
        salt = {"cache_salt": order["salt"]} if order.get("salt") else {}
        prompts = [{"prompt_token_ids": prompt, **salt} for prompt in order["prompts"]]
        sampling = _sampling(order["output_tokens"], order.get("kv_transfer_params"))
        batches = [prompts] if order["together"] else [[prompt] for prompt in prompts]
        outputs = [
            output for batch in batches for output in self._llm.generate(batch, sampling, use_tqdm=False)
        ]
        return {"answers": [list(output.outputs[0].token_ids) for output in outputs]}

    def abort(self, order: Order) -> Answer:
        """Send prompts, do some steps, abort all that has not ended; say how many those were."""
        engine = self._llm.llm_engine
        names = [f"{order['name']}-{number}" for number in range(len(order["prompts"]))]
        for name, prompt in zip(names, order["prompts"], strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(order["output_tokens"]))
        ended = set()
        for _ in range(order["steps"]):
            ended |= {output.request_id for output in engine.step() if output.finished}
        engine.abort_request([name for name in names if name not in ended])
        return {"aborted": len(names) - len(ended)}

    def metrics(self, order: Order) -> Answer:
        """Return the samples of the engine's metrics that concern offloading, as an endpoint shows them."""
        return {"samples": [[name, labels, value] for name, labels, value in _samples()]}

    def defined(self, order: Order) -> Answer:
        """Return the names of all metrics that kvtier can send."""
        from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES

        return {"names": [metric.name for metric in (*COUNTERS.values(), *BYTES.values(), *GAUGES.values())]}

    def reset(self, order: Order) -> Answer:
        """Forget what is cached on the device, and with ``connector`` everywhere else."""
        done = self._llm.reset_prefix_cache(reset_connector=order["connector"])
        return {"done": bool(done)}

    def call(self, order: Order) -> Answer:
        """Call a function of the tests with the engine: ``module`` and ``function`` name it."""
        function = getattr(importlib.import_module(order["module"]), order["function"])
        answer: Answer = function(self._llm, **order["arguments"])
        return answer

    def sleep(self, order: Order) -> Answer:
        """Go to sleep and wake up again; with ``weights``, the model's weights are others afterwards."""
        self._llm.sleep(level=order["level"])
        if order["weights"] is not None:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": order["weights"]})
        self._llm.wake_up()
        return {}

    def reload(self, order: Order) -> Answer:
        """Give the model other weights, as a trainer does: in place and without a word to the scheduler."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": order["weights"]})
        return {}

    def stop(self, order: Order) -> Answer:
        """Stop the engine in an orderly way."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        return {}


def _wait_for_slots() -> None:
    """Wait for the memory of the primary tier: what is offered before it is there is not stored.

    A server goes on meanwhile, but tests count chunks. An engine in a process of its own is not waited for.
    """
    from kvtier._memory.population import THREAD_NAME

    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(_POPULATE_S)
            assert not thread.is_alive(), f"no primary tier within {_POPULATE_S} s"


def _profile(worker: Any) -> None:
    worker.model_runner.profile_run()


def _sampling(output_tokens: int, kv_transfer_params: Any = None) -> Any:
    from vllm import SamplingParams

    extra = {"extra_args": {"kv_transfer_params": kv_transfer_params}} if kv_transfer_params else {}
    return SamplingParams(
        max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **extra
    )


def _samples() -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client import REGISTRY

    for metric in REGISTRY.collect():
        if metric.name.startswith(_METRICS):
            yield metric.name, {}, 0.0  # declared, though perhaps no sample has come yet
            for sample in metric.samples:
                yield sample.name, dict(sample.labels), sample.value
