"""The requests of each call, knowledge without requests, and the content of an object."""

from __future__ import annotations

import base64
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3
import obstore
import pytest
from proxy import Proxy
from rigs import CHUNK_BYTES, IDENTITY, Place, wait_until

from kvtier.keys import OffloadKey
from kvtier.tiers import Knowledge, Status
from kvtier.tiers._seal import Integrity, check
from kvtier_s3 import S3Config
from kvtier_s3._layout import Layout
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers.rig import key, keys

pytestmark = pytest.mark.anyio

UNLISTED: dict[str, Any] = {"index_keys": 0}


async def wait_until_known(it: TierRig, numbers: range) -> None:
    """Wait until a listing has found all of them."""
    await wait_until(lambda: set(it.tier.known(keys(numbers))) == {Knowledge.PRESENT})


async def test_trailer_is_in_metadata(place: Place) -> None:
    async with place.opened() as it:
        await it.put([1])
    (path,) = place.paths("chunks")
    stored = obstore.get(place.store, path)
    trailer = base64.b64decode(stored.attributes["kvtier"])
    content = stored.bytes()
    assert bytes(content) == it.content(1)
    assert check(trailer, key(1), memoryview(content), IDENTITY.short_digest) is Integrity.SOUND
    assert Path(path).name == f"{key(1)[:-4].hex()}_g1"


async def test_one_request_per_chunk(place: Place, proxy: Proxy) -> None:
    async with place.opened(**UNLISTED) as it:
        counts = [proxy.requests()]
        for call in (it.put, it.get, it.contains, lambda numbers: it.tier.discard(keys(numbers))):
            await call(range(20))
            counts.append(proxy.requests())
    assert [after - before for before, after in pairwise(counts)] == [20, 20, 20, 1]


async def test_known_chunks_need_no_request(place: Place, proxy: Proxy) -> None:
    async with place.opened() as it:
        await it.put(range(20))
    async with place.opened() as it:
        await wait_until_known(it, range(20))
        before = proxy.requests()
        assert all(await it.contains(range(20)))
        await it.put(range(20))
        assert proxy.requests() == before


async def test_listing_finds_changes(place: Place) -> None:
    told: list[OffloadKey] = []
    async with place.opened(told.extend, list_every_s=0.05) as it, place.opened() as other:
        await other.put(range(8))
        await wait_until_known(it, range(8))
        assert told == []
        obstore.delete(place.store, place.paths("chunks")[:3])
        await wait_until(lambda: len(told) >= 3)
        left = [number for number in range(8) if key(number) not in told]
        assert (len(told), len(left)) == (3, 5)
        assert set(it.tier.known(told)) == {Knowledge.UNKNOWN}
        it.expect_kept(await it.get(left), "chunks that have not expired")


def test_readme_lifecycle_names_chunks(place: Place) -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (rules,) = re.findall(r'^```json\n({"Rules".*?)^```', readme, re.MULTILINE | re.DOTALL)
    server = place.server
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name="us-east-1",
    )
    bucket = "expires"
    server.make_bucket(bucket)
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=json.loads(rules))
    accepted = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    chunks = Layout(S3Config.model_fields["prefix"].default, IDENTITY.namespace).all_chunks
    assert {rule["Filter"]["Prefix"].rstrip("/") for rule in accepted} == {chunks}
    assert all("Expiration" in rule for rule in accepted)


async def test_max_bytes_counts_all_caches(place: Place) -> None:
    async with place.opened() as it:
        await it.put(range(6))
        before = it.tier.usage()
        assert before is None or before.capacity_bytes is None
    other = type(IDENTITY).make("kvtier/tests", {"dtype": "bfloat16"})
    async with place.opened(identity=other, max_bytes=8 * CHUNK_BYTES) as it:
        await wait_until(lambda: it.tier.usage() is not None)
        statuses = await it.put(range(6))
        usage = it.tier.usage()
    assert sorted(statuses) == [Status.OK] * 2 + [Status.REFUSED] * 4
    assert usage is not None
    assert (usage.used_bytes, usage.capacity_bytes) == (8 * CHUNK_BYTES, 8 * CHUNK_BYTES)
