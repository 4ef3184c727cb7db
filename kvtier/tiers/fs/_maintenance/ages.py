"""Which chunks leave when room is needed: the planning, without a disk.

Sorting a million files would hold the interpreter for a second. So their bytes are added up by age, in
buckets that are a 256th as wide as they are old, separately for chunks that were never used again after they
were written and for those that were. A plan is two ages: all older chunks leave.

A chunk that was not used again is ranked as ``UNPROVEN_US`` older, then as ``REUSE_WEIGHT`` times older. That
protects prompts that come back from those that come once, as the second queue of ARC and S3-FIFO does. In a
root that holds most of what there is, it comes close to LRU, which is better there.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final, TypeAlias

NEVER: Final = 2**63 - 1
"""An age that no chunk has."""

REUSE_WEIGHT: Final = 1.4
UNPROVEN_US: Final = 200_000_000
_SUB_BITS: Final = 8
_SUB: Final = 1 << _SUB_BITS
_AGE_BITS: Final = 50  # microseconds of 35 years
BUCKETS: Final = (_AGE_BITS - _SUB_BITS + 1) * _SUB


def bucket_of(age_us: int) -> int:
    """Return the bucket of an age, as scan.c has it."""
    age = min(max(age_us, 0), (1 << _AGE_BITS) - 1)
    shift = max(0, age.bit_length() - _SUB_BITS - 1)
    return (shift << _SUB_BITS) + (age >> shift)


def youngest_of(bucket: int) -> int:
    """Return the least age of a bucket, in microseconds: the inverse of ``bucket_of``."""
    shift = max(0, (bucket >> _SUB_BITS) - 1)
    return (bucket - (shift << _SUB_BITS)) << shift


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """What leaves: chunks whose last use is so many microseconds ago, or more."""

    once_us: int = NEVER  # for chunks that were never used again after they were written
    reused_us: int = NEVER  # for the others

    def __post_init__(self) -> None:
        """Raise ValueError if an age does not fit: the native library would read it as another one."""
        if not (0 <= self.once_us <= NEVER and 0 <= self.reused_us <= NEVER):
            raise ValueError(f"an age of 0 to {NEVER} us is needed, not {self.once_us} and {self.reused_us}")


NOTHING: Final = Cutoffs()

Histogram: TypeAlias = "array[int]"
"""Bytes of chunks by age: those used once, then those used again. The native library adds them up."""


def new_histogram() -> Histogram:
    return array("Q", bytes(8 * 2 * BUCKETS))


def plan(histogram: Histogram, share: float, need_bytes: int) -> Cutoffs:
    """Return ages such that what is older makes up ``need_bytes``, or all if that is less.

    ``share`` is that of all chunks which is in the histogram; the others are assumed to be alike.
    """
    left = need_bytes * share
    once_us = reused_us = NEVER
    for age, reused, nbytes in _oldest_first(histogram):
        if left <= 0:
            break
        left -= nbytes
        if reused:
            reused_us = age
        else:
            once_us = age
    return Cutoffs(once_us, reused_us)


def expired(ttl_s: float) -> Cutoffs:
    """Return what leaves because it was not used for ``ttl_s``."""
    age_us = int(min(ttl_s * 1e6, NEVER))
    return Cutoffs(age_us, age_us)


def _oldest_first(histogram: Histogram) -> list[tuple[int, bool, int]]:
    """List buckets that hold something: least age, whether of chunks used again, bytes."""
    found = [
        (youngest_of(index % BUCKETS), index >= BUCKETS, nbytes)
        for index, nbytes in enumerate(histogram)
        if nbytes
    ]
    found.sort(key=lambda item: rank(item[0], reused=item[1]), reverse=True)
    return found


def rank(age_us: int, *, reused: bool) -> float:
    """Return the age that a chunk is taken for: those with the highest leave first."""
    return age_us if reused else (age_us + UNPROVEN_US) * REUSE_WEIGHT
