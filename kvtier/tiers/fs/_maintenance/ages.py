"""Plans which chunks to evict, without a disk.

Chunks with the lowest hit density leave first: they have the fewest expected hits per time that they occupy
space, by use count and age. Each process learns it from its own uses (see ``kvtier.policies._reuse``).

Sorting a million files would hold the interpreter for a second. So their bytes are summed in cells: by class
of use counts, and by age in buckets that are a 256th as wide as they are old. A plan marks cells to evict.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from functools import cache
from typing import Final, TypeAlias

from kvtier.policies._reuse import MAX_USES, ReuseModel

CLASSES: Final = 5
CLASS_OF_USES: Final = (0, 0, 1, 2, 2, *[3] * 11, *[4] * (MAX_USES - 15))
"""Class of each use count, which a chunk's file stores; see ``kvt_class``."""

UNIT_US: Final = 1_000_000  # the model's unit of age, in microseconds

_PRIORS: Final = (1.0, 2.0, 3.0, 8.0, 20.0)
_HINT: Final = 1e-9  # weight of a prior after something was learned
_BINS: Final = 48  # the last bin begins at 80 days

_SUB_BITS: Final = 8
_SUB: Final = 1 << _SUB_BITS
_AGE_BITS: Final = 50  # 35 years in microseconds
BUCKETS: Final = (_AGE_BITS - _SUB_BITS + 1) * _SUB

Histogram: TypeAlias = "array[int]"
"""Bytes of chunks by cell: by age, class after class. The native library adds them up."""

Worth: TypeAlias = list[list[float]]
"""Hit density by class, and by age in the model's bins."""

Plan: TypeAlias = bytearray
"""Whether to evict the chunks of each cell. The native library reads it."""


def new_model() -> ReuseModel:
    """Return an untrained model, which keeps chunks used more often and more recently."""
    return ReuseModel(_PRIORS, _BINS)


def new_histogram() -> Histogram:
    return array("Q", bytes(8 * CLASSES * BUCKETS))


def bucket_of(age_us: int) -> int:
    """Return the bucket of an age, as scan.c does."""
    age = min(max(age_us, 0), (1 << _AGE_BITS) - 1)
    shift = max(0, age.bit_length() - _SUB_BITS - 1)
    return (shift << _SUB_BITS) + (age >> shift)


def youngest_of(bucket: int) -> int:
    """Return the least age of a bucket, in microseconds: the inverse of ``bucket_of``."""
    shift = max(0, (bucket >> _SUB_BITS) - 1)
    return (bucket - (shift << _SUB_BITS)) << shift


def worth_of(model: ReuseModel, lag_s: float = 0.0) -> Worth:
    """Return the value of keeping chunks; their last use may be up to ``lag_s`` later than in their files."""
    worth = []
    for class_, densities in enumerate(zip(model.density, new_model().density, strict=True)):
        # Cells without data, as after a restart, are ranked by the prior.
        known = [learned + _HINT * by_prior for learned, by_prior in zip(*densities, strict=True)]
        lag_us = lag_s * 1e6 if class_ else 0.0
        youngest = [model.bin_of((youngest_of(first) - lag_us) / UNIT_US) for first in _bins()[:-1]]
        worth.append([max(known[young : bin_ + 1]) for bin_, young in enumerate(youngest)])
    return worth


def plan(histogram: Histogram, share: float, need_bytes: int, worth: Worth) -> Plan:
    """Return a plan that evicts ``need_bytes``, or everything if there is less.

    The histogram is a sample with ``share`` of all chunks. The plan includes empty cells that rank below
    the last evicted one: unsampled chunks may be there.
    """
    left = need_bytes * share
    last = None
    found = [(*_rank(cell, worth), nbytes) for cell, nbytes in enumerate(histogram) if nbytes]
    for least, minus_age_us, nbytes in sorted(found):
        if left <= 0:
            break
        left -= nbytes
        last = least, -minus_age_us
    return bytearray(CLASSES * BUCKETS) if last is None else _up_to(*last, worth)


def _rank(cell: int, worth: Worth) -> tuple[float, int]:
    """Return the sort key of a cell: the lowest value leaves first, and among equals the oldest."""
    class_, bucket = divmod(cell, BUCKETS)
    if bucket == BUCKETS - 1:  # a wrong clock has dated the file
        return -1.0, 0
    return worth[class_][bisect_right(_bins(), bucket) - 1], -youngest_of(bucket)


def _up_to(most: float, least_age_us: int, worth: Worth) -> Plan:
    """Return the plan that evicts all cells up to a rank."""
    leaving = bytearray(CLASSES * BUCKETS)
    for class_, by_bin in enumerate(worth):
        start = class_ * BUCKETS
        for value, first, end in zip(by_bin, _bins(), _bins()[1:], strict=False):
            if value == most:
                first = min(max(first, bucket_of(least_age_us)), end)
            if value <= most:
                leaving[start + first : start + end] = b"\1" * (end - first)
        leaving[start + BUCKETS - 1] = True
    return leaving


@cache
def _bins() -> list[int]:
    """Return the first bucket of each of the model's bins, and the end of the last one."""
    bin_of = new_model().bin_of
    bins = [bin_of(youngest_of(bucket) / UNIT_US) for bucket in range(BUCKETS)]
    return [*(bins.index(bin_) for bin_ in range(_BINS)), BUCKETS]


def expired(ttl_s: float) -> Plan:
    """Return the plan that evicts chunks not used for ``ttl_s``; some stay for up to a 256th longer."""
    age_us = int(min(ttl_s * 1e6, float(1 << _AGE_BITS)))
    first = bucket_of(age_us - 1) + 1
    return bytearray((bytes(first) + b"\1" * (BUCKETS - first)) * CLASSES)
