"""Lines of the log that may come often: one now and then says as much."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvtier.core.shared import Notice

_CHANGES_EVERY_S = 30.0


class LogLimit:
    """Lets one line about a subject through in so many seconds.

    Args:
        every_s: how many.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: dict[str, tuple[float, int]] = {}

    def allow(self, subject: str, now_s: float) -> str | None:
        """Return what to add to a line about ``subject``, or None where it is not to be written.

        Args:
            subject: one of few.
            now_s: the owner's clock.
        """
        last_s, held_back = self._last.get(subject, (now_s - self._every_s, 0))
        if now_s - last_s < self._every_s:
            self._last[subject] = last_s, held_back + 1
            return None
        self._last[subject] = now_s, 0
        return f" (and {held_back} times since the line before)" if held_back else ""


class NoticeLog:
    """Writes what has changed in the core, a line for each change, and not too many of them.

    Args:
        logger: where they are written.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._log_limit = LogLimit(_CHANGES_EVERY_S)

    def tell(self, notices: Iterable[Notice], now_s: float) -> None:
        """Write the lines."""
        for notice in notices:
            added = self._log_limit.allow(f"{notice.subject}: {notice.text}", now_s)
            if added is not None:
                level = logging.INFO if notice.is_good else logging.WARNING
                self._logger.log(level, "%s: %s%s", notice.subject, notice.text, added)
