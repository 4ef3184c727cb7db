"""The dummy tier: a complete tier with faults on demand."""

from __future__ import annotations

from kvtier import HeapMemory, Identity
from kvtier.keys import pack_key
from kvtier.tiers import TRAILER_BYTES, Batch, Knowledge, Outcome, Status, TierContext
from kvtier.tiers._seal import Integrity, check, seal
from kvtier_testing.dummy import DummyConfig, DummyTier

CHUNK_BYTES = 1024
KEYS = [pack_key(bytes([number]) * 32) for number in range(20)]
CONTEXT = TierContext("dummy", Identity.make("model", {}), CHUNK_BYTES)
DIGEST = CONTEXT.identity.short_digest


def slots() -> HeapMemory:
    """Return slots that are filled with their own number."""
    memory = HeapMemory(len(KEYS), CHUNK_BYTES)
    for slot in range(len(KEYS)):
        memory.view(slot)[:] = bytes([slot]) * CHUNK_BYTES
    return memory


def make_tier(**settings: object) -> DummyTier:
    return DummyTier(DummyConfig.model_validate({"type": "dummy", **settings}))


def to_put(numbers: range | list[int]) -> Batch:
    memory = slots()
    trailers = [seal(KEYS[number], memory.view(number), DIGEST) for number in numbers]
    return Batch([KEYS[number] for number in numbers], list(numbers), memory, trailers)


def to_get(numbers: range | list[int]) -> Batch:
    """Return a batch whose slots differ in order and bytes from the put's."""
    return Batch([KEYS[number] for number in numbers], [19 - number for number in numbers], slots())


def present(tier: DummyTier) -> list[int]:
    return [number for number, known in enumerate(tier.known(KEYS)) if known is Knowledge.PRESENT]


async def test_no_index_knows_nothing():
    tier = make_tier(complete_index=False)
    await tier.put(to_put([1]))
    assert set(tier.known(KEYS)) == {Knowledge.UNKNOWN}
    assert await tier.contains(KEYS[:2]) == [False, True]


ROOM = CHUNK_BYTES + TRAILER_BYTES


async def test_oversized_evicts_nothing():
    tier = make_tier(capacity_bytes=ROOM - 1)
    assert await tier.put(to_put([0])) == Outcome([Status.REFUSED], {"full": 1})
    unsealed = Batch([KEYS[1]], [1], slots())
    assert (await tier.put(unsealed)).statuses == [Status.OK]
    assert (await tier.put(to_put([0]))).statuses == [Status.REFUSED]
    assert present(tier) == [1]


async def test_corruption_shows_and_heals():
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


async def test_seed_decides_faults():
    assert await faults(1) == await faults(1)
    assert await faults(1) != await faults(2)
