"""What a disk does by itself: large blocks of one file, in a process of its own.

A process of its own, because threads of the benchmark's would take their turns for the interpreter with
the thread that computes, and be slower beside it than the disk is.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from kvtier import HeapMemory
from kvtier import _native as native
from kvtier.errors import KVTierError
from kvtier_bench import machine

BLOCK_BYTES: Final = 4 * 2**20
THREADS: Final = 8
FILE_BYTES: Final = 512 * 2**20
READY_S: Final = 120.0


class RawLimit:
    """The process, from outside. Any thread may ask it, one at a time."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel

    def measure(self, verb: str, nbytes: float) -> int:
        """Write or read about so many bytes; return how many."""
        self._channel.send((verb, nbytes))
        moved: int = self._channel.recv()
        return moved


@contextmanager
def raw_limit(root: Path) -> Iterator[RawLimit]:
    """Write a file below ``root``, for a process that reads and overwrites it. Both are gone afterwards.

    Raises:
        KVTierError: it cannot be written.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = root / "raw-limit"
    process = context.Process(target=_serve, args=(theirs, path, FILE_BYTES), name="raw-limit", daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(READY_S):
            raise TimeoutError(f"{path} was not written within {READY_S:g} s")
        if error := ours.recv():
            raise KVTierError(f"{path} could not be written ({error}): {machine.REMEDY}")
        yield RawLimit(ours)
    finally:
        ours.close()  # which ends it
        process.join(READY_S)
        path.unlink(missing_ok=True)


def _serve(channel: Connection, path: Path, file_bytes: int) -> None:
    # As much memory as the tier has: reads into the same few MiB again and again were measured at half
    # the rate in a virtual machine.
    memory = HeapMemory(file_bytes // BLOCK_BYTES, BLOCK_BYTES)
    fill(memory)
    try:
        fd = _write(path, memory)
    except OSError as error:
        channel.send(os.strerror(error.errno or 0))
        return
    channel.send(None)
    while True:
        try:
            verb, nbytes = channel.recv()
        except EOFError:
            return
        channel.send(_move(fd, memory, verb, max(THREADS, int(nbytes) // BLOCK_BYTES)))


def _write(path: Path, memory: HeapMemory) -> int:
    """Write all of the file. Returns it, open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    for block in range(memory.slots):
        os.pwritev(fd, [memory.view(block)], block * BLOCK_BYTES)
    return fd


def _move(fd: int, memory: HeapMemory, verb: str, blocks: int) -> int:
    move = os.pwritev if verb == "put" else os.preadv

    def work(number: int) -> int:
        block = number % memory.slots
        return move(fd, [memory.view(block)], block * BLOCK_BYTES)

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(work, range(blocks)))


def fill(memory: HeapMemory) -> None:
    """Give the slots memory of their own, and bytes that do not compress."""
    native.populate(memory.address, memory.slots * memory.chunk_bytes)
    noise = os.urandom(memory.chunk_bytes)
    for slot in range(memory.slots):
        memory.view(slot)[:] = noise
