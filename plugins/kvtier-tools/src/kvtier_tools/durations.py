"""Durations, as users write them on the command line."""

from __future__ import annotations

from typing import Final

from kvtier._settings.quantities import MOST_SECONDS, amount_of

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration(text: str) -> float:
    """Return the seconds that text such as ``90s``, ``15m``, ``12h`` or ``30d`` means. ValueError if none."""
    amount, unit = amount_of(text, _SECONDS, "write a duration with a unit: 90s, 15m, 12h or 30d")
    if amount * unit > MOST_SECONDS:
        raise ValueError(f"too long: at most {MOST_SECONDS // 86_400}d, which is 100 years")
    return float(amount * unit)
