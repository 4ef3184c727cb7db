"""Kills processes of an engine at a line of kvtier's code. Runs in its own process: see ``Engine.call``."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import kvtier
from tests.common import children
from tests.integration.harness import remove_leftovers, shared_memory

_OURS = str(Path(kvtier.__file__).parent)
_MANAGER, _PROMOTIONS = (
    "kvtier.adapters.vllm._manager:KVTierManager",
    "kvtier._core.promotion.promotions:Promotions",
)
_CODE: Mapping[str, Sequence[str]] = {
    "adoption": (
        "kvtier._memory.region:Region.open",
        "kvtier.adapters.vllm.spec:KVTierOffloadingSpec._make_manager",
    ),
    "store": (f"{_MANAGER}.prepare_store", f"{_MANAGER}.complete_store"),
    "load": (f"{_MANAGER}.lookup", f"{_MANAGER}.prepare_load", f"{_MANAGER}.complete_load"),
    "promotion": (f"{_PROMOTIONS}.promote_wanted", f"{_PROMOTIONS}.get_ended"),
    "reset": (f"{_MANAGER}.reset_cache",),
}
LINES: Mapping[str, int] = {
    "adoption": 16000,
    "store": 4000,
    "load": 20000,
    "promotion": 7000,
    "reset": 4000,
}
"""Approximate number of lines of kvtier's code that run in each moment of a short life."""

ENGINE, TIERS, WORKER, GUARD, ALL = "engine", "tier process", "worker", "guard", "all"
KILLED = "the test kills: "


def arm(
    llm: Any, moment: str, line: int, delay_s: float, victim: str, engines: Collection[int]
) -> dict[str, Any]:
    """Kill ``victim`` after ``line`` lines of kvtier's code for a moment, and log the kill.

    Args:
        llm: the engine; None before its start.
        moment: one of ``LINES``.
        line: the number of the line, over all calls from now on.
        delay_s: how long the kill comes after it; the engine goes on meanwhile.
        victim: the engine's own process if there is no such process.
        engines: earlier engines, whose guards may live.
    """
    lines, kill = itertools.count(1), partial(_kill, victim, engines)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line" and next(lines) == line:
            os.write(2, f"{KILLED}{victim} in {moment}\n".encode())
            threading.Timer(delay_s, kill).start() if delay_s else kill()
        return trace

    for where in _CODE[moment]:
        module, _, path = where.partition(":")
        owner_name, _, name = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        setattr(owner, name, _traced(getattr(owner, name), trace))
    return {}


def _traced(function: Callable[..., Any], trace: Any) -> Callable[..., Any]:
    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(before)

    return traced


def _kill(victim: str, engines: Collection[int]) -> None:
    own = os.getpid()
    others = {pid: _command(pid) for pid in children(own)}
    tiers = [pid for pid, command in others.items() if b"kvtier._isolation.child" in command]
    named = [pid for pid, command in others.items() if b"kvtier" in command or b"resource_tracker" in command]
    found = {
        ENGINE: [own],
        TIERS: tiers,
        WORKER: [pid for pid in others if pid not in named][-1:],
        GUARD: guards({own, *engines}),
        ALL: [*others, own],
    }
    if victim not in (TIERS, GUARD):  # the engine ends; vLLM's leftovers are useless
        remove_leftovers({path for pid in (own, *others) for path in shared_memory(pid)})
    for pid in found[victim] or [own]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def guards(engines: Collection[int]) -> list[int]:
    """Return the guards of engines, given the engines' processes."""
    return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _guards(pid, engines)]


def _guards(pid: int, engines: Collection[int]) -> bool:
    command = _command(pid).split(b"\0")
    return b"-I" in command and command[3].endswith(b"guard.py") and int(command[8]) in engines


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes()
    return b""
