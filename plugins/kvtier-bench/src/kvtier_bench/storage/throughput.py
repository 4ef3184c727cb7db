"""The measuring loop of ``kvtier bench fs`` and ``kvtier bench tier``.

Each round measures the reference (a disk, or a tier's bare client), the subject, and the reference again. So
a noisy machine affects both alike: trust the ratios and their spread.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Final

from kvtier_bench.storage.movers import Contestant

_WARM_UP_BYTES: Final = 2**25


@dataclass(frozen=True, slots=True)
class Throughput:
    """Throughput, compared with a reference. GB are 10**9 bytes; figures are medians over rounds.

    Attributes:
        subject: the tier, or vLLM's path for files.
        verb: ``"put"`` or ``"get"``.
        gb_s, reference_gb_s: throughput of subject and reference, with several concurrent batches.
        ratio, ratio_low, ratio_high: median, minimum and maximum of the rounds' ratios of the two.
        goal: whether the median ratio reaches the goal, if there is one.
        cpu_us_chunk, reference_cpu_us_chunk: processor time of this process per chunk, excluding servers.
        without_checksum_us: the subject's processor time without checksums, which are timed separately.
    """

    subject: str
    chunk_bytes: int
    verb: str
    gb_s: float
    reference_gb_s: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    goal: str
    cpu_us_chunk: float
    reference_cpu_us_chunk: float | None
    without_checksum_us: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """The figures of one stretch, or the sum of two."""

    nbytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_s(self) -> float:
        """Rate in GB/s."""
        return self.nbytes / self.wall_s / 1e9

    def cpu_us(self, chunk_bytes: int) -> float:
        """Processor time per chunk, in microseconds."""
        return self.cpu_s / self.nbytes * chunk_bytes * 1e6

    def __add__(self, other: Stretch) -> Stretch:
        return Stretch(self.nbytes + other.nbytes, self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


async def compare(
    subjects: Mapping[str, Contestant],
    reference: Contestant | None,
    chunk_bytes: int,
    nbytes: float,
    rounds: int,
    goal: float | None = None,
    verbs: Sequence[str] = ("put", "get"),
) -> list[Throughput]:
    """Measure subjects and a reference.

    Args:
        goal: the ratio that a subject should reach.
        verbs: the calls to measure, in order.
    """
    found: dict[tuple[str, str], list[_Round]] = {}
    for subject in subjects.values():
        async with _emptied(subject, reference):  # Connects, creates directories and starts threads.
            for verb in verbs:
                await _round(subject, reference, verb, min(nbytes, _WARM_UP_BYTES))
    for _ in range(rounds):
        for name, subject in subjects.items():
            async with _emptied(subject, reference):
                for verb in verbs:
                    row = await _round(subject, reference, verb, nbytes)
                    found.setdefault((name, verb), []).append(row)
                subject.check()
    return [
        _throughput(name, chunk_bytes, verb, rows, subjects[name].checksum_us, goal)
        for (name, verb), rows in sorted(found.items())
    ]


@dataclass(frozen=True, slots=True)
class _Round:
    """The figures of one round."""

    subject: Stretch
    reference: Stretch | None


@asynccontextmanager
async def _emptied(*contestants: Contestant | None) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for contestant in filter(None, contestants):
            await contestant.discard()


async def _round(subject: Contestant, reference: Contestant | None, verb: str, nbytes: float) -> _Round:
    """Measure the reference, the subject and the reference again, because rates change within seconds."""
    halves = [] if reference is None else [reference, reference]
    if verb == "put":
        for half in halves:
            half.prepare(nbytes / 2)
        subject.prepare(nbytes)
    before = [await _stretch(half, verb, nbytes / 2) for half in halves[:1]]
    own = await _stretch(subject, verb, nbytes)
    after = [await _stretch(half, verb, nbytes / 2) for half in halves[1:]]
    return _Round(own, before[0] + after[0] if before else None)


async def _stretch(contestant: Contestant, verb: str, nbytes: float) -> Stretch:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    moved = await contestant.move(verb, nbytes)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return Stretch(moved, wall_s, cpu_s)


def _throughput(
    name: str,
    chunk_bytes: int,
    verb: str,
    rows: Sequence[_Round],
    checksum_us: float,
    goal: float | None,
) -> Throughput:
    pairs = [(row.subject, row.reference) for row in rows if row.reference is not None]
    ratios = [subject.gb_s / reference.gb_s for subject, reference in pairs]
    ratio = _median(ratios)
    cpu_us = median(row.subject.cpu_us(chunk_bytes) for row in rows)
    return Throughput(
        subject=name,
        chunk_bytes=chunk_bytes,
        verb=verb,
        gb_s=median(row.subject.gb_s for row in rows),
        reference_gb_s=_median(reference.gb_s for _, reference in pairs),
        ratio=ratio,
        ratio_low=min(ratios, default=None),
        ratio_high=max(ratios, default=None),
        goal="-" if ratio is None or goal is None else "pass" if ratio >= goal else "FAIL",
        cpu_us_chunk=cpu_us,
        reference_cpu_us_chunk=_median(reference.cpu_us(chunk_bytes) for _, reference in pairs),
        without_checksum_us=cpu_us - checksum_us,
    )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None
