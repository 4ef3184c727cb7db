"""The conformance tests of the tier on any object store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import obstore
from proxy import Faults, Proxy

from kvtier.keys import OffloadKey
from kvtier.tiers.base import SecondaryTier
from kvtier_s3 import S3Tier
from kvtier_s3._store import Store
from kvtier_testing.tiers import Damage, TierConformance


class OnObjectStore(TierConformance):
    """All requests of the tier go through a proxy, which can slow them down.

    Attributes:
        base: settings of a tier behind the proxy, ``prefix`` apart.
        more: settings of a subclass.
        store: a client besides the tier's, of the same bucket.
        proxy: the proxy.
    """

    tier = S3Tier
    is_persistent = True
    is_shared = True
    base: Mapping[str, object]
    more: ClassVar[Mapping[str, object]] = {}
    store: Store
    proxy: Proxy

    def settings(self, place: Path) -> Mapping[str, object]:
        return {**self.base, "prefix": place.name, **self.more}

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

    @contextmanager
    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> Iterator[None]:
        with self.proxy.faulty(Faults(delay_s=seconds, methods=("PUT", "GET"))):
            yield

    def wipe(self, place: Path) -> None:
        paths = [found["path"] for found in obstore.list(self.store, place.name).collect()]
        if paths:
            obstore.delete(self.store, paths)


class InParts(OnObjectStore):
    """Chunks are uploaded in parts, and none is known beforehand."""

    more: ClassVar[Mapping[str, object]] = {"index_keys": 0, "part_bytes": "5MiB"}
    sizes = (4096, 12 * 2**20)
