"""The asyncio manager with every chunk audited: real copies, real tiers, and bytes that change in transit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TransferError
from tests.unit.test_manager import AnyTier, World, dummy, files, prompt

KEYS = prompt(1, 6)
BESIDE = 3072 + 960  # a slot has more bytes than a chunk; the extra ones are not audited


@pytest.fixture(autouse=True)
def _evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class AuditedWorld(World):
    """A world whose manager audits every chunk."""

    def __init__(self, *tiers: AnyTier, **more: Any) -> None:
        super().__init__(*tiers, audited_bytes=BESIDE, **more)

    def flip(self, byte: int = 50) -> None:
        for slot in range(self.region.slots):
            self.region.view(slot)[byte] ^= 1

    @property
    def failures(self) -> dict[str, float]:
        counts = self.manager.statistics().counts
        return {name[1]: count for name, count in counts.items() if name[0] == "audit_failed"}

    async def check_that_nothing_is_copied(self) -> None:
        assert await self.store(prompt(7, 3), first=40) == 0
        assert await self.manager.lookup(KEYS) == 0
        assert self.manager.statistics().ready_chunks == 0
        await self.check_idle()


@asynccontextmanager
async def opened(*tiers: AnyTier, **more: Any) -> AsyncIterator[AuditedWorld]:
    it = AuditedWorld(*tiers, **more)
    async with it.manager:
        yield it


@pytest.mark.parametrize("kind", ["files", "memory"])
async def test_audits_hold_on_every_path(kind: str, tmp_path: Path) -> None:
    tier = files(tmp_path / "root") if kind == "files" else dummy()
    async with opened(tier) as it:
        await it.store(KEYS)
        await it.manager.drain()
        assert await it.load(KEYS) == 6
        assert it.engine.audits.chunks == 12
        await it.forget_primary()
        stored = it.engine.audits.chunks
        assert await it.load(KEYS) == 6
        assert it.engine.audits.chunks == stored + 6
        assert it.manager.statistics().counts["loaded", it.names[0]] == 6
        assert it.failures == {}
        await it.check_idle()


async def test_changed_primary_tier_stops_all() -> None:
    async with opened(dummy()) as it:
        await it.store(KEYS)
        await it.manager.drain()
        it.flip()
        with pytest.raises(TransferError, match="has changed in the primary tier"):
            await it.load(KEYS)
        assert it.failures == {"cpu": 1}
        await it.check_that_nothing_is_copied()


async def test_tier_is_blamed_after_promotion(tmp_path: Path) -> None:
    async with opened(files(tmp_path / "root"), dummy()) as it:
        await it.store(KEYS)
        await it.forget_primary()
        assert await it.manager.lookup(KEYS) == 6
        it.flip()  # a client may keep writing after its get has ended
        with pytest.raises(TransferError, match="has changed in the primary tier"):
            await it.load(KEYS)
        tier, other = it.manager.statistics().tiers
        assert it.failures == {tier.name: 1}
        assert (tier.down, other.down) == ("audit", None)

        assert await it.load(KEYS) == 6  # from the other tier
        assert it.manager.statistics().counts["loaded", other.name] == 6
        assert await it.store(prompt(8, 3), first=20) == 3
        await it.check_idle()


async def test_changed_chunk_is_not_put() -> None:
    async with opened(dummy()) as it:
        await it.store(KEYS)
        it.flip()  # the put is queued and has not started
        await it.manager.drain()
        await it.manager.lookup(KEYS)
        counts = it.manager.statistics().counts
        assert counts["put_failed", it.names[0], "audit"] == 6
        assert counts.get(("put", it.names[0]), 0) == 0
        assert it.failures == {"cpu": 1}
        await it.check_that_nothing_is_copied()


async def test_written_slots_are_forgotten() -> None:
    async with opened(dummy()) as it:
        await it.store(KEYS)
        await it.forget_primary()  # by now the test knows the right bytes of all slots
        async with it.manager.write(prompt(7, 6)) as written:
            assert len(written.keys) == 6
            for view in written.views:
                view[:] = b"w" * len(view)
        await it.manager.drain()
        async with it.manager.acquire(prompt(7, 6)) as acquired:
            assert [bytes(view) for view in acquired.views] == [b"w" * len(view) for view in acquired.views]
            assert len(acquired.keys) == 6
        assert await it.manager.load(prompt(7, 6), range(6)) == 6
        assert it.failures == {}
        await it.check_idle()


async def test_lent_slots_are_forgotten() -> None:
    async with opened(dummy()) as it:
        await it.store(KEYS)
        await it.forget_primary()  # by now the test knows the right bytes of all slots
        assert it.slot_checksums is not None
        it.slot_checksums.rate = 0.0  # promoted chunks get no checksums
        assert await it.load(KEYS) == 6
        assert it.failures == {}
        assert it.manager.statistics().counts["loaded", it.names[0]] == 6
