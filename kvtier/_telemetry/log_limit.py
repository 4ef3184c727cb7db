"""Rate limits for log lines that may come often."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvtier._core.shared import Notice

_CHANGES_EVERY_S = 30.0


class LogLimit:
    """Allows one line about a subject per interval.

    Args:
        every_s: the interval, in seconds.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: dict[str, tuple[float, int]] = {}

    def allow(self, subject: str, now_s: float) -> str | None:
        """Return what to append to a line about ``subject``; None where the line must not be written.

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
    """Logs the core's notices, at most one of a kind per interval.

    Args:
        logger: where they are written.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._limit = LogLimit(_CHANGES_EVERY_S)

    def tell(self, notices: Iterable[Notice], now_s: float) -> None:
        """Log notices."""
        for notice in notices:
            added = self._limit.allow(f"{notice.subject}: {notice.text}", now_s)
            if added is not None:
                level = logging.INFO if notice.is_good else logging.WARNING
                self._logger.log(level, "%s: %s%s", notice.subject, notice.text, added)
