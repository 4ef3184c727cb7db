"""Roots of file tiers, written by the tier itself, and the output of commands that look at them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import Identity
from kvtier.tiers import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs._layout import data_dir
from tests.unit.tiers.fs.conftest import World

CHUNK_BYTES = 16384


@dataclass(frozen=True)
class Said:
    """A command's output and exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Kvtier = Callable[..., Said]


class Cache:
    """One cache of a root, written as an engine writes it."""

    def __init__(self, root: Path, model: str = "org/Model-7B") -> None:
        self.root = root
        self.identity = Identity.make(model, {"dtype": "bfloat16"})
        self._world = World(root)
        self._world.identity = self.identity
        self.key = self._world.key
        self.quarantined = self._world.quarantined

    @property
    def name(self) -> str:
        return self.identity.namespace

    @property
    def home(self) -> Path:
        return self._world.namespace

    def file(self, number: int, epoch: int = 0) -> Path:
        """Return the documented path of a chunk."""
        return self._world.file(number, data_dir(self.name, epoch))

    def batch(self, numbers: Iterable[int]) -> Batch:
        return self._world.to_put(numbers)

    async def open(self, **settings: object) -> FsTier:
        given = {"root_dir": self.root, "n_threads": 2, "min_free_bytes": 0, **settings}
        tier = FsTier(FsConfig.model_validate(given))
        await tier.open(TierContext("files", self.identity, CHUNK_BYTES))
        return tier

    def put(self, numbers: Iterable[int], resets: int = 0) -> None:
        """Open the tier, reset it ``resets`` times, put chunks and close it."""

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
                outcome = await self._world.get(tier, wanted)
            finally:
                await tier.aclose()
            return [
                number for number, status in zip(wanted, outcome.statuses, strict=True) if status is Status.OK
            ]

        return asyncio.run(do())
