"""The arithmetic of the ledger, without its file: the bytes that each writer may write below a root.

A writer leases bytes before it writes them, and reports the bytes written when the lease ends. Leased bytes
count as used, and a dead writer's lease as written, so all writers together keep the bound.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvtier._settings.quantities import bytes_of
from kvtier.tiers.fs._config import FsConfig

DEFAULT_SHARE: Final = 0.8
DEFAULT_FREE: Final = "16%"  # above the 10 and 15 % at which the kubelet evicts pods by default
LOWERED_EVERY_S: Final = 5.0
PROBED_EVERY_S: Final = 60.0
MAX_STORED: Final = 10**18  # Bound of stored numbers, including the file system's. Sums may be larger.


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Bytes of a file system; ``free`` ones are available to this user."""

    total: int
    used: int
    free: int


_Sum = Annotated[int, Meta(ge=0, lt=2**63 - 1)]
_Bytes = Annotated[int, Meta(ge=0, lt=MAX_STORED)]


def _new_mark() -> str:
    return secrets.token_hex(8)


class Accounts(msgspec.Struct):
    """A root's bytes in their stored form. Numbers out of bounds mean damage."""

    used: _Bytes  # Bytes below the root. Before ``is_exact``, those of the whole file system: never too few.
    boot: str = ""  # the machine's boot ID when the numbers were last right
    is_exact: bool = False  # whether the root was counted
    added: _Sum = 0  # bytes ever written, to compare with an earlier sum
    removed: _Sum = 0  # bytes ever removed
    counted_at: Annotated[float, Meta(ge=0, lt=MAX_STORED)] = 0.0  # Unix time of the last count; 0: never
    leases: dict[str, _Bytes] = {}  # leased bytes of each living writer
    # Bytes of ``used`` that may not exist: leased by dead writers, or removed during a count. They take room
    # until the next count, but cause no eviction.
    unconfirmed: _Bytes = 0
    others: _Bytes = 0  # bytes of the file system outside the root, at the last count
    count_s: Annotated[float, Meta(ge=0, lt=MAX_STORED)] = 0.0  # duration of that count
    mark: str = msgspec.field(default_factory=_new_mark)  # random, new after each count
    format: Literal[2] = 2

    @property
    def leased(self) -> int:
        return sum(self.leases.values())

    @property
    def removals(self) -> tuple[str, int]:
        """A value that changes with each removal."""
        return self.mark, self.removed + self.unconfirmed

    def add(self, nbytes: int) -> None:
        self.used += nbytes
        self.added += nbytes

    def remove(self, nbytes: int, since: str) -> None:
        """Subtract bytes that were removed since ``mark`` was ``since``.

        A count that ended since then, or a new ledger, may exclude them already. Subtracting them twice would
        break the bound, so then they take room until the next count.
        """
        if since == self.mark:
            self.used = max(0, self.used - nbytes)
            self.removed += nbytes
        else:
            self.unconfirmed += nbytes

    def expire_leases(self, dead: Iterable[str]) -> None:
        """End the leases of dead writers, and count their bytes as written, because they may have been."""
        for writer in dead:
            left = self.leases.pop(writer, 0)
            self.add(left)
            self.unconfirmed += left

    def is_contradicted(self, disk: FileSystem) -> bool:
        """Return whether enough has left the file system for half of the root to be gone."""
        return self.is_exact and 2 * (self.others + self.used - disk.used) > max(self.used, 1)

    def end_count(self, start: Accounts, counted: int, now: float, disk: FileSystem, took_s: float) -> None:
        """Apply a count, which has seen some of the writes and removals since ``start``.

        The true sum is between ``counted`` minus all removals and ``counted`` plus all writes since then. A
        sum outside this range is wrong: the upper end replaces it.
        """
        if start.mark != self.mark:
            return
        least = counted - (self.removed - start.removed)
        most = counted + (self.added - start.added)
        if not self.is_exact or not least <= self.used <= most:
            self.used = most
        self.is_exact = True
        self.unconfirmed -= min(self.unconfirmed, start.unconfirmed)
        self.counted_at, self.mark, self.count_s = now, _new_mark(), took_s
        self.others = max(0, disk.used - self.used)


class Bounds:
    """The bounds of a root, by this writer's settings."""

    def __init__(self, config: FsConfig) -> None:
        self._config = config
        # Assumed limit of a quota that statvfs does not show; None until a write is refused.
        self.hidden: int | None = None
        self._moved_s = -math.inf  # when ``hidden`` changed

    def limit(self, used: int, disk: FileSystem) -> int:
        limit = self._config.max_bytes
        if limit is None:
            limit = int(DEFAULT_SHARE * (disk.free + used))
        return limit if self.hidden is None else min(limit, self.hidden)

    def lower(self, accounts: Accounts, disk: FileSystem, unit: int, now_s: float) -> bool:
        """Lower the assumed limit to the root's bytes after a refused write. Return whether it was lowered.

        Removed space may be free only later, so several failures in a row lower it once.
        """
        held = accounts.used + accounts.leased
        is_visible = self.above_free(disk) < unit
        if is_visible or not accounts.is_exact or now_s - self._moved_s < LOWERED_EVERY_S:
            return False
        self.hidden, self._moved_s = held if self.hidden is None else min(held, self.hidden), now_s
        return True

    def probe(self, unit: int, now_s: float) -> None:
        """Raise the assumed limit a little at intervals: the quota may have been raised."""
        if self.hidden is not None and now_s - self._moved_s >= PROBED_EVERY_S:
            self.hidden, self._moved_s = self.hidden + max(unit, self.hidden // 64), now_s

    def above_free(self, disk: FileSystem) -> int:
        """Return the bytes that may be written until only ``min_free_bytes`` are free."""
        kept = self._config.min_free_bytes
        return disk.free - bytes_of(DEFAULT_FREE if kept is None else kept, disk.total)

    def room(self, accounts: Accounts, disk: FileSystem) -> tuple[int, int]:
        """Return the bytes that may be leased, by the root's bound and by the file system's."""
        below_limit = self.limit(accounts.used, disk) - accounts.used - accounts.leased
        return below_limit, self.above_free(disk) - accounts.leased

    def excess(self, accounts: Accounts, disk: FileSystem, wanted: int = 0, unit: int = 0) -> int:
        """Return the bytes to evict now; ``wanted`` could not be leased, in units of ``unit``."""
        if not accounts.is_exact:
            return 0  # an estimate must not cause evictions
        used, leased = max(0, accounts.used - accounts.unconfirmed), accounts.leased
        limit = self.limit(used, disk)
        low, above_free = self._config.low_watermark, self.above_free(disk)
        reachable = min(limit, used + above_free)
        if not wanted and used + leased <= self._config.high_watermark * reachable:
            return 0
        # One batch must not empty a small root, but a root of few chunks needs room for one.
        wanted = min(wanted, max(unit, int((1 - low) * reachable)))
        room = min(limit - used, above_free) - leased
        return max(0, math.ceil(used + leased - low * reachable), wanted - room)
