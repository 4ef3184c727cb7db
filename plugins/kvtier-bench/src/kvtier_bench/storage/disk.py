"""The speed of a bare disk: large blocks of one file, several at a time, bypassing the page cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvtier import HeapMemory
from kvtier import _native as native
from kvtier.errors import KVTierError
from kvtier_bench import machine
from kvtier_bench.storage.movers import Contestant

BLOCK_BYTES: Final = 4 * 2**20
THREADS: Final = 8
FILE_BYTES: Final = 512 * 2**20


class Disk(Contestant):
    """Reads and overwrites an existing file."""

    def __init__(self, fd: int, memory: HeapMemory) -> None:
        self._fd = fd
        self._memory = memory

    async def move(self, verb: str, nbytes: float) -> int:
        return await asyncio.to_thread(self._move, verb, max(THREADS, int(nbytes) // BLOCK_BYTES))

    def _move(self, verb: str, blocks: int) -> int:
        move = os.pwritev if verb == "put" else os.preadv

        def work(number: int) -> int:
            block = number % self._memory.slots
            return move(self._fd, [self._memory.view(block)], block * BLOCK_BYTES)

        with ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(work, range(blocks)))


@contextmanager
def raw_disk(root: Path) -> Iterator[Disk]:
    """Write a file below ``root``, and remove it at the end.

    Raises:
        KVTierError: the file cannot be written.
    """
    # Use as much memory as the tier does. In a virtual machine, reads into the same few MiB ran at half the
    # rate.
    memory = HeapMemory(FILE_BYTES // BLOCK_BYTES, BLOCK_BYTES)
    fill(memory)
    path = root / "raw-limit"
    try:
        fd = _write(path, memory)
        try:
            yield Disk(fd, memory)
        finally:
            os.close(fd)
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, memory: HeapMemory) -> int:
    """Write the whole file, and return it open."""
    try:
        fd = _open(path)
        for block in range(memory.slots):
            os.pwritev(fd, [memory.view(block)], block * BLOCK_BYTES)
    except OSError as error:
        raise KVTierError(f"{path} could not be written ({error.strerror}): {machine.REMEDY}") from error
    return fd


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def fill(memory: HeapMemory) -> None:
    """Fill the slots with incompressible bytes, which also allocates their memory."""
    native.populate(memory.address, memory.slots * memory.chunk_bytes)
    noise = os.urandom(memory.chunk_bytes)
    for slot in range(memory.slots):
        memory.view(slot)[:] = noise
