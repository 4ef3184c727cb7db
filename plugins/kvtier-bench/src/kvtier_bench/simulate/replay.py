"""Replays a trace against a policy, as the core drives it, and against the offline optimum."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import takewhile

from kvtier.keys import OffloadKey
from kvtier.policies import LRU, EvictionPolicy, Run

Requests = Sequence[list[OffloadKey]]
_DEPTH_BITS = 24


def replay(
    policy: EvictionPolicy, requests: Requests, device_hits: Sequence[int], capacity: int, step: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield, for each request, how many chunks are loaded and how many are stored.

    A request loads the unbroken run of chunks behind its device hits. Then it stores the missing chunks, or
    only the leading ones if there is no room for all, because its own chunks are not evicted for it. ``step``
    is the number of chunks stored at once, 0 for all. Chunks stored earlier may be evicted between two steps.
    """
    policy.resize(capacity)
    resident: dict[OffloadKey, Run] = {}  # the run that used each chunk last
    uses = 0
    for keys, on_device in zip(requests, device_hits, strict=True):
        places = {key: place for place, key in enumerate(keys)}
        run = Run(uses := uses + len(keys), places.__getitem__)
        found = sum(1 for _ in takewhile(resident.__contains__, keys[on_device:]))
        loaded = keys[on_device : on_device + found]
        kept = [key for key in keys[:on_device] + keys[on_device + found :] if key in resident]
        for part, used in (loaded, True), (kept, False):
            policy.pin(part)
            policy.add_run(run, part, used=used)
            resident.update(dict.fromkeys(part, run))
        new = [key for key in keys if key not in resident]
        size, stored = step or len(new) or 1, 0
        for first in range(0, len(new), size):
            part = new[first : first + size]
            _make_room(policy, resident, len(resident) + len(part) - capacity, run)
            part = part[: max(0, capacity - len(resident))]
            policy.add_run(run, part, used=False)
            resident.update(dict.fromkeys(part, run))
            stored += len(part)
        yield found, stored


def _make_room(policy: EvictionPolicy, resident: dict[OffloadKey, Run], short: int, run: Run) -> None:
    """Evict as many chunks as are needed, but none of a run, as the core does."""
    spared: list[OffloadKey] = []
    while short > 0 and len(policy):
        evicted = policy.evict(min(short, len(policy)))
        mine = [key for key in evicted if resident[key] is run]
        spared += mine
        for key in set(evicted).difference(mine):
            del resident[key]
        short -= len(evicted) - len(mine)
    policy.add_run(run, spared[::-1], used=False)


def device_hits(requests: Requests, capacity: int) -> list[int]:
    """Return how many leading chunks of each request an LRU device cache of ``capacity`` chunks holds."""
    nothing = [0] * len(requests)
    return [found for found, _ in replay(LRU(), requests, nothing, capacity)] if capacity else nothing


def optimum(requests: Requests, device_hits: Sequence[int], capacity: int) -> int:
    """Return the number of chunks that an oracle would load. No policy loads more.

    Belady's rule with bypass: of the chunks that will be requested again, those with the nearest next use are
    kept. Chunks that the device cache will hold by then are not.
    """
    next_uses = _next_uses(requests, device_hits)
    # Next uses, by request and by depth in the prompt, so that a prompt's tail is evicted first.
    kept: set[int] = set()
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
    """Return, for each chunk of each request, its next use that reaches the host, or 0 if there is none."""
    following: dict[OffloadKey, int] = {}
    found: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        keys, first, on_device = requests[index], index << _DEPTH_BITS, device_hits[index]
        found.append([following.get(key, 0) for key in keys])
        following.update((key, first + at if at >= on_device else 0) for at, key in enumerate(keys))
    return found[::-1]
