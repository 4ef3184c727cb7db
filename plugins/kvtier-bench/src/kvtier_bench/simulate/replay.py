"""A trace against a policy as the core drives it, and against the offline optimum."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import takewhile

from kvtier.keys import OffloadKey
from kvtier.policies import LRU, EvictionPolicy

Requests = Sequence[list[OffloadKey]]
_DEPTH_BITS = 24


def replay(
    policy: EvictionPolicy, requests: Requests, device_hits: Sequence[int], capacity: int
) -> Iterator[tuple[int, int]]:
    """Yield, for each request, how many chunks are loaded and how many are stored.

    A request loads the unbroken run of chunks behind its device hits. Then it stores what is absent, or
    as much from the front as there is room for, since its own chunks are not evicted for it.
    """
    policy.resize(capacity)
    resident: set[OffloadKey] = set()
    for keys, on_device in zip(requests, device_hits, strict=True):
        found = sum(1 for _ in takewhile(resident.__contains__, keys[on_device:]))
        loaded = keys[on_device : on_device + found]
        kept = [key for key in keys[:on_device] + keys[on_device + found :] if key in resident]
        new = [key for key in keys if key not in resident]
        policy.pin(loaded + kept)
        short = len(resident) + len(new) - capacity
        if short > 0:
            evicted = policy.evict(min(short, len(policy)))
            resident.difference_update(evicted)
            del new[len(new) - (short - len(evicted)) :]
        if loaded:
            policy.add(loaded, used=True)
        if kept:
            policy.add(kept, used=False)
        if new:
            policy.add(new, used=False)
            resident.update(new)
        yield found, len(new)


def device_hits(requests: Requests, capacity: int) -> list[int]:
    """Return how many leading chunks of each request a device cache of ``capacity`` chunks has (LRU)."""
    nothing = [0] * len(requests)
    return [found for found, _ in replay(LRU(), requests, nothing, capacity)] if capacity else nothing


def optimum(requests: Requests, device_hits: Sequence[int], capacity: int) -> int:
    """Return how many chunks an oracle would load; no policy loads more.

    Belady's rule with bypass: of the chunks that will be asked for again, those whose next use is nearest
    are kept, but none that the device cache will hold by then.
    """
    next_uses = _next_uses(requests, device_hits)
    kept: set[int] = set()  # next uses: request, and depth in it, so that a prompt's tail goes first
    by_distance: list[int] = []
    loaded = 0
    for index, keys in enumerate(requests):
        first, before = index << _DEPTH_BITS, len(kept)
        kept.difference_update(range(first, first + len(keys)))
        loaded += before - len(kept)
        uses = [use for use in next_uses[index] if use]
        kept.update(uses)
        for use in uses:
            heapq.heappush(by_distance, -use)
        while len(kept) > capacity:
            kept.discard(-heapq.heappop(by_distance))
    return loaded


def _next_uses(requests: Requests, device_hits: Sequence[int]) -> list[list[int]]:
    """Return for each chunk of each request where it is asked of the host next, else 0."""
    following: dict[OffloadKey, int] = {}
    found: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        keys, first, on_device = requests[index], index << _DEPTH_BITS, device_hits[index]
        found.append([following.get(key, 0) for key in keys])
        following.update((key, first + at if at >= on_device else 0) for at, key in enumerate(keys))
    return found[::-1]
