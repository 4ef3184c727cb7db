"""The chunks and bytes known to be in the bucket without a request.

A listing returns the objects present while it ran. This tier's own puts and discards since then are applied
to it. Other tiers' puts and removals by a lifecycle rule become known with the next listing. So the keys are
a lower bound that may contain expired chunks, and the bytes are approximate.

Changed on the event loop only; any thread may read the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvtier.keys import OffloadKey
from kvtier.tiers import Knowledge, Usage


@dataclass(eq=False)
class Listing:
    """The results of a listing so far, and the changes since it began.

    Attributes:
        keys: chunks it returned.
        nbytes: bytes of all objects it returned.
        put: chunks put or seen meanwhile.
        gone: chunks discarded meanwhile.
        added_bytes: bytes added less bytes removed meanwhile; the listing may include some of them.
        is_of_before: whether the keys were cleared meanwhile, so that the returned keys are useless.
    """

    max_keys: int
    keys: set[OffloadKey] = field(default_factory=set)
    nbytes: int = 0
    put: set[OffloadKey] = field(default_factory=set)
    gone: set[OffloadKey] = field(default_factory=set)
    added_bytes: int = 0
    is_of_before: bool = False

    @property
    def is_full(self) -> bool:
        """Whether no more keys are remembered."""
        return len(self.keys) >= self.max_keys

    def add(self, key: OffloadKey | None, nbytes: int) -> None:
        """Add an object; ``key`` is None if it is not a chunk of this cache."""
        self.nbytes += nbytes
        if key is not None and not self.is_full:
            self.keys.add(key)


class ChunkIndex:
    """Keys of chunks in the bucket, and the bytes that all objects take.

    Args:
        max_keys: how many keys are remembered.
        max_bytes: bound of the bytes; None for none.
    """

    def __init__(self, max_keys: int, max_bytes: int | None) -> None:
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._keys: set[OffloadKey] = set()
        self._used_bytes: int | None = None
        self._reserved_bytes = 0
        self._listing: Listing | None = None

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def known(self, keys: Sequence[OffloadKey]) -> list[Knowledge]:
        """Return which keys are known to be present. Any thread may call this."""
        present = self._keys
        return [Knowledge.PRESENT if key in present else Knowledge.UNKNOWN for key in keys]

    def usage(self) -> Usage | None:
        """Return the bytes in use, or None before the first listing."""
        return None if self._used_bytes is None else Usage(self._used_bytes, self._max_bytes)

    def reserve(self, nbytes: int) -> str | None:
        """Reserve bytes for a put.

        Returns:
            The reason why it is refused; None if it is not, and then ``end_reservation`` must follow.
        """
        if self._max_bytes is not None:
            if self._used_bytes is None:
                return "counting"
            if self._used_bytes + self._reserved_bytes + nbytes > self._max_bytes:
                return "max_bytes"
        self._reserved_bytes += nbytes
        return None

    def end_reservation(self, nbytes: int, *, added: bool) -> None:
        """Release a reservation; ``added`` if a new object takes the bytes now."""
        self._reserved_bytes -= nbytes
        if added:
            self._count(nbytes)

    def add(self, key: OffloadKey) -> None:
        """Record that a chunk is present."""
        if len(self._keys) < self._max_keys:
            self._keys.add(key)
        if self._listing is not None:
            self._listing.put.add(key)

    def remove(self, keys: Iterable[OffloadKey], nbytes: int = 0) -> list[OffloadKey]:
        """Record that chunks of ``nbytes`` each are gone; return those that were known."""
        named = dict.fromkeys(keys)
        gone = [key for key in named if key in self._keys]
        self._keys.difference_update(gone)
        if self._listing is not None:
            self._listing.put.difference_update(named)
            self._listing.gone.update(named)
        self._count(-nbytes * len(gone))
        return gone

    def clear(self) -> None:
        """Forget all keys, including keys of a listing in progress. The bytes remain."""
        self._keys = set()
        if self._listing is not None:
            self._listing.is_of_before = True

    def start_listing(self) -> Listing:
        """Return a new listing."""
        self._listing = Listing(self._max_keys)
        return self._listing

    def finish_listing(self, listing: Listing) -> list[OffloadKey]:
        """Apply a complete listing; return the keys that are gone. After ``clear`` its bytes count alone."""
        if listing is not self._listing:
            return []
        self._listing = None
        self._used_bytes = listing.nbytes + listing.added_bytes
        if listing.is_of_before:
            return []
        before = self._keys
        self._keys = set(islice((listing.keys - listing.gone) | listing.put, self._max_keys))
        return list(before - self._keys) if len(self._keys) < self._max_keys else []

    def _count(self, nbytes: int) -> None:
        if self._used_bytes is not None:
            self._used_bytes = max(0, self._used_bytes + nbytes)
        if self._listing is not None:
            self._listing.added_bytes += nbytes
