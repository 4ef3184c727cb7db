"""Chunks held by several peers are read from all of them, in proportion to the speed of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress

import pytest
from engines import agent_of, opened, peers_of, until_found
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers import Status
from kvtier_nixl._pace import Pace, share_out
from kvtier_testing.tiers._servers import free_port
from kvtier_testing.tiers.rig import keys

CHUNKS = keys(range(64))


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def measured(clock: Clock, chunk_s: float) -> Pace:
    """Return the pace of a peer that has just delivered a chunk in ``chunk_s`` seconds."""
    pace = Pace(clock)
    with pace.reading(1):
        clock.now_s += chunk_s
    return pace


def shares(paces: Mapping[str, Pace]) -> Counter[str]:
    """Return how many chunks are read from each holder if each holds all of them."""
    return Counter(share_out(dict.fromkeys(CHUNKS, tuple(paces)), paces.__getitem__).values())


def test_large_get_is_split_by_throughput() -> None:
    clock = Clock()
    found = shares({"fast": measured(clock, 0.001), "slow": measured(clock, 0.003)})
    assert found == {"fast": 48, "slow": 16}


def test_in_flight_chunks_count() -> None:
    clock = Clock()
    paces = {"idle": measured(clock, 0.001), "busy": measured(clock, 0.001)}
    with paces["busy"].reading(32):
        assert shares(paces) == {"idle": 48, "busy": 16}
    assert paces["busy"].in_flight == 0


def test_slow_peer_is_tried_again() -> None:
    clock = Clock()
    slow = measured(clock, 5.0)
    assert shares({"slow": slow, "fast": measured(clock, 0.001)}) == {"fast": 64}
    clock.now_s += 60
    assert shares({"slow": slow, "fast": measured(clock, 0.001)})["slow"] == 32


def test_failed_read_is_not_measured() -> None:
    clock = Clock()
    pace = measured(clock, 0.001)
    with suppress(OSError), pace.reading(8):
        clock.now_s += 20
        raise OSError
    assert pace.in_flight == 0
    assert pace.expected_s(1) == pytest.approx(0.001)


@given(st.lists(st.sets(st.sampled_from("abc"), min_size=1), min_size=1, max_size=64))
def test_each_chunk_has_one_holder(held: Sequence[set[str]]) -> None:
    paces = {name: Pace() for name in "abc"}
    holders = {key: sorted(names) for key, names in zip(CHUNKS, held, strict=False)}
    chosen = share_out(holders, paces.__getitem__)
    assert all(chosen[key] in holders[key] for key in holders)
    assert list(chosen) == list(holders)


@pytest.mark.anyio
async def test_get_reads_from_all_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    async with AsyncExitStack() as stack:
        for address in addresses:
            near = await stack.enter_async_context(opened(listen=address))
            assert set(await near.put(range(64))) == {Status.OK}
        it = await stack.enter_async_context(opened(*addresses))
        for peer in peers_of(it).members:
            await peer.was_tried.wait()
        await until_found(it, range(64))
        agent, read_from = agent_of(it), Counter[str]()
        read = agent.read

        async def counted(peer: str, addresses: Sequence[int], rows: Sequence[int]) -> None:
            read_from[peer] += len(rows)
            await read(peer, addresses, rows)

        monkeypatch.setattr(agent, "read", counted)
        assert set(await it.get(range(64))) == {Status.OK}
        assert sum(read_from.values()) == 64
        assert len(read_from) == 2
