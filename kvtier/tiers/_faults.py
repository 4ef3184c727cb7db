"""Failures of tiers: the exceptions that count, and their texts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pydantic import BaseModel

from kvtier import _reasons as reasons
from kvtier._settings.validation import hide
from kvtier.errors import KVTierError, TierError


def require_fault(error: BaseException) -> None:
    """Raise ``error`` again unless it is a failure of the tier.

    Requested cancellations, ``KeyboardInterrupt`` and ``GeneratorExit`` are raised. Everything else is a
    failure of the tier, including ``SystemExit``, unrequested cancellations and panics of a Rust extension.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
    elif isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error


class _LookupFailedError(TierError):
    """A lookup got no answer for most keys; ``reason`` is the most frequent one."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


def require_answers(failed: Mapping[str, int], count: int) -> None:
    """Raise unless the backend answered for at least half of ``count`` keys of a lookup.

    Call it at the end of ``contains``. Its error counts as a failure of the tier, and is retried like a
    failed get. The answer "absent" counts as a success.

    Args:
        failed: number of keys without an answer, by reason, as in ``Outcome.reasons``.
        count: number of keys looked up.

    Raises:
        TierError: most keys got no answer.
    """
    unanswered = sum(failed.values())
    if 2 * unanswered > count:
        reason = max(failed, key=failed.__getitem__)
        raise _LookupFailedError(f"{unanswered} of {count} lookups failed: {reason}", reason)


def reason_of(error: BaseException) -> str:
    """Return the reason to count for a tier's exception; the tier may not have declared it."""
    return error.reason if isinstance(error, _LookupFailedError) else reasons.word_for(error)


def words_of(error: BaseException, settings: BaseModel) -> str:
    """Return a tier's error as text, without secrets: client libraries may repeat those in the settings."""
    try:
        text = str(error)
    except BaseException as second:  # may come from the __str__ of a plug-in's own class
        require_fault(second)
        text = "the error has no text: its own conversion to text failed"
    return hide(text if isinstance(error, KVTierError) else f"{type(error).__name__}: {text}", settings)
