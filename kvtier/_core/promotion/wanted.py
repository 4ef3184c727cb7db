"""Which keys requests still want, and which of several requests wait, load or only locate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtier._core.requests import Request
from kvtier._core.transfers import Transfer
from kvtier.keys import OffloadKey, group_index

Waiters = Mapping[Request, None]


def refresh_wanted(request: Request, windowed: frozenset[int]) -> Iterable[OffloadKey]:
    """Return the wanted keys that may still be found: none that is nowhere, or behind such a key."""
    wanted, absent = dict.fromkeys(request.wanted), request.absent
    if absent.isdisjoint(wanted):
        return wanted
    kept: list[OffloadKey] = []
    gaps: set[int] = set()  # groups that are looked up from the front and end there
    for key in wanted:
        group = group_index(key)
        if key in absent and group not in windowed:
            gaps.add(group)
        if key not in absent and group not in gaps:
            kept.append(key)
    return kept


def of_use(keys: list[OffloadKey], waiters: Waiters, windowed: frozenset[int]) -> list[OffloadKey]:
    """Return the keys that a waiter can still use: every key before them may be found."""
    if not all(request.absent for request in waiters):
        return keys
    useless = set(keys)
    for request in waiters:
        useless &= set(request.wanted).difference(refresh_wanted(request, windowed))
    return [key for key in keys if key not in useless]


def allowed_tiers(waiters: Waiters) -> frozenset[int] | None:
    """Return the tiers that these requests may be served from: the same for each of them."""
    return next(iter(waiters)).tiers


def waiting(transfer: Transfer) -> dict[Request, None]:
    """Return the waiters that can still use an answer."""
    return {request: None for request in transfer.waiters if request.is_waiting}


def loading(waiters: Waiters) -> dict[Request, None]:
    """Return the waiters that load found chunks."""
    return {request: None for request in waiters if not request.locates}
