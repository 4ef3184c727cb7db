"""A root directory, tiers on it, and chunks with known bytes."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from kvtier import HeapMemory, Identity
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers import Batch, Outcome, TierContext
from kvtier.tiers._base import ignore
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs import _session as session_module
from kvtier.tiers.fs._files.chunk_files import tree_bytes
from kvtier.tiers.fs._files.native_call import StopFlag
from kvtier.tiers.fs._session import Session
from tests.unit.conftest import mounted_tmpfs
from tests.unit.tiers.fs.library import Gate, patch_library

MEMORY = Path("/dev/shm")
SLOTS = 64
AT_FDCWD = -100


class World:
    """One root directory with test helpers. Chunk ``n`` has the bytes ``content(n)``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.chunk_bytes = 16384
        self.identity = Identity.make("org/Model-7B", {"dtype": "bfloat16"})
        self._opened: list[FsTier] = []

    @property
    def namespace(self) -> Path:
        return self.root / self.identity.namespace

    async def open(
        self,
        until_counted: bool = True,
        removed: Callable[[Sequence[OffloadKey]], None] = ignore,
        lost: Callable[[str], None] = ignore,
        **settings: object,
    ) -> FsTier:
        """Open a tier on the root; the fixture closes it when the test ends."""
        given = {"root_dir": self.root, "n_threads": 4, "min_free_bytes": 0, **settings}
        tier = FsTier(FsConfig.model_validate(given))
        await tier.open(TierContext("files", self.identity, self.chunk_bytes, removed, lost))
        self._opened.append(tier)
        if until_counted:  # on a busy machine a count takes longer than an opening waits for it
            await self.eventually(lambda: (usage := tier.usage()) and usage.used_bytes is not None)
        return tier

    async def close_all(self) -> None:
        for tier in self._opened:
            await tier.aclose()

    def key(self, number: int) -> OffloadKey:
        return pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), number % 3)

    def keys(self, numbers: Iterable[int]) -> list[OffloadKey]:
        return [self.key(number) for number in numbers]

    def content(self, number: int) -> bytes:
        return random.Random(number).randbytes(self.chunk_bytes)

    def to_put(self, numbers: Iterable[int]) -> Batch:
        """Chunks in their own slots."""
        wanted = list(numbers)
        memory = HeapMemory(max(SLOTS, len(wanted)), self.chunk_bytes)
        for slot, number in enumerate(wanted):
            memory.view(slot)[:] = self.content(number)
        return Batch(self.keys(wanted), range(len(wanted)), memory)

    def to_get(self, numbers: Iterable[int]) -> Batch:
        """Return a batch of empty slots, whose order differs from the chunks'."""
        wanted = list(numbers)
        memory = HeapMemory(max(SLOTS, len(wanted)), self.chunk_bytes)
        return Batch(self.keys(wanted), range(len(wanted) - 1, -1, -1), memory)

    def got(self, batch: Batch) -> list[bytes]:
        return [bytes(view) for view in batch.views]

    async def put(self, tier: FsTier, numbers: Iterable[int]) -> Outcome:
        return await tier.put(self.to_put(numbers))

    async def get(self, tier: FsTier, numbers: Iterable[int]) -> Outcome:
        """Get chunks, and check the bytes of those reported as copied."""
        wanted = list(numbers)
        batch = self.to_get(wanted)
        outcome = await tier.get(batch)
        for number, status, view in zip(wanted, outcome.statuses, batch.views, strict=True):
            assert status or bytes(view) == self.content(number)
        return outcome

    def file(self, number: int, data_dir: str | None = None) -> Path:
        """The documented path of chunk ``number``."""
        digits = self.key(number)[:-4].hex()
        folder = self.root / (data_dir or f"{self.identity.namespace}_r0")
        return folder / digits[:3] / f"{digits[3:5]}_g{number % 3}" / f"{digits}.bin"

    def quarantined(self) -> list[str]:
        folder = self.namespace / "quarantine"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    async def eventually(self, condition: Callable[[], object]) -> None:
        """Wait for background work until the condition holds."""
        with anyio.fail_after(30):
            while not condition():  # noqa: ASYNC110 - no event tells that the background is done
                await anyio.sleep(0.005)

    async def until_listed(self, tier: FsTier) -> None:
        """Wait until a tier has swept its root and listed it, as it does after opening."""
        session = self.session(tier)
        await self.eventually(lambda: session.epoch is not None and session.epoch.listed >= 0)

    def session(self, tier: FsTier) -> Session:
        """Return the parts of an open tier: its quota, maintenance, epoch and namespace."""
        session = tier._session
        assert session is not None
        return session

    async def bytes_below(self) -> int:
        """Add up the root with a walk that tolerates vanishing files."""

        return await anyio.to_thread.run_sync(tree_bytes, AT_FDCWD, str(self.root), StopFlag())

    def writers(self) -> list[str]:
        return sorted(path.name for path in (self.namespace / ".tmp").iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where flushes cost nothing. Tests of direct I/O use one on a disk instead."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
async def world(place: Path) -> AsyncIterator[World]:
    """A world on an empty root."""
    here = World(place / "root")
    yield here
    await here.close_all()


@pytest.fixture
def gate(world: World) -> Iterator[Gate]:
    """A closed gate; the fixture opens it at the end, or the tiers' threads would never end."""
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def hung_count(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate before counts, as on a hung file system. The test does not wait for the first count."""
    monkeypatch.setattr(session_module, "_FIRST_COUNT_PATIENCE_S", 0.0)
    patch_library(monkeypatch, gate, "kvt_tree_bytes")
    return gate


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts in-memory file systems; skips the test if mounting is not allowed."""
    points = (tmp_path / f"mounted{number}" for number in itertools.count())
    with ExitStack() as stack:
        yield lambda options: stack.enter_context(mounted_tmpfs(next(points), options))
