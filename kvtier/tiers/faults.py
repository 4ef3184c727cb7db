"""What is a tier's fault, and how it is said."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from kvtier.errors import KVTierError
from kvtier.validation import hide


def require_fault(error: BaseException) -> None:
    """Raise ``error`` unless it is a tier's fault; a cancellation that nobody asked for is one."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
    elif not isinstance(error, Exception | SystemExit):
        raise error


def words_of(error: BaseException, settings: BaseModel) -> str:
    """Say an error of a tier in words: kvtier's own need no class name in front.

    Args:
        error: what the tier has raised.
        settings: the tier's; what is secret in them is not shown, though a client may repeat it.
    """
    words = str(error) if isinstance(error, KVTierError) else f"{type(error).__name__}: {error}"
    return hide(words, settings)
