"""A logger for threads and tasks that must outlive their log lines."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any


class GuardedLogger(logging.LoggerAdapter[logging.Logger]):
    """Writes to a logger. A handler that raises, such as on a full disk, costs the line and nothing else.

    Args:
        name: of the logger.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line is our caller's
        with suppress(Exception):
            super().log(level, msg, *args, **kwargs)
