"""Who may write how many bytes below a root: the arithmetic of the ledger, without its file.

A writer leases bytes before it writes them, and reports what it has written from time to time. What
is leased counts as used, so that all writers together never pass the bound: not when two of them ask
at once, and not when one dies, for the lease of a dead writer counts as written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

LEASE_BYTES: Final = 2**30
"""Bytes leased beyond what is asked for, so that the ledger is asked once for many puts."""

LEASE_SHARE: Final = 8
"""At most one part in so many of the room is leased beyond what is asked for."""

DEFAULT_SHARE: Final = 0.8

MOST: Final = 10**15
"""Stored numbers are less. Sums since the ledger was made may be a thousand times as much."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Bytes of a file system: in all, in use, and free for us."""

    total: int
    used: int
    free: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all writers of a root keep to.

    Attributes:
        max_bytes: bytes below the root; None: ``DEFAULT_SHARE`` of what is free and what it holds.
        min_free: bytes of the file system that stay free.
    """

    max_bytes: int | None
    min_free: int

    def limit(self, used: int, disk: FileSystem) -> int:
        """Return the bytes that may be below a root that holds ``used``."""
        if self.max_bytes is not None:
            return self.max_bytes
        return int(DEFAULT_SHARE * (disk.free + used))


@dataclass(frozen=True, slots=True)
class Mark:
    """A state of the ledger, from which on something is removed.

    Attributes:
        generation: of the ledger.
        counts: how often the root had been counted.
    """

    generation: str
    counts: int


UNKNOWN: Final = Mark("", -1)
"""A moment of which nothing is known."""


@dataclass(frozen=True, slots=True)
class CountStart:
    """The ledger's sums when a count began."""

    generation: str
    added: int
    removed: int
    unconfirmed: int


_Sum = Annotated[int, Meta(ge=-(10**18), lt=10**18)]
_Bytes = Annotated[int, Meta(gt=-MOST, lt=MOST)]
_Count = Annotated[int, Meta(ge=0, lt=MOST)]


