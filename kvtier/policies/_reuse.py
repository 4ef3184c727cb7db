"""Estimates of when chunks are used again, by number of uses and age, and the value of keeping them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

MAX_USES = 31
CLASSES = 7
CLASS_OF_USES = (0, 0, 1, 2, 3, 4, 4, 4, *[5] * 8, *[6] * (MAX_USES - 15))
_PRIOR = (1.0, 2.0, 2.7, 3.4, 5.0, 8.0, 20.0)  # assumed rates of reuse of the chunks of each class

UNITS = 25
"""Units of age in the time of as many uses of chunks as there are slots."""

_BINS = 32
_FACTOR = 1.4  # Ratio of the ends of successive bins of age. The first bin ends at 1 unit.
_LOG_FACTOR = log(_FACTOR)
_HALF_LIFE = 70.0  # in capacities
_CONFIDENCE = 100.0  # uses of a class after which its own shape weighs as much as the shape of all


class ReuseModel:
    """Histograms of age at reuse, and the hit density that follows from them.

    ``density`` has by class and bin the hits per unit of time that keeping a chunk yields: the highest rate
    over all lengths of time to keep it (the Gittins index). ``priors`` say of each class how soon its chunks
    are used again, until that is learned.
    """

    def __init__(self, priors: Sequence[float] = _PRIOR, bins: int = _BINS) -> None:
        self.used = [0] * len(priors)  # chunks used since the last ``update``
        self.reused = [[0.0] * bins for _ in priors]  # chunks used again, by their age at that time
        self.density = [[prior / _FACTOR**bin_ for bin_ in range(bins)] for prior in priors]
        self._reached = [[0.0] * bins for _ in priors]  # uses that were so long ago, or longer
        self._pending = [[0.0] * bins for _ in priors]  # uses that were so long ago
        self._priors = priors
        self._widths = [1.0, *(_FACTOR**bin_ - _FACTOR ** (bin_ - 1) for bin_ in range(1, bins))]

    def bin_of(self, units: float) -> int:
        return min(len(self._widths) - 1, 1 + int(log(units) / _LOG_FACTOR)) if units >= 1.0 else 0

    def update(self, units: float, capacities: float) -> None:
        """Update the densities with the uses recorded in the last ``units`` units of time.

        ``capacities`` is the number of uses meanwhile, as a multiple of the number of slots.
        """
        decay = 0.5 ** (capacities / _HALF_LIFE)
        for class_ in range(len(self._priors)):
            self._age(class_, units, decay)
        reached_by_all = [sum(column) + 1.0 for column in zip(*self._reached, strict=True)]
        reused_by_all = [sum(column) for column in zip(*self.reused, strict=True)]
        shape = [reused / reached for reused, reached in zip(reused_by_all, reached_by_all, strict=True)]
        weighted = sum(prior * reached[0] for prior, reached in zip(self._priors, self._reached, strict=True))
        mean = weighted / reached_by_all[0]
        for class_, prior in enumerate(self._priors):
            factor = prior / max(mean, 0.1)
            chances = [
                (reused + _CONFIDENCE * min(1.0, factor * chance)) / (reached + _CONFIDENCE)
                for reused, reached, chance in zip(
                    self.reused[class_], self._reached[class_], shape, strict=True
                )
            ]
            self.density[class_] = _hit_density(chances, self._widths)

    def _age(self, class_: int, units: float, decay: float) -> None:
        reached, pending = self._reached[class_], self._pending[class_]
        self.reused[class_] = [count * decay for count in self.reused[class_]]
        for bin_ in range(len(pending) - 1, -1, -1):
            reached[bin_] *= decay
            moved = pending[bin_] * min(1.0, units / self._widths[bin_])
            pending[bin_] -= moved
            if bin_ + 1 < len(pending):
                pending[bin_ + 1] += moved
                reached[bin_ + 1] += moved
        reached[0] += self.used[class_]
        pending[0] += self.used[class_]
        self.used[class_] = 0


def _hit_density(chances: list[float], widths: list[float]) -> list[float]:
    """Return for each bin the best ratio of hits to time, by the chances of reuse in each bin."""
    left, steps = 1.0, []
    for chance, width in zip(chances, widths, strict=True):
        hits = min(chance, left)
        steps.append((hits, width * max(left - hits / 2, 1e-3)))
        left -= hits
    density = []
    ahead: list[tuple[float, float]] = []  # the upper hull of hits over time, from a bin on
    for hits, time in reversed(steps):
        while ahead and ahead[-1][0] * time > hits * ahead[-1][1]:
            further = ahead.pop()
            hits, time = hits + further[0], time + further[1]
        ahead.append((hits, time))
        density.append(hits / time)
    return density[::-1]
