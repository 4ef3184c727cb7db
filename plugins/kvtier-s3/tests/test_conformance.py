"""The tier keeps kvtier's contract, on a real server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import ceph
import hypothesis
import obstore
import pytest
from kvtier_s3 import S3Tier
from proxy import Faults, Proxy

from kvtier.keys import OffloadKey
from kvtier.testing.tiers import Damage, TierConformance
from kvtier.tiers.base import SecondaryTier


class _OnCeph(TierConformance):
    """All requests go through the proxy, so that they can be made slow."""

    tier = S3Tier
    is_persistent = True
    is_shared = True
    more: ClassVar[Mapping[str, object]] = {}

    @pytest.fixture(autouse=True)
    def _meet(self, server: ceph.Ceph, bucket: str, proxy: Proxy) -> None:
        self.server, self.bucket, self.proxy = server, bucket, proxy
        self.store = server.store(bucket)

    def settings(self, place: Path) -> Mapping[str, object]:
        return {
            "type": "s3",
            "bucket": self.bucket,
            "prefix": place.name,
            "endpoint": self.proxy.endpoint,
            "allow_http": True,
            "access_key_id": self.server.access_key_id,
            "secret_access_key": self.server.secret_access_key,
            "timeout_s": 30.0,
            **self.more,
        }

    def sequences(self) -> hypothesis.settings:
        return hypothesis.settings(super().sequences(), max_examples=10)

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        chunks = {
            found["path"]: found for found in obstore.list(self.store, f"{place.name}/chunks").collect()
        }
        (mine,) = [path for path in chunks if f"/{key[:-4].hex()}_g" in path]
        stored = obstore.get(self.store, mine)
        attributes, content = stored.attributes, bytes(stored.bytes())
        if damage is Damage.SWAPPED:
            other = obstore.get(self.store, next(path for path in chunks if path != mine))
            attributes, content = other.attributes, bytes(other.bytes())
        damaged = {
            Damage.FLIPPED: bytes([content[0] ^ 1]) + content[1:],
            Damage.CUT: content[: len(content) // 2],
            Damage.EMPTY: b"",
            Damage.SWAPPED: content,
        }[damage]
        obstore.put(self.store, mine, damaged, attributes=attributes, use_multipart=False)

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        with self.proxy.faulty(Faults(delay_s=seconds, methods=("PUT", "GET"))):
            yield

    def wipe(self, place: Path) -> None:
        paths = [found["path"] for found in obstore.list(self.store, place.name).collect()]
        if paths:
            obstore.delete(self.store, paths)


class TestS3(_OnCeph):
    """As it comes."""


class TestWithoutConditionalPuts(_OnCeph):
    """As on a store that does not know them: what is put twice is replaced."""

    more: ClassVar[Mapping[str, object]] = {"conditional_puts": False, "bulk_delete": False}


class TestInParts(_OnCeph):
    """Chunks in parts, and nothing known beforehand."""

    more: ClassVar[Mapping[str, object]] = {"index_keys": 0, "part_bytes": "5MiB"}
    sizes = (4096, 12 * 2**20)
