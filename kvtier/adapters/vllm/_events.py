"""KV events: what the core says of chunks that come and go, as vLLM publishes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kvtier._core.kv_events import KVEvent
from kvtier.adapters.vllm._locations import Location

_PRIMARY = Location(Medium.CPU, Locality.LOCAL)
_SOMEWHERE = Location(Medium.STORAGE, None)


class EventStream:
    """Turns changes into events.

    vLLM adds the tokens, the parent and the block size to an event of a chunk that this engine has stored,
    or that it has found in the primary tier for a request. Of a chunk that a fetch has found it knows
    nothing before that. Where events are to describe themselves the news of such a chunk is kept back
    until a request loads it: until then a router knows less than there is, never more.

    Args:
        names: the secondary tiers' names.
        locations: where each of them keeps its chunks; empty where that is not known.
        self_describing: whether events are to describe themselves.
    """

    def __init__(
        self, names: Sequence[str], locations: Sequence[Location] = (), *, self_describing: bool
    ) -> None:
        self._names = names
        self._locations = locations or (_SOMEWHERE,) * len(names)
        self._self_describing = self_describing
        self._loaded: set[OffloadKey] = set()  # since the last call of ``events``
        self._kept_back: dict[OffloadKey, dict[int | None, None]] = {}  # the tiers, None the primary one

    def loaded(self, keys: Collection[OffloadKey]) -> None:
        """Note that a request loads chunks: from now on vLLM can describe them."""
        if self._self_describing:
            self._loaded.update(keys)

    def events(self, changes: Iterable[KVEvent]) -> Iterator[OffloadingEvent]:
        """Yield the events of changes, in their order."""
        for change in changes:
            keys = self._to_be_told(change) if self._self_describing else change.keys
            if keys:
                yield self._event(keys, change.tier, removed=change.removed)
        if self._loaded:
            yield from self._described()

    def _to_be_told(self, change: KVEvent) -> Sequence[OffloadKey]:
        if change.removed:
            return [key for key in change.keys if not self._forget(key, change.tier)]
        told = []
        for key in change.keys:
            if key in self._loaded or not (change.found or key in self._kept_back):
                told.append(key)
            else:
                self._kept_back.setdefault(key, {})[change.tier] = None
        return told

    def _forget(self, key: OffloadKey, tier: int | None) -> bool:
        """Return whether the news of the chunk had been kept back: then there is nothing to take back."""
        tiers = self._kept_back.get(key)
        if tiers is None or tier not in tiers:
            return False
        del tiers[tier]
        if not tiers:
            del self._kept_back[key]
        return True

    def _described(self) -> Iterator[OffloadingEvent]:
        by_tier: dict[int | None, list[OffloadKey]] = {}
        for key in self._loaded & self._kept_back.keys():
            for tier in self._kept_back.pop(key):
                by_tier.setdefault(tier, []).append(key)
        self._loaded.clear()
        for tier, keys in by_tier.items():
            yield self._event(keys, tier, removed=False)

    def _event(self, keys: Sequence[OffloadKey], tier: int | None, *, removed: bool) -> OffloadingEvent:
        location = _PRIMARY if tier is None else self._locations[tier]
        return OffloadingEvent(
            keys=list(keys),
            medium=location.medium,
            removed=removed,
            locality=location.locality,
            ownership=None if tier is None else self._names[tier],
            removal_expected=True,  # every "stored" has its "removed", so vLLM can forget what it knows
        )
