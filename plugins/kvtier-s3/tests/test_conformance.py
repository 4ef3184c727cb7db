"""The tier passes kvtier's conformance tests on Ceph's object gateway, and on a store that you name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import ceph
import hypothesis
import obstore
import pytest
from proxy import Faults, Proxy
from rigs import GENEROUS

from kvtier._settings import validation
from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier
from kvtier_s3 import S3Config, S3Tier
from kvtier_s3._store import Store, make_store
from kvtier_testing.tiers import Damage, TierConformance

OTHER_STORE = "KVTIER_S3_STORE"


class _OnObjectStore(TierConformance):
    """The tests for any store.

    Attributes:
        base: settings of the tier, except ``prefix``.
        store: an independent client of the same bucket.
    """

    tier = S3Tier
    is_persistent = True
    is_shared = True
    base: Mapping[str, object]
    store: Store

    def settings(self, place: Path) -> Mapping[str, object]:
        return {**self.base, "prefix": place.name}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    def sequences(self) -> hypothesis.settings:
        return hypothesis.settings(super().sequences(), max_examples=10)

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        paths = [found["path"] for found in obstore.list(self.store, f"{place.name}/chunks").collect()]
        (mine,) = [path for path in paths if f"/{key[:-4].hex()}_g" in path]
        stored = obstore.get(self.store, mine)
        attributes, content = stored.attributes, bytes(stored.bytes())
        if damage is Damage.SWAPPED:
            other = obstore.get(self.store, next(path for path in paths if path != mine))
            attributes, content = other.attributes, bytes(other.bytes())
        damaged = {
            Damage.FLIPPED: bytes([content[0] ^ 1]) + content[1:],
            Damage.CUT: content[: len(content) // 2],
            Damage.EMPTY: b"",
            Damage.SWAPPED: content,
        }[damage]
        obstore.put(self.store, mine, damaged, attributes=attributes, use_multipart=False)

    def wipe(self, place: Path) -> None:
        paths = [found["path"] for found in obstore.list(self.store, place.name).collect()]
        if paths:
            obstore.delete(self.store, paths)


class TestS3(_OnObjectStore):
    """Ceph behind a proxy, with default settings."""

    more: ClassVar[Mapping[str, object]] = {}

    @pytest.fixture(autouse=True)
    def _connect(self, server: ceph.Ceph, bucket: str, proxy: Proxy) -> None:
        server.revive()
        self.server, self.store, self.proxy = server, server.store(bucket), proxy
        self.base = {
            **GENEROUS,
            "type": "s3",
            "bucket": bucket,
            "endpoint": proxy.endpoint,
            "allow_http": True,
            "access_key_id": server.access_key_id,
            "secret_access_key": server.secret_access_key,
            "deadline_s": 30.0,
            **self.more,
        }

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        with self.proxy.faulty(Faults(delay_s=seconds, methods=("PUT", "GET"))):
            yield

    def restart(self, place: Path) -> None:
        self.server.restart_gateway()


class TestWithoutOptionalFeatures(TestS3):
    """A store without conditional puts and bulk deletes, and a tier that knows no chunks beforehand."""

    more: ClassVar[Mapping[str, object]] = {
        "conditional_puts": False,
        "bulk_delete": False,
        "index_keys": 0,
    }


class TestOtherStore(_OnObjectStore):
    """Any store: ``KVTIER_S3_STORE`` is the JSON of a tier's settings."""

    __test__ = OTHER_STORE in os.environ

    @pytest.fixture(autouse=True)
    def _connect(self) -> None:
        self.base = {**GENEROUS, "deadline_s": 60.0, **json.loads(os.environ[OTHER_STORE])}
        self.store = make_store(validation.build(S3Config, self.base))
