"""The asyncio manager over a tier process continues after every failure of the process."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from kvtier import KVCaches, PageRef, TieringConfig, TieringManager, open_manager, pack_key
from kvtier.errors import StateError
from kvtier.keys import OffloadKey
from tests.common import children, is_alive

from .conftest import IDENTITY, MUCH, PATIENCE_S

PAGE_BYTES = 4096
BLOCKS = 32
SLOTS = 16


def prompt(name: int, length: int) -> list[OffloadKey]:
    return [pack_key(bytes([name, index]) * 16) for index in range(length)]


class World:
    """A manager over a file tier. Chunk ``index`` of prompt ``name`` is full of one number."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.blocks = torch.zeros((BLOCKS, PAGE_BYTES), dtype=torch.int8)
        tiers = [{"type": "fs", "root_dir": str(root), **MUCH}]
        config = TieringConfig.from_mapping(
            {
                "cpu_bytes_to_use": SLOTS * PAGE_BYTES,
                "secondary_tiers": tiers,
                "isolation": "process",
                "request_deadline_s": PATIENCE_S,  # a busy machine starts processes slowly
                "drain_on_shutdown_s": PATIENCE_S,
                **settings,
            }
        )
        caches = KVCaches((self.blocks,), ((PageRef(0, PAGE_BYTES),),))
        self.manager: TieringManager = open_manager(config, IDENTITY, caches)

    async def store(self, name: int, length: int) -> None:
        for index in range(length):
            self.blocks[index] = 10 * name + index
        assert await self.manager.store(prompt(name, length), range(length)) == length
        await self.manager.drain()

    async def load(self, name: int, length: int) -> int:
        """Load the found chunks, and check their bytes."""
        self.blocks[:] = 0
        count = await self.manager.load(prompt(name, length), range(length))
        assert [int(block) for block in self.blocks[:count, 0]] == [
            10 * name + index for index in range(count)
        ]
        assert not self.blocks[count:].any()
        return count

    async def forget_primary(self) -> None:
        for name in (8, 9):
            await self.store(name, SLOTS // 2)

    async def until(self, holds: Callable[[], object]) -> None:
        with anyio.fail_after(PATIENCE_S):
            while not holds():  # noqa: ASYNC110
                await anyio.sleep(0.01)

    @property
    def ended(self) -> float:
        counts = self.manager.statistics().counts
        return sum(count for name, count in counts.items() if name[0] == "process_ended")

    @property
    def is_up(self) -> bool:
        return all(tier.down is None for tier in self.manager.statistics().tiers)


@asynccontextmanager
async def opened(root: Path, **settings: Any) -> AsyncIterator[World]:
    it = await anyio.to_thread.run_sync(lambda: World(root, **settings))
    async with it.manager:
        yield it


def processes_of_tiers() -> Sequence[int]:
    found = []
    for pid in children(os.getpid()):
        with suppress(OSError):  # a process that was reaped meanwhile
            if b"kvtier._isolation.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("audit_rate", [0, 1])
async def test_next_manager_loads_files(tmp_path: Path, audit_rate: float) -> None:
    async with opened(tmp_path, audit_rate=audit_rate) as it:
        await it.store(1, 4)
        await it.forget_primary()
        assert await it.load(1, 5) == 4
        (pid,) = processes_of_tiers()
    assert not is_alive(pid)
    async with opened(tmp_path, audit_rate=audit_rate) as it:
        assert await it.load(1, 5) == 4
        assert it.ended == 0


async def test_kill_during_lookup_misses(tmp_path: Path) -> None:
    async with opened(tmp_path) as it:
        await it.store(1, 4)
        await it.forget_primary()
        (pid,) = processes_of_tiers()
        os.kill(pid, signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:
            found: list[int] = []

            async def look_up() -> None:
                found.append(await it.manager.lookup(prompt(1, 4)))

            tasks.start_soon(look_up)
            await anyio.wait_all_tasks_blocked()
            assert not found
            os.kill(pid, signal.SIGKILL)
        assert found == [0]
        assert it.ended == 1
        await it.until(lambda: it.is_up)
        assert await it.load(1, 4) == 4


async def test_close_leaves_nothing(tmp_path: Path) -> None:
    gc.collect()
    before = mappings()
    async with opened(tmp_path) as it:
        await it.store(1, 4)
        assert mappings() == before + 1
    assert not processes_of_tiers()
    with pytest.raises(StateError):
        await it.manager.lookup(prompt(1, 4))
    del it  # views of the memory keep it mapped
    gc.collect()
    assert mappings() == before


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvtier")
