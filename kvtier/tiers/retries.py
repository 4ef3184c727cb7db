"""Which failures are worth a second attempt, and how many of those there may be."""

from __future__ import annotations

_MOST = 10.0
_ONE = 1.0 - 1e-9  # ten tenths


class RetryBudget:
    """Bounds second attempts to a share of the first ones, so that they never multiply an outage.

    Each first attempt earns ``share`` of a second one. What is not used is kept, up to ten, so that a
    short fault after a long quiet time is ridden out; a lasting one uses that up and gets the share.

    Args:
        share: second attempts for each first one; 0 for none at all.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = 1.0 if share else 0.0

    def earn(self) -> None:
        """Note a first attempt."""
        self._left = min(_MOST, self._left + self._share)

    def take(self) -> bool:
        """Take a second attempt, where there is one left."""
        if self._left < _ONE:
            return False
        self._left = max(0.0, self._left - 1.0)
        return True
