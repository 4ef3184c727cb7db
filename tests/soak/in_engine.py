"""Functions of the soak that run inside an engine's process: they take samples.

The engine's thread calls them. With ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` it is also the core's owner, so each
sample shows the core at one moment.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections import Counter
from functools import partial
from typing import Any

from kvtier._core.requests import Request
from kvtier_testing import invariants


def hurry(llm: Any) -> dict[str, Any]:
    """Let the tier process, if any, restart at once after each kill.

    Call this before the engine starts. By default the pauses grow to half a minute.
    """
    from kvtier._isolation import process
    from kvtier._isolation.heartbeat import SupervisorTimes

    vars(process)["SupervisorTimes"] = partial(
        SupervisorTimes, silent_timeout_s=2.0, first_pause_s=0.1, longest_pause_s=0.5
    )
    return {}


def sample(llm: Any) -> dict[str, float]:
    """Return counts of this process: kvtier's objects, blocks of Python's memory, tasks, transfers.

    Check the core's invariants. First return freed memory to the kernel; the rest is in use, or fragmented.

    Raises:
        AssertionError: an invariant does not hold.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    core, kinds = _core(llm), _objects()
    invariants.check(core)
    return {
        "engine: python blocks": sys.getallocatedblocks(),
        "engine: objects of kvtier": sum(kinds.values()),
        "engine: tasks": _tasks(),
        "core: requests": kinds[Request.__name__],
        "core: transfers": transfers(llm)["transfers"],
        "core: handles": len(core.handles) + len(core.holds.pending) + len(core.holds.awaiting),
    }


def transfers(llm: Any) -> dict[str, float]:
    """Return the number of puts and gets in flight, lookups included."""
    return {"transfers": len(_core(llm).shared.transfers)}


def _core(llm: Any) -> Any:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler.connector.connector_scheduler.manager.core


def _objects() -> Counter[str]:
    """Count the objects of kvtier's classes that were made since the engine started, by class."""
    things = gc.get_objects()  # without the objects that vLLM had frozen by then
    return Counter(type(thing).__name__ for thing in things if type(thing).__module__.startswith("kvtier."))


def _tasks() -> int:
    """Count the tasks of all event loops that run in this process's threads."""
    loops: set[asyncio.AbstractEventLoop] = set()
    for top in sys._current_frames().values():
        frame: Any = top
        while frame is not None:
            it = frame.f_locals.get("self")
            if isinstance(it, asyncio.AbstractEventLoop):
                loops.add(it)
            frame = frame.f_back
    return sum(len(asyncio.all_tasks(loop)) for loop in loops)
