"""Failures of tiers: which exceptions count, how they are worded, and the retry budget."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from kvtier._validation import hide
from kvtier.errors import KVTierError

_MOST_RETRIES = 10.0
_ONE_RETRY = 1.0 - 1e-9  # ten tenths


def require_fault(error: BaseException) -> None:
    """Raise ``error`` again unless it is a failure of the tier.

    Requested cancellations, ``KeyboardInterrupt`` and ``GeneratorExit`` are raised. Everything else is a
    failure of the tier, ``SystemExit``, unrequested cancellations and the panic of a Rust extension included.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
    elif isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error


def words_of(error: BaseException, settings: BaseModel) -> str:
    """Return an error of a tier in words: kvtier's own need no class name in front.

    Args:
        error: what the tier has raised.
        settings: the tier's; what is secret in them is not shown, though a client may repeat it.
    """
    try:
        text = str(error)
    except BaseException as second:  # of a class of the plug-in's own
        require_fault(second)
        text = "its text cannot be had"
    return hide(text if isinstance(error, KVTierError) else f"{type(error).__name__}: {text}", settings)


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
        self._left = min(_MOST_RETRIES, self._left + self._share)

    def take(self) -> bool:
        """Take a second attempt, where there is one left."""
        if self._left < _ONE_RETRY:
            return False
        self._left = max(0.0, self._left - 1.0)
        return True
