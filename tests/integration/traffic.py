"""What is done in an engine's own process for some tests. See ``EngineChild.call``."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_NUMBERS = itertools.count()


def find(llm: Any, directory: str) -> dict[str, Any]:
    """Have distributions in this directory found as if they were installed."""
    sys.path.insert(0, directory)
    return {}


def die_at(llm: Any, root: str, chunks: int) -> dict[str, Any]:
    """Have the engine killed when so many chunks are below a root.

    By itself: whoever watches it from elsewhere may be late, and find it through with its work.
    """
    from tests.integration.harness import chunks_in

    def watch() -> None:
        while len(chunks_in(Path(root))) < chunks:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return {}


def timed(llm: Any, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """Generate for prompts all at once; say how each ended, and when its first token came."""
    from vllm import SamplingParams

    engine, number = llm.llm_engine, next(_NUMBERS)
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    names = [f"timed-{number}-{place}" for place in range(len(prompts))]
    begun: dict[str, float] = {}
    waits: dict[str, float] = {}
    ended: dict[str, Any] = {}
    for name, prompt in zip(names, prompts, strict=True):
        begun[name] = time.monotonic()
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            waits.setdefault(output.request_id, time.monotonic() - begun[output.request_id])
            if output.finished:
                ended[output.request_id] = output.outputs[0]
    return {
        "answers": [list(ended[name].token_ids) for name in names],
        "ends": [ended[name].finish_reason for name in names],
        "waits": [waits[name] for name in names],
    }
