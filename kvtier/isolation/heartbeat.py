"""Whether a process is alive, and not merely there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SupervisorTimes:
    """How closely the process of the tiers is watched, in seconds.

    Attributes:
        heartbeat_s: from one question whether its loop runs to the next.
        silent_timeout_s: without an answer until it is killed.
        start_timeout_s: the same for the first answer, which comes when it has started.
        first_pause_s, longest_pause_s: from its end to the start of the next one; they grow while
            processes end soon.
    """

    heartbeat_s: float = 1.0
    silent_timeout_s: float = 5.0
    start_timeout_s: float = 60.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0


class Heartbeat:
    """Asks a process now and then whether its loop runs, and notes for how long it has not answered.

    Time in which the engine itself was stopped does not count against it: no more than two beats do at
    once, and what it has said meanwhile is heard first.

    Args:
        times: how often, and how long is too long.
        ask: asks it.

    Attributes:
        has_started: whether it has ever answered.
    """

    def __init__(self, times: SupervisorTimes, ask: Callable[[], object]) -> None:
        self.has_started = False
        self._times = times
        self._ask = ask
        self._limit_s = times.start_timeout_s
        self._is_asked = False
        self._silence_s = 0.0
        self._last_s = time.monotonic() - times.heartbeat_s

    @property
    def wait_s(self) -> float:
        """Seconds until the next beat."""
        return max(0.0, self._last_s + self._times.heartbeat_s - time.monotonic())

    def is_overdue(self) -> bool:
        """Ask, where it is time to; say whether it has been silent for too long."""
        if self.wait_s > 0:
            return False
        now_s = time.monotonic()
        if self._is_asked:
            self._silence_s += min(now_s - self._last_s, 2 * self._times.heartbeat_s)
        else:
            self._is_asked = True
            self._ask()
        self._last_s = now_s
        return self._silence_s >= self._limit_s

    def acknowledge(self) -> None:
        """Note that it has answered."""
        self.has_started = True
        self._is_asked = False
        self._silence_s, self._limit_s = 0.0, self._times.silent_timeout_s
