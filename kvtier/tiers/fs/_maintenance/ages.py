"""Which chunks leave when room is needed: the planning, without a disk.

Chunks of the least hit density leave: of the fewest hits to expect for the time that they take room, by how
often and how long ago they were used. That is learned (see ``kvtier.policies._reuse``), by each process from
what it uses itself.

Sorting a million files would hold the interpreter for a second. So their bytes are added up in cells: by
class, and by age in buckets that are a 256th as wide as they are old. A plan is which cells leave.
"""

from __future__ import annotations

from array import array
from typing import Final, TypeAlias

from kvtier.policies._reuse import MAX_USES, ReuseModel

CLASSES: Final = 5
CLASS_OF_USES: Final = (0, 0, 1, 2, 2, *[3] * 11, *[4] * (MAX_USES - 15))
"""How often a chunk was used, as its file says it; see ``kvt_class``."""

UNIT_US: Final = 1_000_000
"""Of the model's age."""

_PRIORS: Final = (1.0, 2.0, 3.0, 8.0, 20.0)
_BINS: Final = 48  # the last one begins at 80 days

_SUB_BITS: Final = 8
_SUB: Final = 1 << _SUB_BITS
_AGE_BITS: Final = 50  # microseconds of 35 years
BUCKETS: Final = (_AGE_BITS - _SUB_BITS + 1) * _SUB

Histogram: TypeAlias = "array[int]"
"""Bytes of chunks by cell: by age, for one class after the other. The native library adds them up."""

Plan: TypeAlias = bytearray
"""Whether the chunks of each cell leave. The native library reads it."""


def new_model() -> ReuseModel:
    """Return a model that has learned nothing: what was used more often, and not long ago, stays."""
    return ReuseModel(_PRIORS, _BINS)


def new_histogram() -> Histogram:
    return array("Q", bytes(8 * CLASSES * BUCKETS))


def bucket_of(age_us: int) -> int:
    """Return the bucket of an age, as scan.c has it."""
    age = min(max(age_us, 0), (1 << _AGE_BITS) - 1)
    shift = max(0, age.bit_length() - _SUB_BITS - 1)
    return (shift << _SUB_BITS) + (age >> shift)


def youngest_of(bucket: int) -> int:
    """Return the least age of a bucket, in microseconds: the inverse of ``bucket_of``."""
    shift = max(0, (bucket >> _SUB_BITS) - 1)
    return (bucket - (shift << _SUB_BITS)) << shift


def plan(histogram: Histogram, share: float, need_bytes: int, model: ReuseModel) -> Plan:
    """Return which cells leave so that it makes up ``need_bytes``, or all if that is less.

    ``share`` is that of all chunks which is in the histogram; the others are assumed to be alike.
    """
    left = need_bytes * share
    leaving = bytearray(CLASSES * BUCKETS)
    found = [cell for cell, nbytes in enumerate(histogram) if nbytes]
    for cell in sorted(found, key=lambda cell: _rank(cell, model)):
        if left <= 0:
            break
        left -= histogram[cell]
        leaving[cell] = True
    return leaving


def _rank(cell: int, model: ReuseModel) -> tuple[float, int]:
    """Return hit density and age of a cell such that the least one leaves first, of equals the oldest."""
    bucket = cell % BUCKETS
    if bucket == BUCKETS - 1:  # a wrong clock has dated them
        return -1.0, 0
    age_us = youngest_of(bucket)
    return model.density[cell // BUCKETS][model.bin_of(age_us / UNIT_US)], -age_us


def expired(ttl_s: float) -> Plan:
    """Return what leaves because it was not used for ``ttl_s``, or for up to a 256th longer."""
    age_us = int(min(ttl_s * 1e6, float(1 << _AGE_BITS)))
    first = bucket_of(age_us - 1) + 1
    return bytearray((bytes(first) + b"\1" * (BUCKETS - first)) * CLASSES)
