"""The tier process verifies chunks of the previous engine in the background."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
from anyio import to_thread

from kvtier import Identity
from kvtier._core.messages import Event
from kvtier._core.slot_trailers import slot_trailers_bytes
from kvtier._execution.executor import Executor, NamedTier
from kvtier._memory.region import Region
from kvtier.keys import pack_key
from kvtier.tiers import _adopted as adopted
from kvtier.tiers._adopted import AdoptedConfig, AdoptedTier
from kvtier.tiers._seal import seal
from tests.common import wait_until

SLOTS = 4
IDENTITY = Identity.make("model", {})


@pytest.fixture
def region() -> Iterator[Region]:
    """Host memory with a chunk in each slot; slot 1 was damaged afterwards."""
    with Region.unnamed(SLOTS, mmap.PAGESIZE, slot_trailers_bytes(SLOTS)) as found:
        found.trailers.fill(range(SLOTS))
        for slot in range(SLOTS):
            found.trailers.write(slot, seal(pack_key(bytes([slot])), found.view(slot), IDENTITY.short_digest))
        found.trailers.adopt()
        found.view(1)[0] ^= 1
        yield found


async def test_sound_chunks_are_verified(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted, "_BURST_BYTES", 1)
    await adopted.verify_adopted(region, IDENTITY.short_digest, lambda: True)
    assert [region.trailers.is_verified(slot) for slot in range(SLOTS)] == [True, False, True, True]


async def test_executor_verifies_beside_its_work(region: Region) -> None:
    events: list[Event] = []
    tier = NamedTier("adopted", lambda: AdoptedTier(AdoptedConfig()))
    async with Executor([tier], IDENTITY, region, events.append):
        await to_thread.run_sync(wait_until, lambda: region.trailers.unverified() == [1])


async def test_failed_verification_ends_nothing_else(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    region.close()
    await adopted.verify_adopted(region, IDENTITY.short_digest, lambda: False)
    assert "verified at their first hit" in caplog.text
