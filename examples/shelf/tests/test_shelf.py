"""The tier keeps kvtier's contract."""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from math import isinf
from pathlib import Path
from typing import Any
from unittest import mock

from kvtier_shelf import ShelfTier

from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier
from kvtier_testing.tiers import Damage, TierConformance

DAMAGES = {
    Damage.FLIPPED: "UPDATE chunks SET bytes = CAST(X'00' || substr(bytes, 2) AS BLOB) WHERE key = ?",
    Damage.CUT: "UPDATE chunks SET bytes = substr(bytes, length(bytes) / 2) WHERE key = ?",
    Damage.EMPTY: "UPDATE chunks SET bytes = X'' WHERE key = ?",
    Damage.SWAPPED: "UPDATE chunks SET (bytes, trailer) = "
    "(SELECT bytes, trailer FROM chunks AS others WHERE others.key != chunks.key) WHERE key = ?",
}


class TestShelf(TierConformance):
    tier = ShelfTier
    is_persistent = True
    is_shared = True

    def settings(self, place: Path) -> Mapping[str, object]:
        return {"type": "shelf", "path": str(place)}

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        return {**self.settings(place), "max_bytes": capacity_bytes}

    @contextmanager
    def slowed(self, tier: Any, seconds: float) -> Iterator[None]:
        over = threading.Event()

        def slow(call: Callable[..., Any]) -> Callable[..., Any]:
            def wait_and_call(*arguments: Any) -> Any:
                over.wait(None if isinf(seconds) else seconds)
                return call(*arguments)

            return wait_and_call

        with mock.patch.multiple(tier, _put=slow(tier._put), _get=slow(tier._get)):
            try:
                yield
            finally:
                over.set()

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        with closing(sqlite3.connect(place)) as db, db:
            db.execute(DAMAGES[damage], (key,))
