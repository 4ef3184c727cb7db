"""The compiled file path of vLLM's own fs tier, without an engine, for comparison with kvtier's."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from kvtier import HeapMemory
from kvtier.keys import OffloadKey
from kvtier_bench.storage.movers import BatchMover

THREADS: Final = 16
"""Of each kind: vLLM's default."""

POLL_S: Final = 0.0005
"""Seconds between two queries for ended transfers: vLLM polls at each step of its engine."""


class VllmFiles(BatchMover[list[str]]):
    """vLLM's batches of files in vLLM's threads. A batch is a list of file paths.

    Raises:
        ImportError: vLLM is not installed or lacks its compiled helper.
    """

    def __init__(self, root: Path, memory: HeapMemory) -> None:
        if not io._HAS_FSIO_C:
            raise ImportError("this vLLM has no compiled path for files")
        super().__init__(memory)
        self._root = root
        self._view = memoryview(memory.view(0).obj)
        self._tokens = itertools.count(1)
        self._pool = DualQueueThreadPool(THREADS, THREADS)
        self._waiting: dict[int, asyncio.Future[bool]] = {}

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True)

    def make(self, keys: Sequence[OffloadKey]) -> list[str]:
        names = [key.hex() for key in keys]
        return [f"{self._root}/{name[:3]}/{name[3:5]}_g0/{name}.bin" for name in names]

    async def put(self, batch: list[str], slots: range) -> None:
        await self._do(io.batch_store_block, self._pool.enqueue_store, batch, slots)

    async def get(self, batch: list[str], slots: range) -> None:
        await self._do(io.batch_load_block, self._pool.enqueue_load, batch, slots)

    async def remove(self, batches: Sequence[list[str]]) -> None:  # noqa: ARG002
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def _do(
        self, work: Callable[..., None], enqueue: Callable[..., None], paths: list[str], slots: range
    ) -> None:
        token, chunk_bytes = next(self._tokens), self.memory.chunk_bytes
        ended = self._waiting[token] = asyncio.get_running_loop().create_future()
        offsets = [slot * chunk_bytes for slot in slots]
        enqueue(token, 1, [partial(work, list(paths), self._view, offsets, chunk_bytes, True)])
        while not ended.done():
            await asyncio.sleep(POLL_S)
            for other, success, _ in self._pool.get_finished():
                self._waiting.pop(other).set_result(success)
        if not ended.result():
            raise OSError(f"vLLM could not move {len(paths)} files")
