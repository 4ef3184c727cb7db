"""The puts that a shutdown drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from kvtier._core.shared import Count
from kvtier._core.tiering import Tiering
from kvtier._log import GuardedLogger

_UNANSWERED, _KEPT = "unanswered", ""


def warn_not_written(
    logger: GuardedLogger, tier: str, what: str, reasons: Mapping[str, int], late: str = ""
) -> None:
    """Log that chunks are missing for the next engine, and why."""
    why = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
    text = "tier %s: %s were not written (%s)%s: the next engine does not find them"
    logger.warning(text, tier, what, why, late)


class DroppedPuts:
    """The puts in flight at the start of a shutdown.

    They are logged then, because it may be killed, and at its end.

    ``counts`` returns counts of the core that are not cleared meanwhile.
    """

    def __init__(
        self,
        core: Tiering,
        drain_s: float,
        logger: GuardedLogger,
        counts: Callable[[], Mapping[Count, float]],
    ) -> None:
        self._core = core
        self._counts = counts
        self._drain_s = drain_s
        self._logger = logger
        self._before = self._count_ended()
        for tier, chunks in self._count_in_flight().items():
            logger.info(
                "tier %s: the shutdown waits up to %g s (drain_on_shutdown_s) for %d chunks in flight",
                tier,
                drain_s,
                chunks,
            )

    def warn(self) -> None:
        """Log for each tier how many chunks were not written, and why, including chunks put meanwhile."""
        ended = self._count_ended()
        ended.subtract(self._before)
        for tier, left in self._count_in_flight().items():
            ended[tier, _UNANSWERED] += left
        for tier in dict.fromkeys(tier for tier, _ in ended):
            reasons = {word: count for (name, word), count in ended.items() if name == tier and count}
            kept = reasons.pop(_KEPT, 0)
            if reasons:
                lost = sum(reasons.values())
                what = f"{lost} of {lost + kept} chunks in flight at the shutdown"
                late = f" within drain_on_shutdown_s ({self._drain_s:g})"
                warn_not_written(self._logger, tier, what, reasons, late)

    def _count_in_flight(self) -> dict[str, int]:
        return {status.name: status.backlog for status in self._core.shared.tiers if status.backlog}

    def _count_ended(self) -> Counter[tuple[str, str]]:
        """Return, by tier, how many chunks were put, and how many were not for each reason."""
        ended: Counter[tuple[str, str]] = Counter()
        for (what, *labels), count in self._counts().items():
            if what in ("put", "put_failed"):
                ended[labels[0], labels[1] if what == "put_failed" else _KEPT] += int(count)
        return ended
