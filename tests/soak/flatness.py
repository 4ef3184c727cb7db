"""Whether a figure stays flat: what was seen of it in a run, and how much it may have grown by its end.

A figure is looked at when the engine is at rest: all faults are over, all stores, puts and fetches have
ended. Of the looks the first third is warming up (pools fill, buffers find their sizes) and is not judged.
The level of the second third is compared with the level of the last: a leak shows as their difference,
which is a third of what leaked in the whole run. The level is the lower quartile of the looks: what is
leaked is never given back, so it raises the floor, while what comes and goes (a connection that was just
lost, a thread that is about to end) moves single looks only.

How much a figure may grow is stated for each as a constant, which covers what such figures do without a leak,
and a rate for each event that could leak (a request, a kill). Whether that is sharp enough depends on the
length of the run, so each verdict says how small a leak it would have seen: ``visible``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

FEWEST_LOOKS = 9
"""Three looks in each third; with fewer nothing is judged."""


@dataclass(frozen=True)
class Look:
    """All figures at one moment of rest.

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
        most: what no single look may exceed; None where there is no such limit.
    """

    constant: float
    event: str
    for_each: float = 0.0
    most: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of one figure.

    Attributes:
        name: of the figure.
        second: its level in the second third of the looks.
        last: its level in the last third.
        peak: the greatest look of all.
        grown: the difference of the levels.
        allowed: how much that may be.
        visible: the smallest leak for each event that would have been found; None without an event.
        event: of which kind.
        is_flat: whether it has kept to its bound.
    """

    name: str
    second: float
    last: float
    peak: float
    grown: float
    allowed: float
    visible: float | None
    event: str
    is_flat: bool


def judge(looks: Sequence[Look], bounds: Mapping[str, Bound]) -> list[Verdict]:
    """Judge each figure that has a bound. A figure that was never looked at is an error in the soak.

    Raises:
        ValueError: there are too few looks to tell anything.
    """
    if len(looks) < FEWEST_LOOKS:
        raise ValueError(f"{len(looks)} looks are too few to judge by: give it more time")
    third = len(looks) // 3
    second, last = looks[third : 2 * third], looks[-third:]
    return [_judge(name, bound, looks, second, last) for name, bound in bounds.items()]


def _judge(
    name: str, bound: Bound, looks: Sequence[Look], second: Sequence[Look], last: Sequence[Look]
) -> Verdict:
    events = _middle(last).events[bound.event] - _middle(second).events[bound.event]
    allowed = bound.constant + bound.for_each * events
    before, after = level(name, second), level(name, last)
    peak = max(look.figures[name] for look in looks)
    is_below = bound.most is None or peak <= bound.most
    return Verdict(
        name,
        before,
        after,
        peak,
        after - before,
        allowed,
        allowed / events if events else None,
        bound.event,
        after - before <= allowed and is_below,
    )


def level(name: str, looks: Sequence[Look]) -> float:
    """Return the lower quartile of a figure."""
    return quantiles([look.figures[name] for look in looks], n=4, method="inclusive")[0]


def _middle(looks: Sequence[Look]) -> Look:
    return looks[len(looks) // 2]
