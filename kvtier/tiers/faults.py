"""What is a tier's fault, and how it is said."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from kvtier.errors import KVTierError
from kvtier.validation import hide


def require_fault(error: BaseException) -> None:
    """Raise ``error`` unless it is a tier's fault.

    A fault is everything but a requested cancellation and what ends the program: an exit, a cancellation
    that nobody requested, and bare ``BaseException`` classes such as the panic of a Rust extension included.
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
