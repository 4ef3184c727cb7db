"""Exponential backoff with jitter."""

from __future__ import annotations

from collections.abc import Callable

RandomSource = Callable[[], float]
"""Returns numbers in [0, 1), such as ``random.random``."""


def no_jitter() -> float:
    """Return the middle of the range: pauses have their nominal length."""
    return 0.5


class Backoff:
    """Exponential backoff with jitter: each pause is twice the previous one, up to the longest.

    Each pause is drawn from three quarters to five quarters of its length, so that engines which lost the
    same server do not retry in step.
    """

    def __init__(self, first_s: float, longest_s: float, chance: RandomSource = no_jitter) -> None:
        self.pause_s = 0.0
        self._first_s = first_s
        self._longest_s = max(first_s, longest_s)
        self._chance = chance

    def next_s(self) -> float:
        self.pause_s = min(self._longest_s, 2 * self.pause_s) if self.pause_s else self._first_s
        return self.pause_s * (0.75 + self._chance() / 2)

    def reset(self) -> None:
        """Make the next pause the first one."""
        self.pause_s = 0.0
