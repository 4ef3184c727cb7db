"""The puts that a shutdown drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvtier._core.tiering import Tiering
from kvtier._log import GuardedLogger

_UNANSWERED = "unanswered"


def warn_not_written(
    logger: GuardedLogger, tier: str, what: str, reasons: Mapping[str, int], late: str = ""
) -> None:
    """Log that chunks are lost to the next engine, and why."""
    why = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
    text = "tier %s: %s were not written (%s)%s: the next engine does not find them"
    logger.warning(text, tier, what, why, late)


class DroppedPuts:
    """The puts in flight when a shutdown begins: logged then, for it may be killed, and at its end."""

    def __init__(self, core: Tiering, drain_s: float, logger: GuardedLogger) -> None:
        self._core = core
        self._drain_s = drain_s
        self._logger = logger
        self._in_flight = self._count_puts()
        self._failed_before = self._count_failures()
        for tier, chunks in self._in_flight.items():
            logger.info(
                "tier %s: the shutdown waits up to %g s (drain_on_shutdown_s) for %d chunks in flight",
                tier,
                drain_s,
                chunks,
            )

    def warn(self) -> None:
        """Log for each tier how many chunks were not written, and why."""
        left = self._count_puts()
        failures = self._count_failures()
        failures.subtract(self._failed_before)
        for tier, in_flight in self._in_flight.items():
            reasons = {reason: count for (name, reason), count in failures.items() if name == tier and count}
            if tier in left:
                reasons[_UNANSWERED] = left[tier]
            if reasons:
                what = f"{sum(reasons.values())} of {in_flight} chunks in flight at the shutdown"
                late = f" within drain_on_shutdown_s ({self._drain_s:g})"
                warn_not_written(self._logger, tier, what, reasons, late)

    def _count_puts(self) -> dict[str, int]:
        return {status.name: status.backlog for status in self._core.shared.tiers if status.backlog}

    def _count_failures(self) -> Counter[tuple[str, str]]:
        failures: Counter[tuple[str, str]] = Counter()
        for (what, *labels), count in self._core.shared.counts.items():
            if what == "put_failed":
                failures[labels[0], labels[1]] = int(count)
        return failures
