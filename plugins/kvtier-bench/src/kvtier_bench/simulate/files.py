"""A trace against the file tier's eviction: its own planning, over ages instead of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from random import Random
from typing import Final

from kvtier.keys import OffloadKey
from kvtier.tiers.fs import FsConfig
from kvtier.tiers.fs._maintenance import ages
from kvtier.tiers.fs._maintenance.recency import Recency
from kvtier_bench.simulate.replay import Requests

FILES: Final = "fs"
REQUEST_US: Final = 300_000  # between two requests, as in Mooncake's conversation trace

_HIGH: Final = FsConfig.model_fields["high_watermark"].default
_LOW: Final = FsConfig.model_fields["low_watermark"].default

_Uses = dict[OffloadKey, tuple[int, bool]]
"""When each chunk was used last, in microseconds, and whether that was after it was written."""


def replay_files(requests: Requests, device_hits: Sequence[int], capacity: int) -> Iterator[tuple[int, int]]:
    """Yield, for each request, how many chunks are loaded and how many are put.

    Times of use are known to the request; files have them every ``TOUCH_EVERY_S`` only.
    """
    files: _Uses = {}
    recency, random = Recency(), Random(0)
    for index, (keys, on_device) in enumerate(zip(requests, device_hits, strict=True)):
        now_us = index * REQUEST_US
        found = sum(1 for _ in takewhile(files.__contains__, keys[on_device:]))
        put = [key for key in keys if key not in files]
        files.update((key, (now_us, key in files)) for key in keys)
        recency.note_put(put, capacity)
        files.update((key, (now_us, True)) for key in recency.take())
        if len(files) > _HIGH * capacity:
            _make_room(files, len(files) - int(_LOW * capacity), now_us, random)
        yield found, len(put)


def _make_room(files: _Uses, need: int, now_us: int, random: Random) -> None:
    """Remove what a plan says, in the random order in which directories are visited."""
    histogram = ages.new_histogram()
    for used_us, reused in files.values():
        histogram[ages.bucket_of(now_us - used_us) + (ages.BUCKETS if reused else 0)] += 1
    cutoffs = ages.plan(histogram, 1.0, need)
    old = [
        key
        for key, (used_us, reused) in files.items()
        if now_us - used_us >= (cutoffs.reused_us if reused else cutoffs.once_us)
    ]
    random.shuffle(old)
    for key in old[:need]:
        del files[key]
