"""The logger of kvtier, whose lines never raise, and a rate limit for lines."""

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
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # report the caller's line
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception:
            with suppress(Exception):  # standard error may be closed
                _reporter.handleError(logging.LogRecord(self.name, level, "", 0, msg, args, None))


class LogLimit:
    """Limits log lines to one per subject in ``every_s`` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: dict[str, tuple[float, int]] = {}

    def allow(self, subject: str, now_s: float) -> str | None:
        """Return a suffix for a line about ``subject``, or None if the line must not be written.

        The suffix is empty, or contains the number of suppressed lines.

        Args:
            subject: the subject of the line; use few different ones.
            now_s: the current time in seconds, monotonic.
        """
        last_s, held_back = self._last.get(subject, (now_s - self._every_s, 0))
        if now_s - last_s < self._every_s:
            self._last[subject] = last_s, held_back + 1
            return None
        self._last[subject] = now_s, 0
        return f" (and {held_back} times since the line before)" if held_back else ""
