"""Directories for regions, and processes that hold regions: they start, end and are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from tests.unit.conftest import mounted_tmpfs

PAGE = 4096

_HOLDER = """
import sys
from pathlib import Path
from kvtier.errors import RegionError
from kvtier._memory.region import Region
from kvtier._core.slot_trailers import slot_trailers_bytes

directory, name, slots, chunk_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
keep_s = float(sys.argv[5])
kept = (slot_trailers_bytes(slots), f"same {slots} slots") if keep_s else ()
try:
    region = Region.open(name, slots, chunk_bytes, directory, *kept, keep_s=keep_s)
except RegionError as error:
    print(error, flush=True)
    sys.exit(3)
print("open", flush=True)
for line in sys.stdin:
    command, *words = line.split()
    if command == "write":
        region.view(int(words[0]))[:4] = words[1].encode()
        print("written", flush=True)
    elif command == "read":
        print(bytes(region.view(int(words[0]))[:4]).decode(), flush=True)
    elif command == "claim":
        try:
            region.claim()
            print("claimed", flush=True)
        except RegionError as error:
            print(error, flush=True)
    elif command == "guard":
        region.start_guard(until_claimed=words == ["first"])
        print("guarded", flush=True)
    elif command == "close":
        region.close()
        print("closed", flush=True)
    elif command == "exit":
        break
"""


class Holder:
    """A process that opens a region and follows commands."""

    def __init__(self, directory: Path, name: str, slots: int, chunk_bytes: int, keep_s: float) -> None:
        arguments = map(str, (directory, name, slots, chunk_bytes, keep_s))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        """Read its next line of output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, command: str) -> str:
        """Send a command and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        """End it as the kernel does when memory runs out."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def exit(self) -> int:
        """Let it exit without closing its region; return its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)


class Holding(Protocol):
    """Runs a holder of the region ``name``, and kills it at the end."""

    def __call__(self, name: str, slots: int = 4, keep_s: float = 0) -> AbstractContextManager[Holder]: ...


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-region-") as directory:
        yield Path(directory)


@pytest.fixture
def holding(shm: Path) -> Holding:
    """Return a function that starts processes that hold regions in ``shm``."""

    def hold(name: str, slots: int = 4, keep_s: float = 0) -> AbstractContextManager[Holder]:
        return _running(Holder(shm, name, slots, PAGE, keep_s))

    return hold


@contextmanager
def _running(holder: Holder) -> Iterator[Holder]:
    try:
        yield holder
    finally:
        holder.kill()
        for pipe in (holder.process.stdin, holder.process.stdout):
            if pipe is not None:
                pipe.close()


Mounted = Callable[[str], AbstractContextManager[Path]]


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    """Return a context manager that mounts an in-memory file system with the given options."""
    return partial(mounted_tmpfs, tmp_path)
