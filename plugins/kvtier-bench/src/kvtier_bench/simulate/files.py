"""Simulates the file tier's eviction on a trace.

It uses the tier's own planning and learning, with ages instead of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from random import Random
from typing import Final

from kvtier.keys import OffloadKey
from kvtier.tiers.fs import FsConfig
from kvtier.tiers.fs._maintenance import ages
from kvtier.tiers.fs._maintenance.maintenance import TICK_S
from kvtier.tiers.fs._maintenance.uses import WAITING, Uses
from kvtier_bench.simulate.replay import Requests

FILES: Final = "fs"
REQUEST_US: Final = 300_000  # between two requests, as in Mooncake's conversation trace
_TICK_REQUESTS: Final = int(TICK_S * 1e6 / REQUEST_US)

_HIGH: Final = FsConfig.model_fields["high_watermark"].default
_LOW: Final = FsConfig.model_fields["low_watermark"].default

_Files = dict[OffloadKey, tuple[int, int]]
"""The last use of each chunk, in microseconds, and its class, as its file records them."""


def replay_files(requests: Requests, device_hits: Sequence[int], capacity: int) -> Iterator[tuple[int, int]]:
    """Yield, for each request, how many chunks are loaded and how many are put."""
    files: _Files = {}
    now_us = 0
    uses, random = Uses(lambda: now_us / 1e6), Random(0)
    uses.room = capacity
    for index, (keys, on_device) in enumerate(zip(requests, device_hits, strict=True)):
        now_us = index * REQUEST_US
        found = sum(1 for _ in takewhile(files.__contains__, keys[on_device:]))
        put = [key for key in keys if key not in files]
        uses.note([key for key in keys if key in files], in_order=True)
        uses.note_put(put)
        files.update((key, (now_us, 0)) for key in put)
        is_full = len(files) > _HIGH * capacity
        if is_full or index % _TICK_REQUESTS == 0:
            _publish(uses, files, now_us)
        if is_full:
            _make_room(files, len(files) - int(_LOW * capacity), now_us, uses.worth(), random)
        yield found, len(put)


def _publish(uses: Uses, files: _Files, now_us: int) -> None:
    for key, class_ in uses.take_unpublished(WAITING):
        if key in files:
            files[key] = (now_us, max(class_, files[key][1]))


def _make_room(files: _Files, need: int, now_us: int, worth: ages.Worth, random: Random) -> None:
    """Remove the chunks of a plan, in the random order in which directories are visited."""
    histogram = ages.new_histogram()
    cells = {key: class_ * ages.BUCKETS + ages.bucket_of(now_us - us) for key, (us, class_) in files.items()}
    for cell in cells.values():
        histogram[cell] += 1
    leaving = ages.plan(histogram, 1.0, need, worth)
    old = [key for key, cell in cells.items() if leaving[cell]]
    random.shuffle(old)
    for key in old[:need]:
        del files[key]
