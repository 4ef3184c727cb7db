"""Failures of tiers: which exceptions count, and how they are worded."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from kvtier._settings.validation import hide
from kvtier.errors import KVTierError


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
    """Return a tier's error in words, without the secrets in its settings, which a client may repeat."""
    try:
        text = str(error)
    except BaseException as second:  # of a class of the plug-in's own
        require_fault(second)
        text = "the error has no text: its own conversion to text failed"
    return hide(text if isinstance(error, KVTierError) else f"{type(error).__name__}: {text}", settings)
