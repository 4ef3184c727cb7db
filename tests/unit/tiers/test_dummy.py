"""The dummy tier: what an author's tier does, and faults on demand."""

from __future__ import annotations

import anyio
import pytest

from kvtier._identity import Identity
from kvtier.keys import pack_key
from kvtier.tiers._base import TRAILER_BYTES, Batch, Knowledge, Outcome, Status, TierContext
from kvtier.tiers._seal import Integrity, check, seal
from kvtier.tiers.dummy import DummyConfig, DummyTier

CHUNK_BYTES = 1024
KEYS = [pack_key(bytes([number]) * 32) for number in range(20)]
CONTEXT = TierContext("dummy", Identity.make("model", {}), CHUNK_BYTES)
DIGEST = CONTEXT.identity.short_digest


class Slots:
    """Slots of CHUNK_BYTES each, filled with their own number."""

    address = 0
    chunk_bytes = CHUNK_BYTES

    def __init__(self, count: int = len(KEYS)) -> None:
        self.bytes = bytearray().join(bytes([slot]) * CHUNK_BYTES for slot in range(count))

    def view(self, slot: int) -> memoryview:
        return memoryview(self.bytes)[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]


def make_tier(**settings: object) -> DummyTier:
    return DummyTier(DummyConfig.model_validate({"type": "dummy", **settings}))


def to_put(numbers: range | list[int]) -> Batch:
    slots = Slots()
    trailers = [seal(KEYS[number], slots.view(number), DIGEST) for number in numbers]
    return Batch([KEYS[number] for number in numbers], list(numbers), slots, trailers)


def to_get(numbers: range | list[int]) -> Batch:
    """A batch whose slots, in another order than those of the put, hold other bytes."""
    return Batch([KEYS[number] for number in numbers], [19 - number for number in numbers], Slots())


def present(tier: DummyTier) -> list[int]:
    return [number for number, known in enumerate(tier.known(KEYS)) if known is Knowledge.PRESENT]


async def test_without_an_index_nothing_is_known_until_asked():
    tier = make_tier(complete_index=False)
    await tier.put(to_put([1]))
    assert set(tier.known(KEYS)) == {Knowledge.UNKNOWN}
    assert await tier.contains(KEYS[:2]) == [False, True]


ROOM = CHUNK_BYTES + TRAILER_BYTES


async def test_least_recently_used_leave_first():
    tier = make_tier(capacity_bytes=4 * ROOM)
    await tier.put(to_put(range(4)))
    await tier.get(to_get([0]))
    await tier.touch([KEYS[1], KEYS[9]])
    await tier.put(to_put([4, 5]))
    assert present(tier) == [0, 1, 4, 5]


async def test_of_chunks_touched_together_the_last_leaves_first():
    tier = make_tier(capacity_bytes=4 * ROOM)
    await tier.put(to_put(range(4)))
    await tier.touch(KEYS[:4])
    await tier.put(to_put([4, 5]))
    assert present(tier) == [0, 1, 4, 5]


async def test_capacity_counts_every_byte_and_forgotten_ones_no_more():
    tier = make_tier(capacity_bytes=4 * ROOM - 1)
    await tier.put(to_put(range(4)))
    assert present(tier) == [1, 2, 3]
    await tier.discard([KEYS[1], KEYS[2], KEYS[2], KEYS[9]])
    assert present(tier) == [3]
    await tier.put(to_put([3, 4, 5]))
    assert present(tier) == [3, 4, 5]


async def test_chunk_larger_than_the_tier_is_refused_and_drives_nothing_out():
    tier = make_tier(capacity_bytes=ROOM - 1)
    assert await tier.put(to_put([0])) == Outcome([Status.REFUSED], {"full": 1})
    unsealed = Batch([KEYS[1]], [1], Slots())
    assert (await tier.put(unsealed)).statuses == [Status.OK]
    assert (await tier.put(to_put([0]))).statuses == [Status.REFUSED]
    assert present(tier) == [1]


@pytest.mark.parametrize("operation", ["put", "get"])
async def test_hanging_ends_only_by_cancellation(operation):
    tier = make_tier(hang_rate=1.0)
    with anyio.move_on_after(0.05) as scope:
        await getattr(tier, operation)(to_put([0]))
    assert scope.cancelled_caught


async def test_failing_chunks_do_not_take_the_others_with_them():
    tier = make_tier(failure_rate=0.5, seed=1)
    outcome = await tier.put(to_put(range(20)))
    failed = [number for number, status in enumerate(outcome.statuses) if status is Status.FAILED]
    assert 0 < len(failed) < 20
    assert outcome.reasons == {"injected": len(failed)}
    assert present(tier) == [number for number in range(20) if number not in failed]


async def test_corrupted_bytes_are_seen_by_their_trailer_and_heal():
    tier = make_tier(corruption_rate=0.5, seed=3)
    await tier.put(to_put(range(20)))
    for _ in range(2):
        batch = to_get(range(20))
        assert (await tier.get(batch)).statuses == [Status.OK] * 20
        seals = zip(batch.trailers, batch.keys, batch.views, strict=True)
        verdicts = [check(trailer, key, view, DIGEST) for trailer, key, view in seals]
        assert set(verdicts) == {Integrity.SOUND, Integrity.CHECKSUM}


async def faults(seed: int) -> list[Status]:
    tier = make_tier(failure_rate=0.3, seed=seed)
    outcomes = [await tier.put(to_put(range(10))), await tier.get(to_get(range(10)))]
    return [status for outcome in outcomes for status in outcome.statuses]


async def test_faults_follow_from_the_seed():
    assert await faults(1) == await faults(1)
    assert await faults(1) != await faults(2)
