"""What the soak does inside of an engine's process: requests with aborts, samples, and planted leaks.

Called by ``tests.integration.engine_child``, on the engine's thread. With
``VLLM_ENABLE_V1_MULTIPROCESSING=0`` that thread is also the core's owner, so what is
seen of the core is all of one moment.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import shared_memory
from typing import Any

from kvtier._core.requests import Request
from kvtier_testing import invariants

Tokens = list[int]


def hurry(llm: Any) -> dict[str, Any]:
    """Have the tiers' process, should there be one, started anew at once, however often it is killed.

    To be called before the engine is started: by itself it pauses for half a minute in the end.
    """
    from kvtier._isolation import process
    from kvtier._isolation.heartbeat import SupervisorTimes

    vars(process)["SupervisorTimes"] = partial(
        SupervisorTimes, silent_timeout_s=2.0, first_pause_s=0.1, longest_pause_s=0.5
    )
    return {}


def batch(
    llm: Any, *, name: str, prompts: Sequence[Tokens], output_tokens: int, aborts: Mapping[str, int]
) -> dict[str, Any]:
    """Send prompts at once and step until all have ended.

    Args:
        llm: the engine.
        name: of the batch, unlike any other.
        prompts: token ids of each.
        output_tokens: tokens generated for each.
        aborts: of some prompts, by number, the step after which they are aborted.

    Returns:
        ``answers``: the tokens that each has got, those that were aborted maybe fewer; ``ended``: whether
        it was not aborted.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    names = [f"{name}-{number}" for number in range(len(prompts))]
    for request, prompt in zip(names, prompts, strict=True):
        engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
    said: dict[str, Tokens] = {request: [] for request in names}
    ended: set[str] = set()
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            said[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                ended.add(output.request_id)
        step += 1
        leave = [request for number, request in enumerate(names) if aborts.get(str(number)) == step]
        engine.abort_request([request for request in leave if request not in ended])
    return {"answers": [said[request] for request in names], "ended": [request in ended for request in names]}


def sample(llm: Any) -> dict[str, float]:
    """Return what is alive in this process: objects of kvtier, blocks of Python's memory, tasks, transfers.

    The core's invariants are checked. What was freed is given back to the kernel first, so that memory that
    is seen afterwards is in use, or lies between such as is.

    Raises:
        AssertionError: an invariant does not hold.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    core, kinds = _core(llm), objects()
    invariants.check(core)
    return {
        "engine: python blocks": sys.getallocatedblocks(),
        "engine: objects of kvtier": sum(kinds.values()),
        "engine: tasks": tasks(),
        "core: requests": kinds[Request.__name__],
        "core: transfers": transfers(llm)["transfers"],
        "core: handles": len(core.reservations) + len(core.pinned) + len(list(core.promotions.holders)),
    }


def transfers(llm: Any) -> dict[str, float]:
    """Return how many puts and fetches are under way, those that only ask included."""
    return {"transfers": len(_core(llm).shared.transfers)}


def _core(llm: Any) -> Any:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler.connector.connector_scheduler.manager._core


def objects() -> Counter[str]:
    """Count the objects of kvtier's classes that were made since the engine has started, by class."""
    things = gc.get_objects()  # without those that vLLM has frozen by then
    return Counter(type(thing).__name__ for thing in things if type(thing).__module__.startswith("kvtier."))


def tasks() -> int:
    """Count the tasks of all event loops that run in this process's threads."""
    return sum(len(asyncio.all_tasks(loop)) for loop in set(_loops()))


def _loops() -> Iterator[asyncio.AbstractEventLoop]:
    for top in sys._current_frames().values():
        frame: Any = top
        while frame is not None:
            it = frame.f_locals.get("self")
            if isinstance(it, asyncio.AbstractEventLoop):
                yield it
            frame = frame.f_back


# --- leaks, to see that they are found ---------------------------------------------------------------

_leaked: list[Any] = []


def leak(llm: Any, *, what: str, times: int) -> dict[str, Any]:
    """Leak something so many times."""
    for _ in range(times):
        LEAKS[what]()
    return {}


def _leak_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _leak_task() -> None:
    """Have tasks wait for ever, one on each loop."""

    def wait_for_ever(loop: asyncio.AbstractEventLoop) -> None:
        _leaked.append(loop.create_task(asyncio.Event().wait()))

    for loop in set(_loops()):
        loop.call_soon_threadsafe(wait_for_ever, loop)


def _leak_shared_memory() -> None:
    memory = shared_memory.SharedMemory(create=True, size=65536)
    assert memory.buf is not None
    memory.buf[:] = bytes(65536)
    _leaked.append(memory)


LEAKS: Mapping[str, Callable[[], object]] = {
    "descriptor": lambda: _leaked.append(os.open(os.devnull, os.O_RDONLY)),
    "memory": lambda: _leaked.append(os.urandom(32 * 1024)),
    "object": lambda: _leaked.append(Request()),
    "shared-memory": _leak_shared_memory,
    "task": _leak_task,
    "thread": _leak_thread,
}
"""By name. ``memory`` and ``object`` are leaked with each request, the others with each kill."""

OF_REQUESTS = frozenset({"memory", "object"})
