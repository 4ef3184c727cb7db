"""What is known of the objects without asking: which chunks are there, and how many bytes they take.

A listing says what was there while it ran. What this tier puts and discards meanwhile and afterwards is
added to it; what others put is learnt at the next one, and what a lifecycle rule has removed as well.
So the keys are a lower bound that can be wrong where chunks expire, and the bytes are about right.

Changed on the event loop only. Any thread may ask which keys are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.keys import OffloadKey
from kvtier.tiers.base import Knowledge, Usage


class Holdings:
    """Keys that are there, and bytes.

    Args:
        most_keys: how many keys are remembered at most.
        max_bytes: how many bytes there may be; None for no bound.
    """

    def __init__(self, most_keys: int, max_bytes: int | None) -> None:
        self._most_keys = most_keys
        self._max_bytes = max_bytes
        self._keys: set[OffloadKey] = set()
        self._used_bytes: int | None = None
        self._reserved_bytes = 0
        self._listing: Listing | None = None

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_full_of_keys(self) -> bool:
        """Whether no more keys are remembered."""
        return len(self._keys) >= self._most_keys

    def known(self, keys: Sequence[OffloadKey]) -> list[Knowledge]:
        """Say which keys are there. Any thread."""
        there = self._keys
        return [Knowledge.PRESENT if key in there else Knowledge.UNKNOWN for key in keys]

    def usage(self) -> Usage | None:
        """Say how many bytes there are, or None while nothing is known."""
        if self._used_bytes is None:
            return None
        return Usage(self._used_bytes, self._max_bytes)

    def reserve(self, nbytes: int) -> str | None:
        """Take room for a put.

        Returns:
            Why there is none, in one word; None where there is. Then ``settle`` has to follow.
        """
        if self._max_bytes is not None:
            if self._used_bytes is None:
                return "counting"
            if self._used_bytes + self._reserved_bytes + nbytes > self._max_bytes:
                return "max_bytes"
        self._reserved_bytes += nbytes
        return None

    def settle(self, nbytes: int, *, added: bool) -> None:
        """Give back what was reserved; ``added``: a new object takes it now."""
        self._reserved_bytes -= nbytes
        if added:
            self._count(nbytes)

    def found(self, key: OffloadKey) -> None:
        """Learn that a chunk is there."""
        if not self.is_full_of_keys:
            self._keys.add(key)
        if self._listing is not None:
            self._listing.put.add(key)

    def lost(self, keys: Iterable[OffloadKey], nbytes: int = 0) -> list[OffloadKey]:
        """Learn that chunks are gone, which took ``nbytes`` each; return those that were known."""
        named = dict.fromkeys(keys)
        gone = [key for key in named if key in self._keys]
        self._keys.difference_update(gone)
        if self._listing is not None:
            self._listing.put.difference_update(named)
            self._listing.gone.update(named)
        self._count(-nbytes * len(gone))
        return gone

    def forget(self) -> None:
        """Know of no key any more. The bytes are there as before."""
        self._keys = set()
        self._listing = None

    def start_listing(self) -> Listing:
        """Begin to learn anew what is there."""
        self._listing = Listing(self._most_keys)
        return self._listing

    def end_listing(self, listing: Listing) -> list[OffloadKey]:
        """Believe a listing that has come to its end; return the keys that are not there any more.

        One during which everything was forgotten is not believed.
        """
        if listing is not self._listing:
            return []
        self._listing = None
        before = self._keys
        self._keys = set(islice((listing.keys - listing.gone) | listing.put, self._most_keys))
        self._used_bytes = listing.nbytes + listing.added_bytes
        return list(before - self._keys) if len(self._keys) < self._most_keys else []

    def _count(self, nbytes: int) -> None:
        if self._used_bytes is not None:
            self._used_bytes = max(0, self._used_bytes + nbytes)
        if self._listing is not None:
            self._listing.added_bytes += nbytes


class Listing:
    """What a listing has found so far, and what has changed since it began.

    Attributes:
        keys: the chunks that it found.
        nbytes: the bytes of all objects that it found.
        put: chunks that were put or seen meanwhile.
        gone: chunks that were discarded meanwhile.
        added_bytes: bytes that were added and removed meanwhile; the listing may have seen some of them.
    """

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self.keys: set[OffloadKey] = set()
        self.put: set[OffloadKey] = set()
        self.gone: set[OffloadKey] = set()
        self.nbytes = 0
        self.added_bytes = 0

    @property
    def is_full_of_keys(self) -> bool:
        """Whether no more keys are remembered."""
        return len(self.keys) >= self._most_keys

    def add(self, key: OffloadKey | None, nbytes: int) -> None:
        """Take in an object; ``key`` is None where it is no chunk that could be given."""
        self.nbytes += nbytes
        if key is not None and not self.is_full_of_keys:
            self.keys.add(key)
