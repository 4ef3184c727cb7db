"""The tier keeps kvtier's contract, on a real server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import ceph
import pytest
from objects import OnObjects
from proxy import Proxy


class _OnCeph(OnObjects):
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
            # Times that a machine does not miss which is busy with something else.
            "timeout_s": 30.0,
            "deadline_s": 30.0,
            **self.more,
        }

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}


class TestS3(_OnCeph):
    """As it comes."""


class TestWithoutConditionalPuts(_OnCeph):
    """As on a store that does not know them: what is put twice is replaced."""

    more: ClassVar[Mapping[str, object]] = {"conditional_puts": False, "bulk_delete": False}


class TestInParts(_OnCeph):
    """Chunks in parts, and nothing known beforehand."""

    more: ClassVar[Mapping[str, object]] = {"index_keys": 0, "part_bytes": "5MiB"}
    sizes = (4096, 12 * 2**20)
