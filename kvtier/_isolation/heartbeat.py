"""Liveness of the tier process: whether its event loop answers in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SupervisorTimes:
    """How closely the tier process is supervised.

    While every tier is up, the process is killed after ``silent_timeout_s`` without an answer. While the
    process starts, and while a tier is not up, the limit is ``start_timeout_s``: opening or closing a tier,
    with its imports, may hold the interpreter lock for long.
    """

    heartbeat_s: float = 1.0  # from one ping to the next
    silent_timeout_s: float = 5.0
    start_timeout_s: float = 60.0
    # Time from the end of a process to the next start. Pauses grow while processes end soon.
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0


class Heartbeat:
    """Pings a process, and measures how long it has not answered.

    One check adds two intervals at most to the silence, so a pause of the engine itself hardly counts. The
    caller reads what the process has sent before it checks. ``is_steady`` returns whether each tier is up.
    """

    def __init__(
        self, times: SupervisorTimes, ping: Callable[[], object], is_steady: Callable[[], bool]
    ) -> None:
        self.has_started = False  # whether the process has ever answered
        self._times = times
        self._ping = ping
        self._is_steady = is_steady
        self._is_pending = False
        self._silence_s = 0.0
        self._last_s = time.monotonic() - times.heartbeat_s

    @property
    def wait_s(self) -> float:
        """Seconds until the next ping."""
        return max(0.0, self._last_s + self._times.heartbeat_s - time.monotonic())

    @property
    def limit_s(self) -> float:
        """Seconds without an answer after which the process is killed."""
        is_strict = self.has_started and self._is_steady()
        return self._times.silent_timeout_s if is_strict else self._times.start_timeout_s

    def check_silence(self) -> bool:
        """Ping if a ping is due; return whether the process has been silent for too long."""
        if self.wait_s > 0:
            return False
        now_s = time.monotonic()
        if self._is_pending:
            self._silence_s += min(now_s - self._last_s, 2 * self._times.heartbeat_s)
        else:
            self._is_pending = True
            self._ping()
        self._last_s = now_s
        return self._silence_s >= self.limit_s

    def acknowledge(self) -> None:
        self.has_started = True
        self._is_pending = False
        self._silence_s = 0.0
