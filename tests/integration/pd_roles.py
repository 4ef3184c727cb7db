"""The actions of prefill and decode engines in their own processes. See ``Engine.call`` in ``harness``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvtier._core.states import ChunkState
from kvtier_bench.engine.process import sampling

_NUMBERS = itertools.count()
_PATIENCE_S = 90.0


def prefill(llm: Any, prompt: list[int], go_on: str = "") -> dict[str, Any]:
    """Compute a prompt. Its last stores need further steps.

    Args:
        llm: the engine.
        prompt: token ids.
        go_on: a file. The engine pauses when a tier has the prompt's first chunk, until the file exists.

    Returns:
        ``params``: the ``kv_transfer_params`` of the response; ``paused_at``: tokens computed at the pause.
    """
    name, scheduler = _add(llm, prompt, 1, {"do_remote_decode": True}), _scheduler(llm)
    outputs, paused_at = [], 0
    before = _put_chunks(llm)
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
        request = scheduler.requests.get(name)
        if go_on and not paused_at and request is not None:
            outputs += _end_stores(llm)
            if _put_chunks(llm) > before:
                paused_at = request.num_computed_tokens
                _wait_for(Path(go_on).exists)
    return {"params": outputs[-1].kv_transfer_params, "paused_at": paused_at}


def _put_chunks(llm: Any) -> int:
    """Return how many chunks tiers have kept so far."""
    return sum(status.writes.put_chunks for status in _core(llm).shared.tiers)


def _end_stores(llm: Any) -> list[Any]:
    """Run steps without tokens until no copy and no put is in flight; return the step outputs."""
    scheduler, core = _scheduler(llm), _core(llm)
    step_tokens, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 0
    outputs: list[Any] = []

    def has_ended() -> bool:
        outputs.extend(llm.llm_engine.step())
        is_busy = core.handles or any(transfer.is_put for transfer in core.shared.running)
        return not is_busy or not llm.llm_engine.has_unfinished_requests()

    try:
        _wait_for(has_ended)
    finally:
        scheduler.max_num_scheduled_tokens = step_tokens
    return outputs


def decode(
    llm: Any,
    prompt: list[int],
    output_tokens: int,
    wait_s: float,
    waits: str,
    has_some: str,
    time_is_over: str = "",
) -> dict[str, Any]:
    """Answer a prompt whose chunks another engine computes.

    Args:
        llm: the engine.
        prompt: token ids.
        output_tokens: tokens to generate.
        wait_s: how long to wait for chunks.
        waits: a file to create when the request waits.
        has_some: a file to create when it waits and some of its chunks are in host memory.
        time_is_over: a file; the request stops waiting when it exists.

    Returns:
        ``answer``: token ids; ``cached``: tokens of the prompt that were not computed.
    """
    _add(llm, prompt, output_tokens, {"kvtier": {"wait_s": wait_s, "explain": True}})
    core, outputs = _core(llm), []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
        for request in _awaiting(llm):
            Path(waits).touch()
            first = core.table.visible.get(request.first)
            if first is not None and first.state is ChunkState.READY:
                Path(has_some).touch()
            if time_is_over and Path(time_is_over).exists():
                _end_time(request)
    return {"answer": list(outputs[-1].outputs[0].token_ids), "cached": outputs[-1].num_cached_tokens}


def _end_time(request: Any) -> None:
    """End the request's wait for chunks now, so that no test depends on how long other engines take."""
    request.wait.until_s = min(request.wait.until_s, time.monotonic())


def computed(llm: Any, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """Answer prompts, one after the other.

    Returns:
        ``answers``: token ids of each; ``computed``: the total number of prompt tokens computed.
    """
    answers, tokens = [], 0
    for prompt in prompts:
        _add(llm, prompt, output_tokens, {})
        last = list(_outputs(llm))[-1]
        answers.append(list(last.outputs[0].token_ids))
        tokens += len(prompt) - last.num_cached_tokens
    return {"answers": answers, "computed": tokens}


def respond(llm: Any, prompt: list[int], params: dict[str, Any], output_tokens: int = 1) -> dict[str, Any]:
    """Answer a prompt; return ``answer``, and ``params``: the ``kv_transfer_params`` of the response."""
    _add(llm, prompt, output_tokens, params)
    last = list(_outputs(llm))[-1]
    return {"answer": list(last.outputs[0].token_ids), "params": last.kv_transfer_params}


def beside(
    llm: Any, prompt: list[int], params: dict[str, Any], others: list[list[int]], output_tokens: int
) -> dict[str, Any]:
    """Answer a prompt that waits for chunks that never come, and later prompts.

    Its time ends when the later prompts are answered.

    Returns:
        ``order``: the order in which they finish; ``answers``: the later prompts' answers, then the waiting
        one's.
    """
    waiting = _add(llm, prompt, output_tokens, params)
    names = [*(_add(llm, other, output_tokens, {}) for other in others), waiting]
    ended = []
    while llm.llm_engine.has_unfinished_requests():
        ended += [output for output in llm.llm_engine.step() if output.finished]
        if len(ended) == len(others):
            for request in _awaiting(llm):
                _end_time(request)
    answers = {_name(output.request_id): list(output.outputs[0].token_ids) for output in ended}
    order = ["waiting" if _name(output.request_id) == _name(waiting) else "other" for output in ended]
    return {"order": order, "answers": [answers[_name(name)] for name in names]}


def abort(llm: Any, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """Abort a request once it waits."""
    name = _add(llm, prompt, 1, params)
    while not _awaiting(llm):
        assert llm.llm_engine.has_unfinished_requests(), "it has ended without waiting"
        llm.llm_engine.step()
    llm.llm_engine.abort_request([_name(name)])
    list(_outputs(llm))
    return {}


def _outputs(llm: Any) -> Iterator[Any]:
    while llm.llm_engine.has_unfinished_requests():
        yield from llm.llm_engine.step()


def _name(added: str) -> str:
    """Return the engine's id of a request; vLLM appends a suffix to the client's id."""
    return "-".join(added.split("-")[:2])


def _awaiting(llm: Any) -> list[Any]:
    """Return the requests that wait for chunks that no tier has yet."""
    return [request for request in _manager(llm).requests.values() if request.awaits_any]


def _core(llm: Any) -> Any:
    return _manager(llm).core


def _manager(llm: Any) -> Any:
    return _scheduler(llm).connector.connector_scheduler.manager


def _add(llm: Any, prompt: list[int], output_tokens: int, params: dict[str, Any]) -> str:
    name = f"pd-{next(_NUMBERS)}"
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling(output_tokens, params))
    (added,) = [it for it in _scheduler(llm).requests if _name(it) == name]
    return str(added)


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "nothing came"
        time.sleep(0.002)
