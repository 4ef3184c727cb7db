"""What goes wrong while the tier is open ends as statuses with reasons: never raised, never hung."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import ceph
import obstore
import pytest
from proxy import Faults, Proxy
from rigs import CHUNK_BYTES, Place, wait_until

from kvtier.tiers.base import Outcome, Status
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers.rig import keys

ALL = range(6)
TIMES: dict[str, Any] = {"timeout_s": 4.0, "connect_timeout_s": 4.0}
BOUND_S = 16.0
"""For each call, on a machine that is busy; what does not give up hangs for longer."""
UNTIL_RELEASED_S = 3600.0

pytestmark = pytest.mark.anyio


@contextmanager
def bounded() -> Iterator[None]:
    """Whatever is done takes no longer than requests may."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < BOUND_S


async def put(it: TierRig) -> Outcome:
    with bounded():
        return await it.tier.put(it.filled(ALL)[0])


async def get(it: TierRig) -> Outcome:
    with bounded():
        return await it.tier.get(it.empty(ALL)[0])


async def check_all_fail(it: TierRig, reason: str) -> None:
    """Every call ends in time, and says why."""
    failed = Outcome.all(Status.FAILED, len(ALL), reason)
    for call in (put, get):
        outcome = await call(it)
        assert (list(outcome.statuses), outcome.reasons) == (list(failed.statuses), failed.reasons)
    with bounded():
        assert await it.contains(ALL) == [False] * len(ALL)
    with bounded():
        await it.tier.discard(keys(ALL))


async def check_all_is_well(it: TierRig) -> None:
    it.expect_kept(await it.put(ALL), "a put when the trouble was over")
    it.expect_kept(await it.get(ALL), "a get when the trouble was over")


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(refused=-1), "throttled"),
        (Faults(refused=-1, status=500, code="InternalError"), "server"),
        (Faults(refused=-1, status=403, code="AccessDenied"), "forbidden"),
        (Faults(refused=-1, status=403, code="RequestTimeTooSkewed"), "clock"),
        (Faults(refused=-1, status=404, code="NoSuchBucket"), "no_bucket"),
        (Faults(delay_s=inf), "timeout"),
        (Faults(deaf=True), "timeout"),
    ],
    ids=str,
)
async def test_a_server_in_trouble_fails_each_chunk_with_the_reason(
    place: Place, proxy: Proxy, faults: Faults, reason: str
) -> None:
    async with place.opened(**TIMES) as it:
        with proxy.faulty(faults):
            await check_all_fail(it, reason)
            # The client hangs up a little later than it gives up: a DELETE would delete what is put next.
            await wait_until(lambda: proxy.held() == 0)
        await check_all_is_well(it)


async def test_a_server_that_is_full_refuses(place: Place, proxy: Proxy) -> None:
    async with place.opened() as it:
        with proxy.faulty(Faults(refused=-1, status=403, code="QuotaExceeded", methods=("PUT",))):
            outcome = await put(it)
    assert (set(outcome.statuses), outcome.reasons) == ({Status.REFUSED}, {"full": len(ALL)})


async def test_a_body_that_comes_too_slowly_is_a_timeout(place: Place, proxy: Proxy) -> None:
    async with place.opened(**TIMES) as it:
        await it.put(ALL)
        with proxy.faulty(Faults(slow_body_s=0.5, methods=("GET",))):
            outcome = await get(it)
        assert (set(outcome.statuses), outcome.reasons) == ({Status.FAILED}, {"timeout": len(ALL)})
        await check_all_is_well(it)


async def test_a_body_that_is_cut_is_never_given(place: Place, proxy: Proxy) -> None:
    async with place.opened() as it:
        await it.put(ALL)
        with proxy.faulty(Faults(cut_after=CHUNK_BYTES // 2, methods=("GET",))):
            outcome = await get(it)
        assert (set(outcome.statuses), outcome.reasons) == ({Status.FAILED}, {"connection": len(ALL)})
        await check_all_is_well(it)


async def test_a_server_that_is_gone_fails_each_chunk(place: Place, server: ceph.Ceph) -> None:
    with Proxy(int(server.endpoint.rpartition(":")[2])) as passing:
        tier = place.opened(endpoint=passing.endpoint, **TIMES)
        it = await tier.__aenter__()
    await check_all_fail(it, "connection")
    await tier.__aexit__(None, None, None)


async def test_closing_does_not_wait_for_a_server_that_hangs(place: Place, proxy: Proxy) -> None:
    async with place.opened(list_every_s=0.01, timeout_s=60.0):
        proxy.be(Faults(deaf=True))
        await wait_until(lambda: proxy.held() > 0)
        started = time.monotonic()
    assert time.monotonic() - started < BOUND_S


async def test_a_request_whose_answer_was_lost_is_repeated_without_harm(place: Place, proxy: Proxy) -> None:
    async with place.opened(**TIMES) as it:
        with proxy.faulty(Faults(delay_s=UNTIL_RELEASED_S, methods=("PUT",))):
            await put(it)  # the server gets it when the tier has given up
        await check_all_is_well(it)


async def test_what_is_read_only_is_read(
    place: Place, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    async with place.opened() as it:
        await it.put(ALL)
    proxy.be(Faults(refused=-1, status=403, code="AccessDenied", methods=("PUT", "POST", "DELETE")))
    async with place.opened() as it:
        it.expect_kept(await it.get(ALL), "a get from what cannot be written")
        outcome = await put(it)
        await it.tier.discard(keys(ALL))
        it.expect_kept(await it.get(ALL), "what a discard could not delete")
    assert (set(outcome.statuses), outcome.reasons) == ({Status.REFUSED}, {"read_only": len(ALL)})
    assert "only read" in caplog.text


async def test_faults_are_logged_once_and_no_secret_is_shown(
    place: Place, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with place.opened(index_keys=0) as it:
        with proxy.faulty(Faults(refused=-1, status=403, code="AccessDenied")):
            for _ in range(3):
                await put(it)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage().partition(":")[0] for record in warnings] == ["tier tested"]
    for secret in (place.server.secret_access_key, place.server.access_key_id):
        assert secret not in caplog.text


async def test_chunks_that_left_by_themselves_are_told_of_and_can_be_put_again(place: Place) -> None:
    told: list[bytes] = []
    async with place.opened(told.extend) as it:
        await it.put(ALL)
        obstore.delete(place.store, place.paths("chunks"))  # as a lifecycle rule does
        assert set(await it.get(ALL)) == {Status.ABSENT}
        assert sorted(told) == sorted(keys(ALL))
        await check_all_is_well(it)
