"""Calls that are cancelled while the server is slow: what may still act on slots or objects is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from proxy import Faults, Proxy
from rigs import Place

from kvtier.testing.tiers.rig import keys
from kvtier.tiers.base import Status

pytestmark = pytest.mark.anyio

SLOW_S = 0.6
UNLISTED: dict[str, Any] = {"index_keys": 0}


async def seconds_after_a_cancellation(call: Coroutine[Any, Any, object]) -> float:
    """Cancel a call when its requests have reached the proxy; say how much longer it took."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(SLOW_S / 3)
    task.cancel()
    started = time.monotonic()
    await asyncio.wait((task,))
    assert task.cancelled()
    return time.monotonic() - started


async def test_a_put_holds_its_slots_until_the_client_has_done_with_them(place: Place, proxy: Proxy) -> None:
    async with place.opened(**UNLISTED) as it:
        with proxy.faulty(Faults(delay_s=SLOW_S, methods=("PUT",))):
            assert await seconds_after_a_cancellation(it.tier.put(it.filled(range(3))[0])) > SLOW_S / 3
        assert await it.get(range(3)) == [Status.OK] * 3


async def test_chunks_whose_put_had_not_begun_are_not_put(place: Place, proxy: Proxy) -> None:
    async with place.opened(max_requests=2, **UNLISTED) as it:
        with proxy.faulty(Faults(delay_s=SLOW_S, methods=("PUT",))):
            assert await seconds_after_a_cancellation(it.tier.put(it.filled(range(20))[0])) < 2 * SLOW_S
        assert len(place.paths("chunks")) == 2


async def test_a_get_ends_at_once_and_writes_nothing_more(place: Place, proxy: Proxy) -> None:
    async with place.opened(**UNLISTED) as it:
        await it.put(range(3))
        batch, slots = it.empty(range(3))
        with proxy.faulty(Faults(delay_s=SLOW_S, methods=("GET",))):
            assert await seconds_after_a_cancellation(it.tier.get(batch)) < SLOW_S / 3
            slots.move_in()
            await asyncio.sleep(SLOW_S)
        slots.check_next_owner("a get that was cancelled")


async def test_a_discard_does_not_delete_what_is_put_after_it(place: Place, proxy: Proxy) -> None:
    async with place.opened(**UNLISTED) as it:
        await it.put(range(3))
        with proxy.faulty(Faults(delay_s=SLOW_S, methods=("POST", "DELETE"))):
            await seconds_after_a_cancellation(it.tier.discard(keys(range(3))))
            await it.put(range(3))
            await asyncio.sleep(SLOW_S)
        assert await it.get(range(3)) == [Status.OK] * 3


async def test_a_reset_that_is_cancelled_is_a_reset(place: Place, proxy: Proxy) -> None:
    async with place.opened(**UNLISTED) as it:
        await it.put(range(3))
        with proxy.faulty(Faults(delay_s=SLOW_S / 2, methods=("PUT",))):
            await seconds_after_a_cancellation(it.tier.reset())
        assert await it.get(range(3)) == [Status.ABSENT] * 3
        assert await it.put(range(3)) == [Status.OK] * 3
    async with place.opened() as it:
        assert await it.get(range(3)) == [Status.ABSENT] * 3
