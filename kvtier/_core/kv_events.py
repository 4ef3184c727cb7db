"""KV events: chunks that became available in a tier, or left it.

A subscriber never overestimates a tier. Each chunk of a secondary tier is announced once and removed once.
Announced chunks are remembered, up to a limit. Beyond it the oldest ones are announced as removed, though the
tier may still have them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier._core.messages import Event, ProcessEnded, Removed, TierDown, TierUp
from kvtier.keys import OffloadKey

MOST_REMOVED = 32_768
"""A removal of more chunks has no keys, and concerns the whole tier."""


class EventQueue(deque[Event]):
    """The events of tiers on their way to the core, whose owner may sleep. It is bounded: no kind piles up.

    At most ``most_removed`` keys wait to be removed. A removal beyond that has no keys and concerns the whole
    tier; while it waits, later removals of the tier add nothing to it. For each tier, only the newest
    ``TierDown`` waits, and a newer ``TierUp``. They follow older events of the tier: a subscriber must not
    believe in chunks that the tier lost when it went down. Any thread may append.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most_removed = MOST_REMOVED
        self._cleared: set[int] = set()  # tiers whose removal without keys waits
        self._removed = 0
        self._newest: dict[tuple[type[Event], int | str], Event] = {}  # those that may be replaced

    def append(self, event: Event) -> None:
        if isinstance(event, Removed):
            if event.tier in self._cleared:
                return
            self._removed = len(event.keys) + (self._removed if self else 0)
            if self._removed > self.most_removed:
                self._cleared.add(event.tier)
                event = Removed(event.tier, ())
        elif isinstance(event, TierDown | TierUp):
            self._withdraw(TierUp, event.tier)
            if isinstance(event, TierDown):
                self._withdraw(TierDown, event.tier)
            self._newest[type(event), event.tier] = event
        elif isinstance(event, ProcessEnded):
            if isinstance(earlier := self._withdraw(ProcessEnded, event.reason), ProcessEnded):
                event = ProcessEnded(event.reason, earlier.times + event.times)
            self._newest[ProcessEnded, event.reason] = event
        super().append(event)

    def _withdraw(self, kind: type[Event], subject: int | str) -> Event | None:
        """Remove the newest event of its kind and return it; None if the core has it."""
        event = self._newest.pop((kind, subject), None)
        try:
            self.remove(event)  # type: ignore[arg-type]
        except (ValueError, IndexError):  # taken by the core: before this call, or during it
            return None
        return event

    def popleft(self) -> Event:
        event = super().popleft()
        if isinstance(event, Removed):  # first: later removals count again
            self._cleared.discard(event.tier)
        return event


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Chunks that became available in a tier, or left it."""

    keys: Sequence[OffloadKey]
    tier: int | None  # None for the primary one
    removed: bool
    found: bool = False  # by a get: another engine, or an earlier run, stored them


class KVEventLog:
    """Changes to publish; it remembers ``limit`` chunks of each tier. If disabled, it records nothing."""

    def __init__(self, tiers: int, limit: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self._limit = limit
        self._changes: list[KVEvent] = []
        self._announced: list[OrderedDict[OffloadKey, None]] = [OrderedDict() for _ in range(tiers)]

    def stored(self, keys: Iterable[OffloadKey], tier: int | None = None, *, found: bool = False) -> None:
        """Announce that chunks are there."""
        if self.enabled:
            new = keys if tier is None else self._enter(tier, keys)
            self._note(KVEvent(tuple(new), tier, removed=False, found=found))

    def removed(self, keys: Sequence[OffloadKey], tier: int | None = None) -> None:
        """Announce that chunks have left; of a secondary tier only announced ones."""
        if self.enabled:
            announced = None if tier is None else self._announced[tier]
            gone = keys if announced is None else [key for key in keys if announced.pop(key, key) is None]
            self._note(KVEvent(tuple(gone), tier, removed=True))

    def clear(self, tier: int) -> None:
        """Announce that all chunks of a secondary tier have left."""
        gone, self._announced[tier] = tuple(self._announced[tier]), OrderedDict()
        self._note(KVEvent(gone, tier, removed=True))

    def take_events(self) -> list[KVEvent]:
        """Return and clear the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _note(self, change: KVEvent) -> None:
        if change.keys:
            self._changes.append(change)

    def _enter(self, tier: int, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Remember chunks that were not announced before, up to the bound; return them."""
        announced = self._announced[tier]
        new = [key for key in keys if key not in announced][: self._limit]
        over = len(announced) + len(new) - self._limit
        if over > 0:
            oldest = tuple(announced.popitem(last=False)[0] for _ in range(over))
            self._note(KVEvent(oldest, tier, removed=True))
        announced.update(dict.fromkeys(new))
        return new
