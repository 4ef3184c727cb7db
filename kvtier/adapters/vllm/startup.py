"""vLLM's own region, as ``kvtier bench startup`` measures it."""

from __future__ import annotations

import time
import uuid

import vllm
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


def version() -> str:
    """Return vLLM's version."""
    return str(vllm.__version__)


def open_and_close(slots: int, chunk_bytes: int) -> float:
    """Make the region of one worker, all of its pages touched, and give it back; return the seconds."""
    start = time.perf_counter()
    region = SharedOffloadRegion(f"kvtier-bench-{uuid.uuid4().hex}", slots, None, chunk_bytes, chunk_bytes)
    seconds = time.perf_counter() - start
    region.cleanup()
    return seconds
