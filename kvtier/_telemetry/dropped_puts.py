"""The puts that a shutdown drops."""

from __future__ import annotations

import logging
from collections import Counter

from kvtier._core.tiering import Tiering

_UNANSWERED = "unanswered"


class DroppedPuts:
    """The puts in flight when a shutdown begins, for one warning per tier at its end.

    Args:
        core: the state machine; it is told of the puts' ends meanwhile.
        drain_s: seconds that the shutdown waits for puts.
    """

    def __init__(self, core: Tiering, drain_s: float) -> None:
        self._core = core
        self._drain_s = drain_s
        self._in_flight = self._count_puts()
        self._failed_before = self._count_failures()

    def warn(self, logger: logging.Logger) -> None:
        """Log for each tier how many chunks were not written, and why."""
        left = self._count_puts()
        failures = self._count_failures()
        failures.subtract(self._failed_before)
        for tier, in_flight in self._in_flight.items():
            reasons = {reason: count for (name, reason), count in failures.items() if name == tier and count}
            if left[tier]:
                reasons[_UNANSWERED] = left[tier]
            if reasons:
                logger.warning(
                    "tier %s: %d of %d chunks in flight at the shutdown were not written (%s) within "
                    "drain_on_shutdown_s (%g): the next engine does not find them",
                    tier,
                    sum(reasons.values()),
                    in_flight,
                    ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items())),
                    self._drain_s,
                )

    def _count_puts(self) -> Counter[str]:
        tiers = self._core.shared.tiers
        puts: Counter[str] = Counter()
        for transfer in self._core.shared.transfers.values():
            if transfer.is_put:
                puts[tiers[transfer.tier].name] += len(transfer.chunks)
        return puts

    def _count_failures(self) -> Counter[tuple[str, str]]:
        failures: Counter[tuple[str, str]] = Counter()
        for (what, *labels), count in self._core.shared.counts.items():
            if what == "put_failed":
                failures[labels[0], labels[1]] = int(count)
        return failures
