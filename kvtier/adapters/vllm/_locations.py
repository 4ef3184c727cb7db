"""Where tiers keep their chunks, in vLLM's words, and which of them a request may be served from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import Locality, Medium, TierFilter

from kvtier.tiers._base import SecondaryTier


class Location(NamedTuple):
    """Where a tier keeps its chunks. A locality of None is not known, and matches every filter."""

    medium: Medium
    locality: Locality | None


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

    The primary tier is not filtered: what is there is a hit, wherever it came from.
    """
    if wanted is TierFilter.ALL:
        return None
    allowed = frozenset(tier for tier, location in enumerate(locations) if wanted.allows(*location))
    return None if len(allowed) == len(locations) else allowed
