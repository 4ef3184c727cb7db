"""Retries of commands that failed for a transient reason, within a budget and a deadline."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import anyio

from kvtier import _reasons as reasons
from kvtier._core.messages import TransferHealth
from kvtier._core.tiers.backoff import RandomSource
from kvtier.tiers._base import Outcome, Status
from kvtier.tiers._faults import reason_of
from kvtier.tiers._loop_clock import LoopClock

_MOST_RETRIES = 10.0
_ONE_RETRY = 1.0 - 1e-9  # ten tenths
_PAUSE_S = 0.05


class Progress:
    """The progress of one command."""

    def __init__(self, verb: str, deadline_s: float, clock: LoopClock) -> None:
        self.verb = verb
        self.deadline_s = deadline_s  # on ``clock``
        self.limit: asyncio.Timeout | None = None  # cancels the command, once, at its deadline
        self._clock = clock
        self._blocks = clock.blocks
        self.has_begun = False  # whether it has left the queue
        self.seconds = 0.0  # seconds in the tier's puts and gets, all attempts together
        self.lookup_s = 0.0  # seconds in the tier's lookups
        self.answered = TransferHealth.NONE
        self.retry = ""  # result of the retry, or the reason why there was none

    @property
    def health(self) -> TransferHealth:
        is_late = self.has_begun and self.limit is not None and self.limit.expired()
        return TransferHealth.LATE if is_late else self.answered

    def health_of(self, outcome: Outcome) -> TransferHealth:
        """Return BAD if most chunks failed or are corrupt; ABSENT and REFUSED are good answers.

        Return NONE if the tier's own timeouts failed them while the event loop was blocked.
        """
        bad = sum(status in (Status.FAILED, Status.CORRUPT) for status in outcome.statuses)
        if 2 * bad <= len(outcome.statuses):
            return TransferHealth.GOOD
        was_blocked = self._clock.blocks > self._blocks and outcome.reasons.keys() <= {"timeout"}
        return TransferHealth.NONE if was_blocked else TransferHealth.BAD


class RetryBudget:
    """Bounds retries to a share of the first attempts, so that they never multiply an outage.

    Each first attempt earns ``share`` of a retry. Up to ten are saved for a short fault after a quiet time;
    in a lasting fault they run out, and only the share is left.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = 1.0 if share else 0.0

    def earn(self) -> None:
        self._left = min(_MOST_RETRIES, self._left + self._share)

    def spend(self) -> bool:
        """Spend a retry of the budget; return False if none is left."""
        if self._left < _ONE_RETRY:
            return False
        self._left = max(0.0, self._left - 1.0)
        return True


class Retries:
    """Decides which commands of a tier are retried; ``transient`` are the tier's own reasons."""

    def __init__(
        self, share: float, transient: Iterable[str], chance: RandomSource, clock: LoopClock
    ) -> None:
        self._clock = clock
        self._budget = RetryBudget(share)
        self._transient = reasons.TRANSIENT.union(transient)
        self._chance = chance

    def note_submitted(self, verb: str, deadline_s: float) -> Progress:
        """Earn budget for a submitted command, and return its progress."""
        self._budget.earn()
        return Progress(verb, deadline_s, self._clock)

    def is_transient(self, error: BaseException) -> bool:
        return reason_of(error) in self._transient

    def failed(self, outcome: Outcome) -> list[int]:
        """Return the positions of failed chunks, or none if any failed for a lasting reason."""
        failed = [index for index, status in enumerate(outcome.statuses) if status == Status.FAILED]
        transient = sum(count for word, count in outcome.reasons.items() if word in self._transient)
        return failed if transient >= len(failed) else []

    async def pause(self, progress: Progress, took_s: float) -> bool:
        """Pause before a retry; return False at once if there is no time or budget for one."""
        pause_s = _PAUSE_S * (0.5 + self._chance())
        if self._clock.now() + pause_s + took_s >= progress.deadline_s:
            progress.retry = "no_time"
        elif not self._budget.spend():
            progress.retry = "no_budget"
        else:
            await anyio.sleep(pause_s)
            return True
        return False

    def joined(self, first: Outcome, indices: Sequence[int], second: Outcome) -> Outcome:
        """Return the outcome of both attempts; the second was for the chunks at ``indices``."""
        statuses = list(first.statuses)
        for index, status in zip(indices, second.statuses, strict=True):
            statuses[index] = status
        lasting = {word: count for word, count in first.reasons.items() if word not in self._transient}
        return Outcome(statuses, Counter(lasting) + Counter(second.reasons))
