"""Copies that fail on request, in the process of an engine and in its workers."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.integration.traffic import requests

_WORD_BYTES = 8
_QUEUES = {"kvtier-store": 0, "kvtier-load": 1, "kvtier-expedited": 1}
_RANK, _HELD = 2, 3

_FILE = "KVTIER_TEST_FAULTS"


def install(llm: Any, file: str) -> dict[str, Any]:
    """Make ``fail`` work for the engine that starts next. Runs in the engine's process, as ``fail`` does."""
    Faults(file).install()
    return {}


def fail(llm: Any, **counts: int) -> dict[str, Any]:
    """Set how many copies fail from now on. See ``Faults.set``."""
    Faults().set(**counts)
    return {}


def copies_after(llm: Any, prompt: list[int], ends: str) -> dict[str, Any]:
    """Return how many copies are in flight while a prompt's stores hang, and after the engine has waited.

    Args:
        llm: the engine; its worker is in this process.
        prompt: token ids that were not stored before.
        ends: "reset", or "unregister" as vLLM 0.33 calls the connector for a sleep. Then a prompt
            follows, before the cache is registered again.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    in_flight = connector.connector_worker.worker._engine._in_flight
    Faults().set(held=1)
    requests(llm, [prompt], output_tokens=4)
    counts = [len(in_flight)]
    threading.Timer(0.05, Faults().set).start()
    if ends == "reset":
        llm.reset_prefix_cache(reset_connector=True)
        counts.append(len(in_flight))
    else:
        connector.unregister_kv_caches()
        counts.append(len(in_flight) + len(connector.connector_worker._unsubmitted_store_jobs))
        Faults().set(held=1)
        requests(llm, [prompt[::-1]], output_tokens=4)
        counts.append(len(in_flight))
        Faults().set()
        connector.restore_kv_caches()
    return {"counts": counts}


class Faults:
    """Number of copies still to fail. Shared by this process and the processes that it starts later.

    Args:
        path: a file to create for the numbers; None for the file of the parent process.
    """

    def __init__(self, path: str | None = None) -> None:
        if path is not None:
            os.environ[_FILE] = path
        with open(os.environ[_FILE], "r+b" if path is None else "w+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._left = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("q")

    def install(self) -> None:
        """Inject faults into every CPU device that this process creates from now on."""
        from kvtier._device.backends import cpu

        for name in ("copy_batch", "copy_each"):
            setattr(cpu, name, partial(self._copy, getattr(cpu, name)))

    def set(self, *, stores: int = 0, loads: int = 0, rank: int = -1, held: int = 0) -> None:
        """Make the next ``stores`` and ``loads`` attempts fail half-way; negative: all of them.

        Args:
            rank: the worker whose copies fail; negative for any.
            held: whether copies pause until the next call.
        """
        for index, number in enumerate((stores, loads, rank, held)):
            self._left[index] = number

    def _copy(self, copy: Callable[[Any], None], plan: Any) -> None:
        kind, left = _QUEUES[threading.current_thread().name], self._left
        while left[_HELD]:
            time.sleep(0.001)
        if not left[kind] or left[_RANK] not in (-1, _rank()):
            copy(plan)
            return
        left[kind] -= left[kind] > 0
        half = len(plan.sizes) // 2
        copy(type(plan)(plan.src[:half], plan.dst[:half], plan.sizes[:half]))
        raise OSError("this copy was told to fail")


def _rank() -> int:
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
