"""Rate limits for log lines."""

from __future__ import annotations


class LogLimit:
    """Limits log lines to one per subject and interval.

    Args:
        every_s: the interval, in seconds.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: dict[str, tuple[float, int]] = {}

    def allow(self, subject: str, now_s: float) -> str | None:
        """Return a suffix for a line about ``subject``, or None if the line must not be written.

        The suffix is empty, or says how many lines were held back.

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
