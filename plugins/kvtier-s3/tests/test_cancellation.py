"""Calls cancelled while the server is slow wait for work that may still touch slots or objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import obstore
import pytest
from proxy import Faults, Proxy
from rigs import Place, wait_until

from kvtier.tiers import Status
from kvtier_testing.tiers.rig import keys

pytestmark = pytest.mark.anyio

UNTIL_RELEASED_S = 3600.0
SETTLE_S = 0.2
PATIENCE_S = 30.0
UNLISTED: dict[str, Any] = {"index_keys": 0, "timeout_s": 60.0}


@asynccontextmanager
async def cancelled(
    proxy: Proxy, call: Coroutine[Any, Any, object], methods: tuple[str, ...], held: int
) -> AsyncIterator[asyncio.Future[object]]:
    """Cancel a call when ``held`` of its requests are held back; release them at the end."""
    with proxy.faulty(Faults(delay_s=UNTIL_RELEASED_S, methods=methods)):
        task = asyncio.ensure_future(call)
        await wait_until(lambda: proxy.held() == held)
        task.cancel()
        await asyncio.wait((task,), timeout=SETTLE_S)
        yield task
    await asyncio.wait((task,), timeout=PATIENCE_S)
    assert task.cancelled()


async def test_put_holds_slots_to_the_end(place: Place, proxy: Proxy) -> None:
    async with place.opened(**UNLISTED) as it:
        async with cancelled(proxy, it.tier.put(it.filled(range(3))[0]), ("PUT",), held=3) as put:
            assert not put.done()
        assert await it.get(range(3)) == [Status.OK] * 3


async def test_panic_spares_other_puts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place.opened(**UNLISTED) as it:
        released = asyncio.Event()
        errors: list[BaseException | None] = [BaseException("a panic"), None]

        async def put_async(*_: object, **__: object) -> None:
            if error := errors.pop(0):
                raise error
            await released.wait()  # The request reads its slot even after a cancellation.

        monkeypatch.setattr(obstore, "put_async", put_async)
        put = asyncio.ensure_future(it.tier.put(it.filled(range(2))[0]))
        await asyncio.wait((put,), timeout=SETTLE_S)
        assert not put.done()
        released.set()
        outcome = await put
    assert sorted(outcome.statuses) == [Status.OK, Status.FAILED]
    assert outcome.reasons == {"error": 1}


async def test_unsent_puts_are_dropped(place: Place, proxy: Proxy) -> None:
    async with place.opened(max_requests=2, **UNLISTED) as it:
        async with cancelled(proxy, it.tier.put(it.filled(range(20))[0]), ("PUT",), held=2) as put:
            assert not put.done()
        assert len(place.paths("chunks")) == 2


async def test_discard_spares_later_put(place: Place, proxy: Proxy) -> None:
    async with place.opened(**UNLISTED) as it:
        await it.put(range(3))
        async with cancelled(proxy, it.tier.discard(keys(range(3))), ("POST", "DELETE"), held=1) as discard:
            assert not discard.done()
        await it.put(range(3))
        await asyncio.sleep(SETTLE_S)
        assert await it.get(range(3)) == [Status.OK] * 3


async def test_put_waits_for_discard(place: Place, proxy: Proxy) -> None:
    async with place.opened() as it:
        await it.put(range(3))
        with proxy.faulty(Faults(delay_s=UNTIL_RELEASED_S, methods=("POST", "DELETE"))):
            discard = asyncio.ensure_future(it.tier.discard(keys(range(3))))
            await wait_until(lambda: proxy.held() == 1)
            again = asyncio.ensure_future(it.tier.discard(keys(range(3))))
            assert all(await it.contains(range(3))), "as another request may find"
            put = asyncio.ensure_future(it.put(range(3)))
            await asyncio.wait((put,), timeout=SETTLE_S)
            assert proxy.held() == 1, "deletions of a chunk follow each other, and the put follows the last"
        await asyncio.gather(discard, again)
        assert await put == [Status.OK] * 3
        assert await it.get(range(3)) == [Status.OK] * 3


async def test_cancelled_reset_counts(place: Place, proxy: Proxy) -> None:
    async with place.opened(**UNLISTED) as it:
        await it.put(range(3))
        async with cancelled(proxy, it.tier.reset(), ("PUT",), held=1) as reset:
            assert not reset.done()
        assert await it.get(range(3)) == [Status.ABSENT] * 3
        assert await it.put(range(3)) == [Status.OK] * 3
    async with place.opened() as it:
        assert await it.get(range(3)) == [Status.ABSENT] * 3
