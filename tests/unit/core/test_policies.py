"""kvtier's own eviction policies: the common contract, each policy's additions, and keys by age."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import count

import hypothesis
import pytest
from hypothesis import strategies as st

from kvtier.keys import OffloadKey, pack_key
from kvtier.policies import ARC, LHD, LRU, Auto, EvictionPolicy
from kvtier.policies._ghosts import Ghosts
from kvtier.policies._reuse import UNITS, ReuseModel
from kvtier_testing.policies import PolicyConformance
from tests.unit.core.world import keys


class TestLRU(PolicyConformance):
    policy = LRU


class TestARC(PolicyConformance):
    policy = ARC


class TestLHD(PolicyConformance):
    policy = LHD


class TestAuto(PolicyConformance):
    policy = Auto
    # 1,800 with 256 slots: 680 as LHD, the rest for three simulated caches of all keys. These have at most
    # 1,024 slots each, or a 64th of all: 1,250 bytes with 2,048 slots, and few more than LHD with many.
    remembered_bytes = 2000


def use(policy: EvictionPolicy, key: OffloadKey) -> bool:
    """Ask for a key as the core does: pin and read a hit, store a miss. Return whether it was a hit."""
    if key in policy:
        policy.pin([key])
        policy.add([key], used=True)
        return True
    if len(policy) >= policy.capacity:
        policy.evict(len(policy) - policy.capacity + 1)
    policy.add([key], used=False)
    return False


def hits_of_scans(policy: EvictionPolicy) -> int:
    """Use a small set twice and again between scans of chunks that come once only."""
    tenth = policy.capacity // 10
    hot, names, hits = keys("hot", 4 * tenth), count(), 0
    for _ in range(20):
        hits += sum(use(policy, key) for key in hot for _ in range(2))
        for _ in range(15 * tenth):
            use(policy, pack_key(f"once{next(names)}".encode()))
    return hits


@pytest.mark.parametrize("policy", [ARC(100), ARC(1000), LHD(1000)])  # LHD learns too slowly for 100
def test_scan_spares_reused(policy: ARC | LHD) -> None:
    size = policy.capacity
    lru, found = hits_of_scans(LRU(size)), hits_of_scans(policy)
    assert lru == 20 * size * 4 // 10  # each second use, no more: the scan has flushed the rest
    assert found > 1.8 * lru


def test_early_evictions_move_room() -> None:
    """Chunks that come back soon after they were evicted unread get more room than before."""
    policy = ARC(10)
    frequent = keys("frequent", 5)
    for key in frequent * 2:
        use(policy, key)
    looped = keys("looped", 12)
    for key in looped * 4:
        use(policy, key)
    held = sum(key in policy for key in frequent)
    assert held < 5, "the first set has given room up"
    for key in frequent * 6:
        use(policy, key)
    assert sum(key in policy for key in frequent) == 5, "and got it back"


@pytest.mark.parametrize("used", [False, True])
def test_pinned_chunk_is_skipped(used: bool) -> None:
    policy = ARC(10)
    once, read = keys("once", 1) + keys("x", 1), keys("read", 2)
    policy.add(read, used=True)
    policy.add(once, used=False)
    policy.pin([read[0], once[0]])
    assert len(policy) == 2
    assert read[0] not in policy
    policy.add([read[0]], used=False)
    policy.add([once[0]], used=used)
    # Keys that were seen once go before keys that were read, unless read meanwhile.
    assert set(policy.evict(2)) == ({once[1], read[1]} if used else set(once))


def test_clear_forgets_ghosts() -> None:
    policy = ARC(4)
    a = keys("a", 2)
    policy.add(a, used=False)
    policy.evict(2)
    policy.add(keys("b", 1), used=True)
    policy.clear()
    assert len(policy) == 0
    policy.add(keys("read", 1), used=True)
    policy.add(a, used=False)
    assert policy.evict(2) == a[::-1], "a returning ghost would stand among the frequent ones"


@hypothesis.given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2**48 - 1)), max_size=200))
def test_ghosts_recall_last_record(remembered: list[tuple[int, int]]) -> None:
    ghosts, last = Ghosts(), dict[OffloadKey, int]()
    ghosts.resize(64)
    for number, record in remembered:
        key = pack_key(number.to_bytes(16, "big"))
        ghosts.remember(key, record)
        last[key] = record
        assert ghosts.recall(key) == record
    found = {key: ghosts.recall(key) for key in last}
    assert all(record in (0, last[key]) for key, record in found.items())
    assert sum(map(bool, found.values())) <= 65  # no more than there are places, however many come
    ghosts.resize(128)
    assert not any(map(ghosts.recall, last)), "places of another table say nothing"


def test_ghost_counts_earlier_uses() -> None:
    """A returning key outranks a new one although it was evicted meanwhile."""
    policy = LHD(100)
    returning, new = keys("returning", 4), keys("new", 4)
    policy.add(returning, used=False)
    policy.evict(4)
    policy.add(returning, used=False)
    policy.add(new, used=False)
    assert set(policy.evict(4)) == set(new)


def test_no_ghost_counts_as_next() -> None:
    policy = LHD(100)
    prompt, new = keys("prompt", 3), keys("new", 3)
    policy.add(prompt[2:], used=False)
    policy.evict(1)
    policy.add(prompt, used=False)  # the policy remembers only the last of them
    policy.add(new, used=False)
    assert set(policy.evict(3)) == set(new)


def test_value_falls_with_age() -> None:
    """Hit density of keys that return after a fixed time grows until then; otherwise it falls."""
    model = ReuseModel()
    for _ in range(40):
        model.used[0] += 100
        model.used[1] += 100
        model.reused[0][0] += 30
        model.reused[1][model.bin_of(10.0)] += 80
        model.update(UNITS / 10, 0.1)
    young, old = model.bin_of(0.5), model.bin_of(9.0)
    assert model.density[0][young] > 3 * model.density[0][old]
    assert model.density[1][old] > 3 * model.density[1][young]


def loops() -> Iterator[int]:
    """Go round a set that is a tenth larger than 1,000 slots: LRU hits nothing."""
    for index in range(30_000):
        yield index % 1100


def windows() -> Iterator[int]:
    """Use every key twice in quick succession: LRU hits all; keys used twice block the rest."""
    for index in range(15_000):
        yield index
        if index >= 450:
            yield index - 450


def scans() -> Iterator[int]:
    """Use a small set twice between scans of chunks that come once."""
    once = count(1_000_000)
    for _ in range(20):
        for _ in range(2):
            yield from range(400)
        for _ in range(1500):
            yield next(once)


def shifts() -> Iterator[int]:
    """Change from one to another."""
    for part, trace in enumerate((windows, loops, windows)):
        for number in trace():
            yield part * 10_000_000 + number


_ALONE = [pytest.param(trace, marks=pytest.mark.full) for trace in (loops, windows, scans)]


@pytest.mark.parametrize("trace", [*_ALONE, shifts])
def test_auto_is_near_the_best(trace: Callable[[], Iterator[int]]) -> None:
    names = {number: pack_key(blake2b(b"%d" % number, digest_size=16).digest()) for number in set(trace())}

    def hits(policy: EvictionPolicy) -> int:
        return sum(use(policy, names[number]) for number in trace())

    assert hits(Auto(1000)) >= 0.95 * max(hits(LHD(1000)), hits(ARC(1000)), hits(LRU(1000)))
