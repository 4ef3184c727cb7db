"""Runs requests in an engine's own process. See ``Engine.call`` in ``tests.integration.harness``."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy, deepcopy
from functools import partial
from typing import Any

from kvtier._core.chunks import block_of
from kvtier._core.tiering import Tiering
from kvtier.keys import content_hash, group_index
from kvtier_testing import invariants

_PATIENCE_S = 60.0
DEADLOCK = "deadlock of vLLM's sessions"
_NUMBERS = itertools.count()
_planted = ExitStack()

Turn = dict[str, Any]


class Request:
    """A request, or a session of several inputs.

    Args:
        engine: vLLM's engine.
        order: the fields of an ``Ask``, with prompts of token ids.
    """

    def __init__(self, engine: Any, order: dict[str, Any]) -> None:
        self._engine, self.order = engine, order
        self.turns: list[Turn] = []
        self.cached: int | None = None
        self.end: str | None = None
        self._inputs: list[tuple[list[int], int]] = [tuple(one) for one in order["inputs"]]
        self._is_session = len(self._inputs) > 1
        self._id, self._turn = "", 0

    def start(self) -> None:
        self._put(f"life-{next(_NUMBERS)}")
        while self.order["eager"] and self._inputs:
            self._put(self._id)

    def abort(self) -> None:
        if self.end is None:
            self._engine.abort_request([self._id], internal=True)
            self.end = "aborted"

    def hear(self, output: Any, weights: int) -> None:
        """Keep an output; send a session's next input after the answer to the last one."""
        said, turn = output.outputs[0], self.turns[self._turn]
        if self.cached is None:
            self.cached = output.num_cached_tokens
        turn["said"] += said.token_ids
        turn["weights"] += [weights] * len(said.token_ids)
        turn["logprobs"] += [
            of_one[token].logprob for token, of_one in zip(said.token_ids, said.logprobs or (), strict=False)
        ]
        if said.finish_reason is None or self.end is not None:
            return
        self._turn += 1
        if self._inputs:
            self._put(self._id)
        elif self._turn == len(self.turns):
            if self._is_session:
                self._add(self._request(self._id, [0], 1, resumable=False))
            self.end = said.finish_reason

    def _put(self, name: str) -> None:
        prompt, say = self._inputs.pop(0)
        self.turns.append({"said": [], "logprobs": [], "weights": []})
        request = self._request(name, prompt, say, resumable=self._is_session)
        if not self._id:
            self._engine.input_processor.assign_request_id(request)
            self._id = request.request_id
        self._add(request)

    def _request(self, name: str, prompt: list[int], say: int, *, resumable: bool) -> Any:
        order, processor = self.order, self._engine.input_processor
        tokens = {"prompt_token_ids": prompt, **({"cache_salt": order["salt"]} if order["salt"] else {})}
        request = processor.process_inputs(
            name,
            tokens,
            _sampling(say, {**order, "hint": self._named(order["hint"])}),
            supported_tasks=self._engine.get_supported_tasks(),
            lora_request=_adapter(order),
            priority=order["priority"],
            resumable=resumable,
        )
        if self._id:
            request.external_req_id = self._id.rpartition("-")[0]
        return request

    def _named(self, hint: dict[str, Any]) -> dict[str, Any]:
        """Return the client's parameters, with block hashes in place of the places in host memory.

        Without a connector no block is named.
        """
        hint = deepcopy(hint)
        has_memory = self._engine.engine_core.engine_core.scheduler.connector is not None
        for envelope in (hint.get("kv_hint"), hint.get("kvtier", {}).get("hints")):
            for action in envelope["actions"] if envelope else ():
                keys = [*_core_of(self._engine).table.visible] if has_memory else []
                places = action["payload"].pop("block_hashes", None)
                if places is not None:
                    named = [block_of(keys[int(place * len(keys))]) for place in places if keys]
                    action["payload"]["block_hashes"] = [*named, 7]
        return hint

    def _add(self, request: Any) -> None:
        its_own = copy(request)  # both sides extend the prompt of a session
        its_own.prompt_token_ids = list(request.prompt_token_ids)
        self._engine.output_processor.add_request(its_own, None, None, 0)
        self._engine.engine_core.add_request(request)

    @property
    def external_id(self) -> str:
        return self._id.rpartition("-")[0]


