"""Resets: durable in the bucket, private to their tier, and independent of the order of events."""

from __future__ import annotations

from math import inf
from typing import Any

import anyio
import obstore
import pytest
from proxy import Faults, Proxy
from rigs import Place, wait_until

from kvtier.errors import TierError
from kvtier.tiers import Status

pytestmark = pytest.mark.anyio

GONE = [Status.ABSENT] * 3
KEPT = [Status.OK] * 3


async def test_open_tiers_keep_their_epoch(place: Place) -> None:
    async with place.opened() as first, place.opened() as second:
        await first.put(range(3))
        await second.tier.reset()
        assert await first.get(range(3)) == KEPT
        assert await second.get(range(3)) == GONE
        async with place.opened() as third:
            assert await third.get(range(3)) == GONE


async def test_puts_after_reset_are_private(place: Place) -> None:
    async with place.opened() as first:
        await first.tier.reset()
        assert await first.put(range(3)) == KEPT
        async with place.opened() as second:
            assert await second.get(range(3)) == GONE
            assert await second.put(range(3), version=1) == KEPT
        assert await first.get(range(3)) == KEPT
    async with place.opened() as third:
        assert await third.get(range(3), versions=(1,)) == KEPT


async def test_concurrent_resets_all_count(place: Place) -> None:
    async with place.opened() as first:
        await first.put(range(3))
    rigs = [place.opened() for _ in range(6)]
    opened = [await rig.__aenter__() for rig in rigs]
    async with anyio.create_task_group() as tasks:
        for it in opened:
            tasks.start_soon(it.tier.reset)
    for it in opened:
        assert await it.get(range(3)) == GONE
        await it.put(range(3))
    async with place.opened() as last:
        assert await last.get(range(3)) == GONE
    for rig in rigs:
        await rig.__aexit__(None, None, None)


async def test_slow_reset_hides_concurrent_puts(place: Place, proxy: Proxy) -> None:
    direct: dict[str, Any] = {"endpoint": place.server.endpoint}
    async with place.opened(timeout_s=60.0) as slow, place.opened(**direct) as quick:
        for _ in range(6):  # Two markers with the same number have a random order.
            async with anyio.create_task_group() as tasks:
                with proxy.faulty(Faults(delay_s=inf, methods=("PUT",))):
                    tasks.start_soon(slow.tier.reset)
                    await wait_until(lambda: proxy.held() == 1)
                    await quick.tier.reset()
                    async with place.opened(**direct) as it:
                        assert await it.put(range(3)) == KEPT
            async with place.opened() as it:
                assert await it.get(range(3)) == GONE


async def test_markers_do_not_pile_up(place: Place) -> None:
    async with place.opened() as it:
        for _ in range(5):
            await it.tier.reset()
        assert len([path for path in place.paths("caches") if "/epochs/" in path]) == 1


async def test_lost_marker_revives_no_epoch(place: Place) -> None:
    async with place.opened() as it:
        await it.put(range(3))
        await it.tier.reset()
    obstore.delete(place.store, [path for path in place.paths("caches") if "/epochs/" in path])
    async with place.opened() as it:
        assert await it.get(range(3)) == GONE


@pytest.mark.parametrize("refused", [("PUT",), ("GET",)])
async def test_failed_reset_hides_all(place: Place, proxy: Proxy, refused: tuple[str, ...]) -> None:
    async with place.opened() as it:
        await it.put(range(3))
        with (
            proxy.faulty(Faults(refused=True, status=500, code="InternalError", methods=refused)),
            pytest.raises(
                TierError, match=r"tier tested: .* could not be reset: server \(500 InternalError\)"
            ),
        ):
            await it.tier.reset()
        assert await it.get(range(3)) == GONE
        outcome = await it.tier.put(it.filled(range(3))[0])
        assert (set(outcome.statuses), outcome.reasons) == ({Status.REFUSED}, {"reset": 3})
        assert await it.contains(range(3)) == [False] * 3
        await it.tier.reset()
        assert await it.put(range(3)) == KEPT


async def test_foreign_objects_are_ignored(place: Place) -> None:
    async with place.opened() as it:
        await it.put(range(3))
        markers = [path for path in place.paths("caches") if "/epochs/" in path]
        places = {path.rpartition("/")[0] for path in place.paths("chunks")}
    for folder in (*places, *(marker.rpartition("/")[0] for marker in markers)):
        for name in ("notes.txt", "zz_g1", "9999999999-zzzz", "00_g99999999999"):
            obstore.put(place.store, f"{folder}/{name}", b"x")
    async with place.opened() as it:
        assert await it.get(range(3)) == KEPT
