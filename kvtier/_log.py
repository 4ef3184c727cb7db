"""The logger of kvtier: no line of it raises."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

_reporter = logging.Handler()


class GuardedLogger(logging.LoggerAdapter[logging.Logger]):
    """Writes to the logger ``name``. A handler that raises, such as on a full disk, loses only the line.

    Lost lines are reported on standard error, like those that handlers lose themselves
    (``logging.raiseExceptions``).
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line belongs to our caller
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception:
            with suppress(Exception):  # standard error may be closed
                _reporter.handleError(logging.LogRecord(self.name, level, "", 0, msg, args, None))
