"""Whether a figure stays flat over a run.

A figure is sampled when nothing is under way: all faults are over, all stores, puts and fetches have ended.
The first third of the samples is warm-up (pools fill, buffers grow) and is not judged. The level of the
second third is compared with that of the last. The level is the lower quartile: a leak is never given back,
so it raises the floor, while a connection that was just lost or a thread that ends moves single samples.

How much a figure may grow is a constant, which covers what pools do, and a rate for each event that could
leak (a request, a kill). How small a leak a run would have found depends on its length: ``visible``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

FEWEST_SAMPLES = 9
"""Three in each third; with fewer nothing is judged."""


@dataclass(frozen=True)
class Sample:
    """All figures at one moment.

    Attributes:
        at_s: seconds since the start.
        events: how many requests, kills and so on there were so far.
        figures: by name.
    """

    at_s: float
    events: Mapping[str, int]
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Bound:
    """How much a figure may grow from the second third of a run to the last.

    Attributes:
        constant: whatever the length of the run.
        event: what could leak it.
        for_each: for each such event between the middles of the two thirds.
        most: what no single sample may exceed; None where there is no such limit.
    """

    constant: float
    event: str
    for_each: float = 0.0
    most: float | None = None


@dataclass(frozen=True)
class Trend:
    """What became of one figure.

    Attributes:
        name: of the figure.
        second, last: its level in the second and in the last third of the samples.
        peak: the greatest sample of all.
        allowed: how much it may have grown.
        visible: the smallest leak for each event that would have been found; None without an event.
        is_flat: whether it has kept to its bound.
    """

    name: str
    second: float
    last: float
    peak: float
    allowed: float
    visible: float | None
    is_flat: bool


def judge(samples: Sequence[Sample], bounds: Mapping[str, Bound]) -> list[Trend]:
    """Judge each figure that has a bound.

    Raises:
        ValueError: there are too few samples.
    """
    if len(samples) < FEWEST_SAMPLES:
        raise ValueError(f"{len(samples)} samples are too few to judge by: give it more time")
    third = len(samples) // 3
    second, last = samples[third : 2 * third], samples[-third:]
    trends = []
    for name, bound in bounds.items():
        before, after = (
            quantiles([sample.figures[name] for sample in part], n=4, method="inclusive")[0]
            for part in (second, last)
        )
        events = last[third // 2].events[bound.event] - second[third // 2].events[bound.event]
        allowed = bound.constant + bound.for_each * events
        peak = max(sample.figures[name] for sample in samples)
        is_flat = after - before <= allowed and (bound.most is None or peak <= bound.most)
        visible = allowed / events if events else None
        trends.append(Trend(name, before, after, peak, allowed, visible, is_flat))
    return trends
