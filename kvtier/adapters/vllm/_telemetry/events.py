"""Where tiers keep their chunks, in vLLM's words, and the KV events that vLLM publishes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey, TierFilter

from kvtier._core.kv_events import KVEvent
from kvtier.tiers._base import SecondaryTier

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import _OffloadEventMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
    from vllm.v1.request import Request


class Location(NamedTuple):
    """The place of a tier's chunks. A locality of None is unknown, and matches every filter."""

    medium: Medium
    locality: Locality | None


_PRIMARY = Location(Medium.CPU, Locality.LOCAL)
_SOMEWHERE = Location(Medium.STORAGE, None)
_LOCATIONS = {
    "memory": Location(Medium.CPU, Locality.LOCAL),
    "disk": Location(Medium.STORAGE, None),  # its directory may be a mount of another machine's
    "remote": Location(Medium.STORAGE, Locality.REMOTE),
}


def location_of(tier: SecondaryTier[Any]) -> Location:
    """Return where a tier keeps its chunks: by its kind, unless its settings name it."""
    location = _LOCATIONS[tier.medium]
    locality = tier.config.locality
    return location if locality is None else Location(location.medium, Locality(locality))


def allowed_tiers(wanted: TierFilter, locations: Sequence[Location]) -> frozenset[int] | None:
    """Return the tiers that a request's filter allows; None for all of them.

    The primary tier is not filtered: each of its chunks is a hit, wherever it came from.
    """
    if wanted is TierFilter.ALL:
        return None
    allowed = frozenset(tier for tier, location in enumerate(locations) if wanted.allows(*location))
    return None if len(allowed) == len(locations) else allowed


class EventStream:
    """Turns changes into events. A parent is never told after its child.

    vLLM adds tokens, parent and block size to the event of a chunk if this engine has stored the chunk or
    found it in the primary tier for a request. It cannot describe a chunk that a fetch has just found. If
    events are to describe themselves, the news of such a chunk waits until a request loads it.
    """

    def __init__(
        self, names: Sequence[str], locations: Sequence[Location] = (), *, self_describing: bool
    ) -> None:
        self._names = names
        self._locations = locations or (_SOMEWHERE,) * len(names)
        self._self_describing = self_describing
        self._describable: dict[OffloadKey, None] = {}  # since the last call of ``events``, parents first
        self._deferred: dict[OffloadKey, dict[int | None, None]] = {}  # the tiers, None the primary one

    def loaded(self, keys: Collection[OffloadKey]) -> None:
        """Note that a request loads chunks, in the order of its prompt: from now on vLLM describes them."""
        if self._self_describing:
            self._describable.update(dict.fromkeys(keys))

    def events(self, changes: Iterable[KVEvent]) -> Iterator[OffloadingEvent]:
        """Yield the events of changes, in their order; then those that waited, in the order of prompts."""
        for change in changes:
            keys = self._publishable(change) if self._self_describing else change.keys
            if keys:
                yield self._event(keys, change.tier, removed=change.removed)
        by_tier: dict[int | None, list[OffloadKey]] = {}
        for key in self._describable:
            for tier in self._deferred.pop(key, ()):
                by_tier.setdefault(tier, []).append(key)
        self._describable.clear()
        for tier, keys in by_tier.items():
            yield self._event(keys, tier, removed=False)

    def _publishable(self, change: KVEvent) -> Sequence[OffloadKey]:
        if change.removed:
            return [key for key in change.keys if not self._withdraw(key, change.tier)]
        if change.tier is None and not change.found:  # stored by this engine
            self._describable.update(dict.fromkeys(change.keys))
            return change.keys
        keys = []
        for key in change.keys:
            if change.found or key in self._deferred:
                self._deferred.setdefault(key, {})[change.tier] = None
            else:
                keys.append(key)
        return keys

    def _withdraw(self, key: OffloadKey, tier: int | None) -> bool:
        """Take back the news of a chunk that waits; return whether there was one."""
        tiers = self._deferred.get(key)
        if tiers is None or tier not in tiers:
            return False
        del tiers[tier]
        if not tiers:
            del self._deferred[key]
        return True

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


class ChunkEvents(OffloadingEventsTracker):
    """Describes each chunk as one block with its extra keys: only whole chunks can be loaded.

    vLLM's tracker, whose place it takes, names the blocks of a chunk one by one, without extra keys.
    """

    def __init__(self, tracker: OffloadingEventsTracker) -> None:
        self.__dict__.update(vars(tracker))
        self._looked_up: set[OffloadKey] = set()  # described for a lookup since the last events

    def record_lookup(
        self, req: Request, group_config: GroupOffloadConfig, chunk_idx: int, offload_key: OffloadKey
    ) -> None:
        is_known = offload_key in self._pending_event_metadata
        super().record_lookup(req, group_config, chunk_idx, offload_key)
        if not is_known and offload_key in self._pending_event_metadata:
            self._looked_up.add(offload_key)

    def take_events(self, events: Iterable[OffloadingEvent]) -> Iterator[KVCacheEvent]:
        """See vLLM. Forgets chunks that were looked up and not announced: no event follows their eviction."""
        events = list(events)
        yield from super().take_events(events)
        for key in self._looked_up.difference(*(event.keys for event in events if not event.removed)):
            self._pending_event_metadata.pop(key, None)
        self._looked_up.clear()

    def _build_event_metadata(
        self, req: Request, group_config: GroupOffloadConfig, chunk_idx: int
    ) -> _OffloadEventMetadata:
        metadata = super()._build_event_metadata(req, group_config, chunk_idx)
        _describe_as_one(metadata, req, chunk_idx * group_config.tokens_per_chunk)
        return metadata

    def _record_partial_tail(
        self, req: Request, group_config: GroupOffloadConfig, boundary_tokens: int, offload_key: OffloadKey
    ) -> None:
        super()._record_partial_tail(req, group_config, boundary_tokens, offload_key)
        if (metadata := self._pending_event_metadata.get(offload_key)) is not None:
            _describe_as_one(metadata, req, boundary_tokens - len(metadata.token_ids))


def _describe_as_one(metadata: _OffloadEventMetadata, request: Request, begin: int) -> None:
    """Describe the tokens from ``begin`` on as one block, as vLLM does for blocks of the device."""
    metadata.block_hashes = metadata.block_hashes[-1:]
    metadata.block_size = len(metadata.token_ids)
    extra_keys, _ = generate_block_hash_extra_keys(request, begin, begin + metadata.block_size, 0)
    metadata.extra_keys = (extra_keys,)
