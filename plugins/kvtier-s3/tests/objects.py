"""What is asked of the tier on every store: its chunks are objects that a client beside it can change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import obstore
from proxy import Faults, Proxy

from kvtier.keys import OffloadKey
from kvtier.tiers.base import SecondaryTier
from kvtier_s3 import S3Tier
from kvtier_s3.stores import Store
from kvtier_testing.tiers import Damage, TierConformance


class OnObjects(TierConformance):
    """All requests of the tier go through a proxy, so that they can be made slow.

    Attributes:
        store: a client beside the tier, of the same bucket.
        proxy: the proxy.
    """

    tier = S3Tier
    is_persistent = True
    is_shared = True
    store: Store
    proxy: Proxy

    def sequences(self) -> hypothesis.settings:
        return hypothesis.settings(super().sequences(), max_examples=10)

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