class Accounts(msgspec.Struct, rename={"unconfirmed": "supposed"}):
    """What is known of a root's bytes: also the form in which it is stored. Larger numbers are damage.

    Attributes:
        generation: a random word: another one where the ledger was lost and made anew.
        boot: the boot of the machine in which it was last known to be right.
        base: bytes that were there to begin with.
        is_exact: whether ``base`` was counted. Where not, it is all that the file system held: never too
            little.
        added: bytes that were written since, as reported.
        removed: bytes that were removed since, as reported.
        counted_at: when the root was counted last, in seconds since 1970; 0: never.
        leases: bytes that writers which are alive may have written and have not reported, for each.
        unconfirmed: those of the bytes in ``used`` that may not be there: dead writers may have written them,
            or they were removed and a count may have seen it. They take room until the next count, but
            nothing is evicted for them.
        counts: how often the root was counted.
        format: of the file.
    """

    generation: str
    boot: str
    base: _Sum
    is_exact: bool = False
    added: _Sum = 0
    removed: _Sum = 0
    counted_at: Annotated[float, Meta(ge=0, lt=MOST)] = 0.0
    leases: dict[str, _Bytes] = {}
    unconfirmed: _Count = 0
    counts: _Count = 0
    format: Literal[1] = 1

    @property
    def mark(self) -> Mark:
        """The mark for the bytes that are removed from now on."""
        return Mark(self.generation, self.counts)

    @property
    def used(self) -> int:
        """Bytes below the root, as reported."""
        return max(0, self.base + self.added - self.removed)

    @property
    def leased(self) -> int:
        """Bytes that writers may have added, or may still add, under their leases."""
        return sum(self.leases.values())

    @property
    def charged(self) -> int:
        """Bytes that count against the bound: ``used`` and ``leased``."""
        return self.used + self.leased

    def report(self, writer: str, spent: int, generation: str) -> None:
        """Take in what a writer has added since its last report, out of its lease.

        Args:
            writer: who.
            spent: bytes; negative where it has removed some again.
            generation: that of the ledger that the writer has its lease from.
        """
        if writer in self.leases:
            self.leases[writer] -= spent
            self.added += spent
        elif generation != self.generation:
            self.added += spent  # perhaps it is in the base already: too much, never too little
        # Else the writer was taken for dead, and all that it had leased counts as written.

    def grant(self, writer: str, least: int, room: int, held: int, unit: int) -> int:
        """Lease bytes out of ``room``: ``least`` and some more, or what there is and is of use.

        Args:
            writer: who asks.
            least: bytes that it asks for.
            room: bytes that may be leased.
            held: bytes of its lease that it has left.
            unit: what it takes at once.
        """
        if room >= least:
            granted = least + min(LEASE_BYTES, (room - least) // LEASE_SHARE)
        else:
            granted = max(0, (held + room) // unit * unit - held)
        self.leases[writer] = self.leases.get(writer, 0) + granted
        return granted

    def grant_ahead(self, writer: str, room: int, held: int) -> int:
        """Lease bytes that nobody has asked for yet, beside ``held`` that are left: as ``grant`` would."""
        granted = max(0, min(LEASE_BYTES, room // LEASE_SHARE) - held)
        self.leases[writer] = self.leases.get(writer, 0) + granted
        return granted

    def give_back(self, writer: str, unspent: int) -> None:
        """Return a part of a lease."""
        if writer in self.leases:
            self.leases[writer] -= unspent

    def expire_leases(self, dead: Iterable[str]) -> None:
        """End the leases of writers that are dead: what they had may all have been written."""
        for writer in dead:
            left = max(0, self.leases.pop(writer, 0))
            self.added += left
            self.unconfirmed += left

    def remove(self, nbytes: int, since: Mark) -> None:
        """Take in that bytes were removed.

        A count that has ended since then, or the base of a new ledger, may be without them already. Taken
        away once more they would be a hole in the bound, so they take room until the next count.

        Args:
            nbytes: how many.
            since: a moment before the first of them was removed.
        """
        if since == self.mark:
            self.removed += nbytes
        else:
            self.unconfirmed += nbytes

    def begin_count(self) -> CountStart:
        """Return the sums before the root is counted."""
        return CountStart(self.generation, self.added, self.removed, self.unconfirmed)

    def end_count(self, start: CountStart, counted: int, now: float) -> None:
        """Take in a count, which has seen some of what was written and removed meanwhile.

        What was there when it ended is between ``counted`` less all that was removed and ``counted``
        and all that was written meanwhile. Within these the reports know better; what is beyond them
        is proven wrong, and the most that can be there takes its place.
        """
        if start.generation != self.generation:
            return
        least = counted - (self.removed - start.removed)
        most = counted + (self.added - start.added)
        if not self.is_exact or not least <= self.used <= most:
            self.base = most - self.added + self.removed
        self.is_exact = True
        self.unconfirmed -= min(self.unconfirmed, start.unconfirmed)
        self.counts += 1
        self.counted_at = now


def room_for(accounts: Accounts, bounds: Bounds, disk: FileSystem) -> tuple[int, int]:
    """Return the bytes that may be leased by each of the two bounds: of the root, of the file system."""
    below_limit = bounds.limit(accounts.used, disk) - accounts.charged
    above_free = disk.free - bounds.min_free - accounts.leased
    return below_limit, above_free


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of what a root may hold: eviction begins above ``high`` and ends at ``low``."""

    high: float
    low: float

    def excess(
        self, accounts: Accounts, bounds: Bounds, disk: FileSystem, wanted: int = 0, unit: int = 0
    ) -> int:
        """Return the bytes that should be evicted now, 0 for none.

        Args:
            accounts: the ledger.
            bounds: the bounds.
            disk: the file system.
            wanted: bytes that were asked for and could not be leased.
            unit: the least of them that are of any use.
        """
        if not accounts.is_exact:
            return 0  # all that the file system holds is no measure of what may be evicted
        if accounts.unconfirmed:
            accounts = msgspec.structs.replace(accounts, added=accounts.added - accounts.unconfirmed)
        reachable = min(bounds.limit(accounts.used, disk), accounts.used + disk.free - bounds.min_free)
        if not wanted and accounts.charged <= self.high * reachable:
            return 0
        # One batch must not empty a small root, and a root of few chunks must get room for one.
        wanted = min(wanted, max(unit, int((1 - self.low) * reachable)))
        room = min(room_for(accounts, bounds, disk))
        return max(0, math.ceil(accounts.charged - self.low * reachable), wanted - room)