def _sampling(say: int, order: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=say,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if order["prompt_logprobs"] else None,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": order["hint"]} if order["hint"] else None,
    )


def _adapter(order: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    if not order["adapter"]:
        return None
    return LoRARequest(f"adapter-{order['adapter']}", order["adapter"], order["adapter_path"])


def play(
    llm: Any, orders: list[dict[str, Any]], resets: list[list[Any]], weights: int, new: list[int]
) -> dict[str, Any]:
    """Run requests concurrently until all have ended.

    Args:
        llm: the engine.
        orders: the requests; see ``Request``. Each arrives in its step ``at``.
        resets: steps and kinds of resets. If vLLM refuses the last one, the call repeats it at the end:
            kvtier stores nothing until then.
        weights: the model's current weights. See ``reweigh``.
        new: weights to load at the resets, in order. A reset that vLLM refuses loads none.

    Returns:
        ``heard``: for each request its ``turns`` with the tokens ``said``, their ``logprobs`` and the
        ``weights``, the ``end``, and how many tokens of its prompt were ``cached``. ``weights``: the last
        weights.
    """
    engine = llm.llm_engine
    requests = [Request(engine, order) for order in orders]
    waiting, running = list(requests), {}
    heard_s, is_refused = time.monotonic(), False
    for step in itertools.count():
        for request in [one for one in waiting if one.order["at"] <= step]:
            waiting.remove(request)
            request.start()
            running[request.external_id] = (step, request)
        for began, request in running.values():
            if request.order["abort"] is not None and step - began >= request.order["abort"]:
                request.abort()
        for what in [what for at, what in resets if at == step]:
            try:
                reaches_tiers = "device" not in what and "weights" not in what
                is_done = engine.reset_prefix_cache("preempt" in what, reset_connector=reaches_tiers)
                is_refused = reaches_tiers and not is_done
                if is_done and "device" not in what:
                    weights = new.pop(0)
                    reweigh(llm, weights, is_told=reaches_tiers)
            except RuntimeError:  # vLLM refuses while it loads a preempted request
                resets.append([step + 1, what])
        if not waiting and not engine.has_unfinished_requests():
            break
        for output in engine.step():
            running[output.request_id][1].hear(output, weights)
            heard_s = time.monotonic()
        if time.monotonic() > heard_s + _PATIENCE_S:
            left = {name: one.turns for name, (_, one) in running.items() if one.end is None}
            why = DEADLOCK if _is_deadlocked(engine.engine_core.engine_core.scheduler) else "no answer"
            raise TimeoutError(f"{why} for {_PATIENCE_S} s: {left}")
    if is_refused and engine.reset_prefix_cache(True, reset_connector=True):
        weights = new.pop(0)
        reweigh(llm, weights)
    heard = [{"turns": one.turns, "end": one.end, "cached": one.cached} for one in requests]
    return {"heard": heard, "weights": weights}


def _is_deadlocked(scheduler: Any) -> bool:
    """Return whether a continued session and the requests beside it wait for one another's blocks.

    vLLM preempts only running requests. A session holds its blocks while it waits for input, and a request
    holds those that were loaded for it: if none runs and each needs more blocks than are free, none can
        continue.
    """
    holding = list(scheduler.kv_holding_waiting)
    is_ready = all(one.status.name == "WAITING" for one in holding)  # no load is pending
    return not scheduler.running and is_ready and any(one.resumable for one in holding)


def reweigh(llm: Any, weights: int, *, is_told: bool = True) -> dict[str, Any]:
    """Load other weights, derived from a number; 0 stands for those of the model's files.

    ``is_told``: a reset has told kvtier. Otherwise the name of the worker's function has to.
    """
    llm.collective_rpc(_reweigh if is_told else _load_weights, args=(weights,))
    return {}


def _load_weights(worker: Any, weights: int) -> None:
    _reweigh(worker, weights)


def _reweigh(worker: Any, weights: int) -> None:
    import torch

    model = worker.get_model()
    first = model.__dict__.setdefault("_first_weights", {})
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:  # each rank has all of it, and no kernel keeps a copy
            original = first.setdefault(name, parameter.detach().clone())
            noise = torch.sin(torch.arange(len(original)) * weights + zlib.crc32(name.encode()) % 97)
            parameter.data.copy_(original + 0.3 * noise * bool(weights))


def score(llm: Any, orders: list[dict[str, Any]]) -> dict[str, Any]:
    """Return two logprobs for each token of a text from ``start`` on: its own, and the highest.

    The engine computes each text in one request, without reuse. The adapters of lives leave the logits alone,
    and vLLM's CPU engine crashes when it adapts those of a prompt (0.32).
    """
    from vllm import SamplingParams
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    PunicaWrapperCPU.add_lora_logits = lambda *_, **__: None
    how = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=1)
    texts = [{"prompt_token_ids": order["text"]} for order in orders]
    adapters = [_adapter(order) for order in orders]
    scores = []
    for output, order in zip(
        llm.generate(texts, how, lora_request=adapters, use_tqdm=False), orders, strict=True
    ):
        positions = list(zip(order["text"], output.prompt_logprobs, strict=True))[order["start"] :]
        scores.append([(of_one[token].logprob, _likeliest(of_one)) for token, of_one in positions])
    return {"scores": scores}


