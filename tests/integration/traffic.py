"""Functions that tests run in an engine's own process. See ``Engine.call`` in ``harness``."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvtier_bench.engine.process import sampling

_NUMBERS = itertools.count()


def find(llm: Any, directory: str) -> dict[str, Any]:
    """Make distributions in this directory visible as if they were installed."""
    sys.path.insert(0, directory)
    return {}


def die_at(llm: Any, root: str, chunks: int, prompts: list[list[int]]) -> NoReturn:
    """Send prompts all at once; the engine kills itself once a root has ``chunks`` chunks.

    A watcher in another process could be too late. Answers may come before the chunks: the prompts are
    repeated until the kill.
    """
    from tests.integration.harness import chunks_in

    def watch() -> None:
        while len(chunks_in(Path(root))) < chunks:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        requests(llm, prompts, output_tokens=4)


def requests(
    llm: Any,
    prompts: list[list[int]],
    output_tokens: int,
    aborts: Mapping[str, int] | None = None,
    resets: Sequence[tuple[int, bool]] = (),
    connector: bool = True,
) -> dict[str, Any]:
    """Send prompts all at once and step until all have ended.

    Args:
        llm: the engine.
        prompts: token ids of each prompt.
        output_tokens: tokens to generate for each prompt.
        aborts: step after which a prompt is aborted, by prompt number.
        resets: tokens that each prompt has at a reset, and whether vLLM preempts running requests first.
        connector: whether the resets include the connector.

    Returns:
        ``answers``: the tokens of each prompt; ``ends``: its finish reason, None if aborted;
        ``waits``: seconds until its first token; ``were_reset``: whether vLLM's own cache was, by each reset.
    """
    engine, number = llm.llm_engine, next(_NUMBERS)
    names = [f"batch-{number}-{place}" for place in range(len(prompts))]
    begun: dict[str, float] = {}
    waits: dict[str, float] = {}
    ends: dict[str, str] = {}
    said: dict[str, list[int]] = {name: [] for name in names}
    were_reset: list[bool] = []
    for name, prompt in zip(names, prompts, strict=True):
        begun[name] = time.monotonic()
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling(output_tokens))
    for step in itertools.count():
        leaving = [name for place, name in enumerate(names) if (aborts or {}).get(str(place)) == step]
        engine.abort_request([name for name in leaving if name not in ends])
        if not engine.has_unfinished_requests():
            break
        for tokens, preempts in resets[len(were_reset) : len(were_reset) + 1]:
            if min(map(len, said.values())) >= tokens:
                were_reset.append(engine.reset_prefix_cache(preempts, reset_connector=connector))
        for output in engine.step():
            waits.setdefault(output.request_id, time.monotonic() - begun[output.request_id])
            said[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                ends[output.request_id] = output.outputs[0].finish_reason
    return {
        "answers": list(said.values()),
        "ends": [ends.get(name) for name in names],
        "waits": [waits.get(name) for name in names],
        "were_reset": were_reset,
    }


def reset(llm: Any, connector: bool) -> dict[str, Any]:
    """Clear the device's prefix cache, and with ``connector`` all tiers."""
    return {"done": bool(llm.reset_prefix_cache(reset_connector=connector))}


def sleep(llm: Any, level: int, weights: str | None) -> dict[str, Any]:
    """Sleep and wake up again; with ``weights``, the model then has other weights."""
    llm.sleep(level=level)
    if weights is not None:
        reload(llm, weights)
    llm.wake_up()
    return {}


def reload(llm: Any, weights: str) -> dict[str, Any]:
    """Replace the model's weights as a trainer does: in place, without notice to the scheduler."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
    return {}


def fail_amid(llm: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Make vLLM end a request with an error when ``tokens`` of its prompt are computed.

    vLLM does so if two media have the same UUID, or an encoder's outputs are unavailable.
    """
    from vllm.v1.request import RequestStatus

    engine, name = llm.llm_engine, f"failing-{next(_NUMBERS)}"
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling(1))
    scheduler = engine.engine_core.engine_core.scheduler
    (request,) = scheduler.requests.values()
    while request.num_computed_tokens < tokens:
        engine.step()
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    engine.abort_request([name])
    return {"computed": request.num_computed_tokens}


def overtake(llm: Any, low: list[int], high: list[int], tokens: int) -> dict[str, Any]:
    """Return the answer to a prompt; a higher-priority request preempts it after ``tokens`` of its tokens."""
    engine, number = llm.llm_engine, next(_NUMBERS)
    first, second = f"{number}001", f"{number}002"
    engine.add_request(first, {"prompt_token_ids": low}, sampling(8), priority=1)
    (request,) = engine.engine_core.engine_core.scheduler.requests.values()
    while request.num_computed_tokens < tokens:
        engine.step()
    engine.add_request(second, {"prompt_token_ids": high}, sampling(16), priority=0)
    said: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        said |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    return {"answer": said[first], "preemptions": request.num_preemptions}


def replace_adapter(
    llm: Any, prompt: list[int], folder: str, replacements: list[tuple[int, str]]
) -> dict[str, Any]:
    """Return an answer of 200 tokens; its adapter is replaced in place at each of these token counts."""
    engine, said = llm.llm_engine, list[int]()
    engine.add_request("0001", {"prompt_token_ids": prompt}, sampling(200), lora_request=_adapter(folder))
    while engine.has_unfinished_requests():
        for output in engine.step():
            said = list(output.outputs[0].token_ids)
        while replacements and len(said) >= replacements[0][0]:
            engine.add_lora(_adapter(replacements.pop(0)[1], load_inplace=True))
    return {"answer": said}


def ask_adapter(llm: Any, prompt: list[int], folder: str) -> dict[str, Any]:
    """Return the answer to a prompt of the model with an adapter, and how many tokens were cached."""
    asked = {"prompt_token_ids": prompt}
    (output,) = llm.generate([asked], sampling(8), lora_request=_adapter(folder), use_tqdm=False)
    return {"answer": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}


def _adapter(folder: str, **how: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, folder, **how)
