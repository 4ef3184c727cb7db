"""Tiers on the test server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import ceph
import obstore
from proxy import Proxy

from kvtier import Identity
from kvtier._settings import validation
from kvtier.tiers._base import ignore
from kvtier_s3 import S3Tier
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers.rig import Removed

CHUNK_BYTES = 64 * 1024
IDENTITY = Identity.make("kvtier/tests", {"dtype": "float32"})
GENEROUS = {"connect_timeout_s": 30.0, "timeout_s": 30.0, "open_timeout_s": 60.0}  # limit for a busy machine


async def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for a background task or the proxy."""
    with anyio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - there is no event
            await anyio.sleep(0.02)


class Place:
    """An unused prefix on the test server, settings of a tier there, and an independent client."""

    def __init__(self, server: ceph.Ceph, bucket: str, prefix: str, proxy: Proxy) -> None:
        self.server, self.proxy, self.prefix = server, proxy, prefix
        self.store = server.store(bucket)
        self.settings: dict[str, Any] = {
            "type": "s3",
            "bucket": bucket,
            "prefix": prefix,
            "endpoint": proxy.endpoint,
            "allow_http": True,
            "access_key_id": server.access_key_id,
            "secret_access_key": server.secret_access_key,
            **GENEROUS,
        }

    def tier(self, **more: object) -> S3Tier:
        """Return a tier that is not open."""
        return S3Tier(validation.build(S3Tier.Config, {**self.settings, **more}))

    def opened(
        self, removed: Removed = ignore, identity: Identity = IDENTITY, **more: object
    ) -> AbstractAsyncContextManager[TierRig]:
        """Open a tier, and close it at the end."""
        return TierRig(self.tier(**more), identity, CHUNK_BYTES).opened(removed)

    def paths(self, under: str = "") -> list[str]:
        """Return the paths of objects."""
        return sorted(found["path"] for found in obstore.list(self.store, f"{self.prefix}/{under}").collect())