def _likeliest(of_one: dict[int, Any]) -> float:
    return max(float(found.logprob) for found in of_one.values())


def rest(llm: Any) -> dict[str, Any]:
    """Check the core of an idle engine.

    Returns:
        ``ready``: the content hashes and the groups of the chunks that can be loaded from host memory.

    Raises:
        AssertionError: an invariant is broken, or a handle is left.
    """
    core = _core(llm)
    invariants.check(core)
    left = {
        "handles": core.handles,
        "transfers": core.shared.transfers,
        "pending requests": core.holds.pending,
        "awaiting requests": core.holds.awaiting,
        "computed requests": len(core.shared.gate.running) > 1,  # the last transfer ends with the next step
    }
    for what, held in left.items():
        assert not held, f"{what} are left: {held}"
    return {"ready": [(content_hash(key).hex(), group_index(key)) for key in core.table.visible]}


def _core(llm: Any) -> Tiering:
    return _core_of(llm.llm_engine)


def _core_of(engine: Any) -> Tiering:
    connector = engine.engine_core.engine_core.scheduler.connector
    children = getattr(connector, "_connectors", [connector])
    (scheduler,) = [one.connector_scheduler for one in children if hasattr(one, "connector_scheduler")]
    core: Tiering = scheduler.manager.core
    return core


def prepare(llm: Any, bug: str, copy_s: float) -> dict[str, Any]:
    """Make the copies of the next engine slow, and plant a bug in its kvtier.

    It runs in one thread: a tiny model is no faster with two, and much slower if the cores are busy.

    Args:
        bug: one of ``tests.differential.mutations``, or none.
        copy_s: how long each copy waits before it begins.
    """
    import torch

    from kvtier._device.backends import cpu
    from tests.differential.mutations import MUTATIONS
    from tests.sim.mutations import planted

    torch.set_num_threads(1)
    for mutation in MUTATIONS:
        if mutation.name == bug:
            _planted.enter_context(planted(mutation))
    for name in ("copy_batch", "copy_each") if copy_s else ():
        setattr(cpu, name, partial(_copy_late, getattr(cpu, name), copy_s))
    return {}


def _copy_late(make: Callable[[Any], None], copy_s: float, plan: Any) -> None:
    time.sleep(copy_s)
    make(plan)
