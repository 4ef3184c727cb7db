"""Results of a request's lookups, for requests that are to be explained."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.keys import OffloadKey


class LookupRecord:
    """Results of the lookups of the request ``name``.

    Args:
        asked: set that gets the name in each round with a new lookup; its owner clears it.

    Attributes:
        misses: keys that the last scan missed, in the order of the lookups, and the reasons
            (``reasons.MISS``).
    """

    def __init__(self, name: str = "", asked: set[str] | None = None) -> None:
        self.misses: dict[OffloadKey, str] = {}
        self.refusals: dict[OffloadKey, dict[str, str]] = {}  # reasons, by key and tier name
        self._given_up: dict[OffloadKey, str] = {}
        self._round: object = None
        self._name = name
        self._asked = set() if asked is None else asked

    def began(self, round_: object) -> None:
        """Note a lookup in a round; a new round discards earlier misses."""
        if round_ is not self._round:
            self._round = round_
            self.misses.clear()
            self._asked.add(self._name)

    def missed(self, round_: object, key: OffloadKey, reason: str) -> None:
        """Note that a key was answered MISS in a round."""
        self.began(round_)
        self.misses[key] = self._given_up.get(key, reason)

    def refused(self, keys: Iterable[OffloadKey], tier: str, reason: str) -> None:
        """Note why a tier did not return keys."""
        for key in keys:
            self.refusals.setdefault(key, {})[tier] = reason

    def gave_up(self, keys: Iterable[OffloadKey], reason: str) -> None:
        """Note why keys that tiers have are not promoted."""
        self._given_up.update(dict.fromkeys(keys, reason))
