"""Stores of segments on one directory, without a tier around them."""

from __future__ import annotations

import hashlib
import os
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvtier import native
from kvtier.keys import OffloadKey, pack_key
from kvtier.memory.heap import HeapMemory
from kvtier.tiers.fs.call import FileCall, Flag, Place, Result, StopFlag
from kvtier.tiers.fs.segments.native_segments import NativeSegments
from kvtier.tiers.fs.segments.python_segments import PythonSegments

Store = NativeSegments | PythonSegments
CHUNK_BYTES = 16384
PATIENCE_S = 50.0
STOP = StopFlag()


class Rack:
    """One epoch's directory and what tests do with it. Chunk ``n`` has the bytes ``content(n)``."""

    def __init__(
        self, root: Path, kind: str, chunk_bytes: int = CHUNK_BYTES, digest: bytes = b"d" * 16
    ) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        self.kind = kind
        self.root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self.place = Place(self.root_fd, "cache_r0", "cache/.tmp", digest, chunk_bytes, Flag.NONE)
        self._stores: list[Store] = []

    @property
    def folder(self) -> Path:
        return self.root / "cache_r0" / "segments"

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.seg"))

    def store(self, kind: str | None = None, max_bytes: int | None = None) -> Store:
        """Open a store: another process's, as far as it can tell."""
        if (kind or self.kind) == "python":
            made: Store = PythonSegments(max_bytes)
        else:
            assert native.library is not None
            made = NativeSegments(native.library, max_bytes)
        self._stores.append(made)
        return made

    def close(self) -> None:
        for store in self._stores:
            store.close()
        os.close(self.root_fd)

    def key(self, number: int) -> OffloadKey:
        return pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), number % 3)

    def content(self, number: int) -> bytes:
        return random.Random(number).randbytes(self.place.chunk_bytes)

    def call(self, numbers: Iterable[int], memory: HeapMemory | None = None) -> FileCall:
        wanted = list(numbers)
        slots = array("q", range(len(wanted))) if memory is not None else None
        return FileCall(self.place, [self.key(number) for number in wanted], slots, memory)

    def put(self, store: Store, numbers: Iterable[int]) -> list[int]:
        wanted = list(numbers)
        memory = HeapMemory(max(1, len(wanted)), self.place.chunk_bytes)
        for slot, number in enumerate(wanted):
            memory.view(slot)[:] = self.content(number)
        call = self.call(wanted, memory)
        store.put(call, 0, len(wanted))
        return list(call.results)

    def get(self, store: Store, numbers: Iterable[int]) -> list[int]:
        """Get chunks; the bytes of those that are said to be there must be right."""
        return list(self.got(store, numbers).results)

    def wait_for(self, store: Store, numbers: Sequence[int]) -> None:
        """Wait until chunks are got that another store has put: a look may take a share of the time alone.

        Where the machine was busy during the look before, the next one may have to wait for that.
        """
        end_s = time.monotonic() + PATIENCE_S
        while set(self.get(store, numbers)) != {Result.OK}:
            assert time.monotonic() < end_s, self.get(store, numbers)
            time.sleep(0.005)

    def got(self, store: Store, numbers: Iterable[int]) -> FileCall:
        wanted = list(numbers)
        memory = HeapMemory(max(1, len(wanted)), self.place.chunk_bytes)
        call = self.call(wanted, memory)
        store.get(call, 0, len(wanted))
        for slot, (number, result) in enumerate(zip(wanted, call.results, strict=True)):
            assert result != Result.OK or bytes(memory.view(slot)) == self.content(number)
        return call

    def contains(self, store: Store, numbers: Iterable[int]) -> list[int]:
        call = self.call(numbers)
        store.contains(call, 0, len(call))
        return list(call.results)

    def discard(self, store: Store, numbers: Iterable[int]) -> list[int]:
        call = self.call(numbers)
        store.discard(call, 0, len(call))
        return list(call.results)

    def tend(self, store: Store) -> int:
        return store.tend(self.place, STOP)


@contextmanager
def racked(root: Path, *, kind: str, **settings: object) -> Iterator[Rack]:
    """A rack that is closed at the end."""
    rack = Rack(root, kind, **settings)  # type: ignore[arg-type]
    try:
        yield rack
    finally:
        rack.close()


@pytest.fixture(params=["native", "python"])
def kind(request: pytest.FixtureRequest) -> str:
    """What does the work: each in turn."""
    if request.param == "native" and native.library is None:
        pytest.skip("the native helper is not built")
    return str(request.param)


@pytest.fixture
def rack(tmp_path: Path, kind: str) -> Iterator[Rack]:
    """A rack on an empty directory."""
    with racked(tmp_path / "root", kind=kind) as made:
        yield made


@pytest.fixture
def new_rack(kind: str) -> Callable[..., AbstractContextManager[Rack]]:
    """Makes racks: on a directory of one's choice, and with settings."""
    return partial(racked, kind=kind)
