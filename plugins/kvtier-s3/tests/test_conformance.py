"""The tier passes kvtier's conformance tests on Ceph's object gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import ceph
import pytest
from objects import InParts, OnObjectStore
from proxy import Proxy
from rigs import GENEROUS


class _OnCeph(OnObjectStore):
    @pytest.fixture(autouse=True)
    def _connect(self, server: ceph.Ceph, bucket: str, proxy: Proxy) -> None:
        self.store, self.proxy = server.store(bucket), proxy
        self.base = {
            **GENEROUS,
            "type": "s3",
            "bucket": bucket,
            "endpoint": proxy.endpoint,
            "allow_http": True,
            "access_key_id": server.access_key_id,
            "secret_access_key": server.secret_access_key,
            "deadline_s": 30.0,
        }


class TestS3(_OnCeph):
    """With default settings."""


class TestWithoutConditionalPuts(_OnCeph):
    """As on a store that supports neither conditional puts nor bulk deletes."""

    more: ClassVar[Mapping[str, object]] = {"conditional_puts": False, "bulk_delete": False}


class TestInParts(_OnCeph, InParts):
    """In parts."""
