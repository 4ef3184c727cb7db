"""Streaming-input sessions in an engine's own process. See ``Engine.call`` in ``harness``."""

from __future__ import annotations

import itertools
from typing import Any

from kvtier_bench.engine.process import sampling

_NUMBERS = itertools.count()


def converse(
    llm: Any,
    inputs: list[list[int]],
    answers: list[int],
    preempt_after: int | None = None,
    abort_after: int | None = None,
) -> dict[str, Any]:
    """Send inputs to one session, each when the answer to the one before is complete.

    Args:
        llm: the engine.
        inputs: token ids of each input.
        answers: how many tokens to generate for each input.
        preempt_after: number of steps of each input before vLLM preempts the session; None: never.
        abort_after: number of steps of the last input before the client aborts the session; None: never.

    Returns:
        ``text``: those tokens of the session that have computed KV.
    """
    from vllm.v1.request import RequestStatus

    engine, name = llm.llm_engine, f"session-{next(_NUMBERS)}"
    scheduler = engine.engine_core.engine_core.scheduler
    for place, (tokens, count) in enumerate(zip(inputs, answers, strict=True)):
        engine.engine_core.add_request(_request(engine, name, tokens, count))
        session = scheduler.requests[name]
        for step in itertools.count():
            if session.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                break
            if step == abort_after and place == len(inputs) - 1:
                break
            if step == preempt_after and session in scheduler.running:
                scheduler.running.remove(session)
                scheduler._preempt_request(session, 0.0)
            engine.step()
    session = scheduler.requests[name]
    text = list(session.all_token_ids[: session.num_computed_tokens])
    engine.engine_core.abort_requests([name])
    return {"text": text}


def _request(engine: Any, name: str, tokens: list[int], count: int) -> Any:
    request = engine.input_processor.process_inputs(
        name,
        {"prompt_token_ids": tokens},
        sampling(count),
        supported_tasks=engine.engine_core.get_supported_tasks(),
        resumable=True,
    )
    request.external_req_id = name
    return request
