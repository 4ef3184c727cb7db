"""Roots of file tiers, written by the tier itself, and the commands that look at them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier._cli import main as cli
from kvtier._identity import Identity
from kvtier._memory.heap import HeapMemory
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers._base import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier

CHUNK_BYTES = 16384


@dataclass(frozen=True)
class Said:
    """What a command has said, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Kvtier = Callable[..., Said]


@pytest.fixture
def kvtier(monkeypatch: pytest.MonkeyPatch) -> Kvtier:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["kvtier", *map(str, arguments)])
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main()
        status = ended.value.code
        return Said(status if isinstance(status, int) else 0, out.getvalue(), err.getvalue())

    return run


class Cache:
    """One cache of a root, written as an engine writes it. Chunk ``n`` has the bytes ``content(n)``."""

    def __init__(self, root: Path, model: str = "org/Model-7B") -> None:
        self.root = root
        self.identity = Identity.make(model, {"dtype": "bfloat16"})

    @property
    def name(self) -> str:
        return self.identity.namespace

    @property
    def home(self) -> Path:
        return self.root / self.name

    def key(self, number: int) -> OffloadKey:
        return pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), number % 3)

    def content(self, number: int) -> bytes:
        return random.Random(number).randbytes(CHUNK_BYTES)

    def file(self, number: int, epoch: int = 0) -> Path:
        """Where a chunk is documented to be."""
        digits = self.key(number)[:-4].hex()
        folder = self.root / (f"{self.name}_r0.e{epoch}" if epoch else f"{self.name}_r0")
        return folder / digits[:3] / f"{digits[3:5]}_g{number % 3}" / f"{digits}.bin"

    def batch(self, numbers: Iterable[int], filled: bool = True) -> Batch:
        wanted = list(numbers)
        memory = HeapMemory(max(1, len(wanted)), CHUNK_BYTES)
        for slot, number in enumerate(wanted):
            if filled:
                memory.view(slot)[:] = self.content(number)
        return Batch([self.key(number) for number in wanted], range(len(wanted)), memory)

    async def open(self, **settings: object) -> FsTier:
        given = {"root_dir": self.root, "n_threads": 2, "min_free_bytes": 0, **settings}
        tier = FsTier(FsConfig.model_validate(given))
        await tier.open(TierContext("files", self.identity, CHUNK_BYTES))
        return tier

    def put(self, numbers: Iterable[int], resets: int = 0) -> None:
        """Open the tier, reset it so many times, put chunks and close it."""

        async def do() -> None:
            tier = await self.open()
            try:
                for _ in range(resets):
                    await tier.reset()
                outcome = await tier.put(self.batch(numbers))
                assert set(outcome.statuses) <= {Status.OK}, outcome
            finally:
                await tier.aclose()

        asyncio.run(do())

    def had(self, numbers: Iterable[int]) -> list[int]:
        """Return the chunks that an engine which opens the root now is given; their bytes are right."""
        wanted = list(numbers)

        async def do() -> list[int]:
            tier = await self.open()
            try:
                batch = self.batch(wanted, filled=False)
                outcome = await tier.get(batch)
            finally:
                await tier.aclose()
            given = []
            for number, status, view in zip(wanted, outcome.statuses, batch.views, strict=True):
                if status is Status.OK:
                    assert bytes(view) == self.content(number)
                    given.append(number)
            return given

        return asyncio.run(do())

    def quarantined(self) -> list[str]:
        folder = self.home / "quarantine"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A cache on a root that is not there yet."""
    return Cache(tmp_path / "root")
