"""A copy with a bug that no seal sees: it exchanges pages. Planted into the process of an engine."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

_QUEUES = {"kvtier-store": "stores", "kvtier-load": "loads"}
_left = {"stores": 0, "loads": 0}
_copy_batch: Any = None


def exchange(llm: Any, stores: int = 0, loads: int = 0) -> dict[str, Any]:
    """Let the next so many copies of an engine have the bug; -1: all of them. See ``EngineChild.call``."""
    global _copy_batch
    from kvtier import _native as native

    if _copy_batch is None:
        _copy_batch, native.copy_batch = native.copy_batch, _copy_swapped
    _left.update(stores=stores, loads=loads)
    return {}


def _copy_swapped(src: int, dst: int, sizes: int, count: int) -> None:
    queue = _QUEUES.get(threading.current_thread().name, "")
    if not _left.get(queue):
        _copy_batch(src, dst, sizes, count)
        return
    _left[queue] -= _left[queue] > 0
    numbers = ctypes.c_uint64 * count
    assert len(set(numbers.from_address(sizes))) == 1
    exchanged = numbers(*reversed(numbers.from_address(dst)))
    _copy_batch(src, ctypes.addressof(exchanged), sizes, count)
