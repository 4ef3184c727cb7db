"""The compiled path of vLLM's own fs tier, without its engine: for comparing with kvtier's."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from kvtier.tiers.base import SlotMemory

THREADS: Final = 16
"""Of each kind: vLLM's default."""

POLL_S: Final = 0.0005
"""Between two questions for what has ended: vLLM asks at each step of its engine."""


class VllmFiles:
    """vLLM's batches of files in vLLM's threads.

    Args:
        memory: where the chunks are.

    Raises:
        ImportError: vLLM is not installed, or without its compiled helper.
    """

    def __init__(self, memory: SlotMemory) -> None:
        if not io._HAS_FSIO_C:
            raise ImportError("this vLLM has no compiled path for files")
        self._chunk_bytes = memory.chunk_bytes
        self._view = memoryview(memory.view(0).obj)
        self._tokens = itertools.count(1)
        self._pool = DualQueueThreadPool(THREADS, THREADS)
        self._waiting: dict[int, asyncio.Future[bool]] = {}

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True)

    async def store(self, paths: Sequence[str], slots: Sequence[int]) -> None:
        """Write chunks to files. OSError where one could not be written."""
        await self._do(io.batch_store_block, self._pool.enqueue_store, paths, slots)

    async def load(self, paths: Sequence[str], slots: Sequence[int]) -> None:
        """Read chunks from files. OSError where one could not be read."""
        await self._do(io.batch_load_block, self._pool.enqueue_load, paths, slots)

    async def _do(
        self,
        work: Callable[..., None],
        enqueue: Callable[..., None],
        paths: Sequence[str],
        slots: Sequence[int],
    ) -> None:
        token = next(self._tokens)
        ended = self._waiting[token] = asyncio.get_running_loop().create_future()
        offsets = [slot * self._chunk_bytes for slot in slots]
        enqueue(token, 1, [partial(work, list(paths), self._view, offsets, self._chunk_bytes, True)])
        while not ended.done():
            await asyncio.sleep(POLL_S)
            for other, success, _ in self._pool.get_finished():
                self._waiting.pop(other).set_result(success)
        if not ended.result():
            raise OSError(f"vLLM could not move {len(paths)} files")
