"""The tier keeps kvtier's contract."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from kvtier_shelf import ShelfTier

from kvtier.keys import OffloadKey
from kvtier.testing.tiers import Damage, TierConformance
from kvtier.tiers.base import SecondaryTier

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

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        with closing(sqlite3.connect(place)) as db, db:
            db.execute(DAMAGES[damage], (key,))
