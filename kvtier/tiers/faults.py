"""What is a tier's fault, and how it is said."""

from __future__ import annotations

import asyncio

from kvtier.errors import KVTierError


def require_fault(error: BaseException) -> None:
    """Raise ``error`` unless it is a tier's fault; a cancellation that nobody asked for is one."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
    elif not isinstance(error, Exception | SystemExit):
        raise error


def words_of(error: BaseException) -> str:
    """Say an error in words: kvtier's own need no class name in front."""
    return str(error) if isinstance(error, KVTierError) else f"{type(error).__name__}: {error}"
