"""Faults of an open tier cause statuses with reasons, or errors of lookups, but no call hangs."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import anyio
import ceph
import obstore
import pytest
from proxy import Faults, Proxy
from rigs import CHUNK_BYTES, IDENTITY, Place, wait_until

from kvtier._core.messages import Answer
from kvtier.errors import TierError
from kvtier.tiers import Outcome, Status
from kvtier_s3 import _profile
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers._forgetful import ForgetfulProxy
from kvtier_testing.tiers.driver import TierDriver
from kvtier_testing.tiers.rig import keys

ALL = range(6)
TIMES: dict[str, Any] = {"timeout_s": 4.0, "connect_timeout_s": 4.0}
BOUND_S = 16.0
"""For each call on a busy machine; a call without a timeout takes longer."""
UNTIL_RELEASED_S = 3600.0
PROFILE: dict[str, Any] = {"profile": "kv", "access_key_id": None, "secret_access_key": None}

pytestmark = pytest.mark.anyio


@contextmanager
def within(seconds: float = BOUND_S) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


async def put(it: TierRig) -> Outcome:
    with within():
        return await it.tier.put(it.filled(ALL)[0])


async def get(it: TierRig) -> Outcome:
    with within():
        return await it.tier.get(it.empty(ALL)[0])


def check_all(outcome: Outcome, status: Status, reason: str) -> None:
    assert (set(outcome.statuses), outcome.reasons) == ({status}, {reason: len(ALL)})


async def check_all_fail(it: TierRig, reason: str) -> None:
    """Check that every call ends in time, with the reason."""
    with within():
        outcomes = await asyncio.gather(put(it), get(it))
        await asyncio.gather(check_lookup_fails(it, reason), it.tier.discard(keys(ALL)))
    for outcome in outcomes:
        check_all(outcome, Status.FAILED, reason)


async def check_lookup_fails(it: TierRig, reason: str) -> None:
    with pytest.raises(TierError, match=f"{len(ALL)} of {len(ALL)} lookups failed: {reason}"):
        await it.contains(ALL)


async def check_all_is_well(it: TierRig) -> None:
    it.expect_kept(await it.put(ALL), "a put after the fault")
    it.expect_kept(await it.get(ALL), "a get after the fault")


@pytest.fixture
def asks_for_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the bucket exists after every miss, with no minimum interval."""
    monkeypatch.setattr("kvtier_s3.tier._BUCKET_EVERY_S", 0.0)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(refused=True), "throttled"),
        (Faults(refused=True, status=404, code="NoSuchBucket"), "no_bucket"),  # and not absent
        (Faults(delay_s=inf), "timeout"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("asks_for_the_bucket")
async def test_fault_reason_per_chunk(place: Place, proxy: Proxy, faults: Faults, reason: str) -> None:
    async with place.opened(**TIMES) as it:
        with proxy.faulty(faults):
            await check_all_fail(it, reason)
            # obstore closes connections a little later: a DELETE in flight would delete the next put.
            await wait_until(lambda: proxy.held() == 0)
        await check_all_is_well(it)


@pytest.mark.usefixtures("asks_for_the_bucket")
async def test_deleted_bucket_is_an_error(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    bucket = f"deleted-{uuid.uuid4().hex[:12]}"
    place.server.make_bucket(bucket)
    place.store = place.server.store(bucket)
    async with place.opened(bucket=bucket) as it:
        assert await it.contains(ALL) == [False] * len(ALL)
        obstore.delete(place.store, place.paths())
        place.server.remove_bucket(bucket)
        await check_lookup_fails(it, "no_bucket")
        remedy = f"no_bucket (404 NoSuchBucket); create the bucket, or correct bucket ({bucket}) or endpoint"
        assert f"tier tested: contains failed: {remedy}" in caplog.text
        place.server.make_bucket(bucket)
        assert await it.contains(ALL) == [False] * len(ALL)
        await check_all_is_well(it)


async def test_misses_rarely_check_bucket(
    place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_s3.tier._BUCKET_EVERY_S", UNTIL_RELEASED_S)
    async with place.opened() as it:
        with proxy.faulty(Faults(refused=True, status=404, code="NoSuchBucket", methods=("GET",))):
            for _ in range(3):
                assert await it.contains(ALL) == [False] * len(ALL)


async def test_full_server_refuses(place: Place, proxy: Proxy) -> None:
    async with place.opened() as it:
        with proxy.faulty(Faults(refused=True, status=403, code="QuotaExceeded", methods=("PUT",))):
            check_all(await put(it), Status.REFUSED, "full")


async def test_truncated_body_never_returned(place: Place, proxy: Proxy) -> None:
    async with place.opened(**TIMES) as it:
        await it.put(ALL)
        with proxy.faulty(Faults(cut_after=CHUNK_BYTES // 2, methods=("GET",))):
            check_all(await get(it), Status.FAILED, "connection")
        await check_all_is_well(it)


@pytest.mark.parametrize("spoiled", ["html", "zeros", "bare"])
async def test_spoiling_gateway_deletes_nothing(place: Place, proxy: Proxy, spoiled: str) -> None:
    driver = TierDriver(TierRig(place.tier(), IDENTITY, CHUNK_BYTES), len(ALL))
    async with driver.executor:
        await driver.put(ALL)
        with proxy.faulty(Faults(spoiled=spoiled, methods=("GET",), path="/chunks/")):
            fetched = await driver.fetch(ALL)
            assert sum(fetched.reasons.values()) == len(ALL), fetched
            assert not any(Answer(answer) is Answer.COPIED for answer in fetched.answers)
    assert len(place.paths("chunks")) == len(ALL)


def has_renewed(tier: Any) -> bool:
    return bool(tier._renewal._task.done())


async def test_forgotten_connections_cost_one_timeout(place: Place, server: ceph.Ceph) -> None:
    with ForgetfulProxy(int(server.endpoint.rpartition(":")[2])) as passing:
        endpoint = f"http://127.0.0.1:{passing.port}"
        async with place.opened(endpoint=endpoint, **{**TIMES, "timeout_s": 3.0}) as it:
            await put(it)
            await get(it)
            passing.forget()
            assert (await it.tier.get(it.empty([0])[0])).reasons == {"timeout": 1}
            await wait_until(lambda: has_renewed(it.tier))
            it.expect_kept(await it.get(ALL), "a get after connections were forgotten")


async def test_rotated_credentials_are_read(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    old = place.server.add_key(file)
    async with place.opened(**PROFILE) as it:
        await put(it)
        place.server.add_key(file)
        place.server.remove_key(old)
        with anyio.fail_after(60):
            while set((outcome := await get(it)).statuses) != {Status.OK}:
                assert set(outcome.reasons) == {"forbidden"}
                await anyio.sleep(0.05)


@pytest.fixture
def hang(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A profile ``kv`` whose program hangs while this file exists. boto3 runs it for each request."""
    hang, program, config = (tmp_path / name for name in ("hang", "program", "config"))
    keys = {"AccessKeyId": place.server.access_key_id, "SecretAccessKey": place.server.secret_access_key}
    text = json.dumps({"Version": 1, **keys, "Expiration": "SOON"})
    program.write_text(
        f"#!/bin/sh\nwhile [ -e {hang} ]; do sleep 0.05; done\n"
        f"echo '{text}' | sed s/SOON/$(date -u -d '+5 min' +%Y-%m-%dT%H:%M:%SZ)/\n"
    )
    program.chmod(0o755)
    config.write_text(f"[profile kv]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(_profile, "_VALID_S", 0.0)
    yield hang
    hang.unlink(missing_ok=True)


async def test_hanging_program_keeps_credentials(place: Place, hang: Path) -> None:
    async with place.opened(**PROFILE, **TIMES, index_keys=0) as it:
        await it.put(range(3))
        hang.touch()
        with within():
            assert await it.put(range(3, 9)) == [Status.OK] * 6
            assert await it.get(range(9)) == [Status.OK] * 9


async def test_hanging_program_fails_open(place: Place, hang: Path) -> None:
    hang.touch()
    with within(), pytest.raises(TierError, match=r"open_timeout_s \(0\.5"):
        async with place.opened(**PROFILE, open_timeout_s=0.5):
            pass


async def test_unreachable_server_fails_chunks(place: Place, server: ceph.Ceph) -> None:
    with Proxy(int(server.endpoint.rpartition(":")[2])) as passing:
        tier = place.opened(endpoint=passing.endpoint, **TIMES)
        it = await tier.__aenter__()
    await check_all_fail(it, "connection")
    await tier.__aexit__(None, None, None)


async def test_close_ignores_hanging_server(place: Place, proxy: Proxy) -> None:
    tier = place.opened(list_every_s=0.01, timeout_s=60.0)
    await tier.__aenter__()
    proxy.be(Faults(delay_s=inf))
    await wait_until(lambda: proxy.held() > 0)
    with within():
        await tier.__aexit__(None, None, None)


async def test_lost_answer_is_retried(place: Place, proxy: Proxy) -> None:
    async with place.opened(**TIMES) as it:
        with proxy.faulty(Faults(delay_s=UNTIL_RELEASED_S, methods=("PUT",))):
            await put(it)  # the server receives it after the tier has given up
        await check_all_is_well(it)


async def test_read_only_credentials(place: Place, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    async with place.opened() as it:
        await it.put(ALL)
    proxy.be(Faults(refused=True, status=403, code="AccessDenied", methods=("PUT", "POST", "DELETE")))
    async with place.opened() as it:
        it.expect_kept(await it.get(ALL), "a get with read-only credentials")
        outcome = await put(it)
        await it.tier.discard(keys(ALL))
        it.expect_kept(await it.get(ALL), "a get after a refused discard")
    check_all(outcome, Status.REFUSED, "read_only")
    assert "is read-only" in caplog.text
    assert "discard failed: read_only" in caplog.text


async def test_faults_logged_without_secrets(
    place: Place, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with place.opened(index_keys=0) as it:
        with proxy.faulty(Faults(refused=True, status=403, code="AccessDenied")):
            for _ in range(3):
                await put(it)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage().partition(":")[0] for record in warnings] == ["tier tested"]
    for secret in (place.server.secret_access_key, place.server.access_key_id):
        assert secret not in caplog.text


async def test_expired_chunks_return(place: Place) -> None:
    told: list[bytes] = []
    async with place.opened(told.extend) as it:
        await it.put(ALL)
        obstore.delete(place.store, place.paths("chunks"))  # as a lifecycle rule does
        assert set(await it.get(ALL)) == {Status.ABSENT}
        assert sorted(told) == sorted(keys(ALL))
        await check_all_is_well(it)
