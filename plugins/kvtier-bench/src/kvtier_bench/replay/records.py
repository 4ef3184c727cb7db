"""The figures of a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_bench.machine import Machine
from kvtier_bench.replay.client import RequestOutcome
from kvtier_bench.replay.counters import COMPUTED, Counters
from kvtier_bench.replay.workload import Workload

LATE_S = 0.05


@dataclass(frozen=True)
class Latency:
    """Milliseconds to the first token (TTFT) and between the pieces of an answer (ITL)"""

    server: str
    ttft_p50: float
    ttft_p90: float
    ttft_p95: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float

    @staticmethod
    def of(server: str, answers: Sequence[RequestOutcome]) -> Latency:
        """Return the latency of one or more answers."""
        ttft = [answer.ttft_s for answer in answers]
        gaps = [gap for answer in answers for gap in answer.gaps_s] or [0.0]
        return Latency(
            server,
            *(percentile_ms(ttft, q) for q in (50, 90, 95, 99)),
            *(percentile_ms(gaps, q) for q in (50, 99)),
        )


@dataclass(frozen=True)
class Served:
    """Requests and tokens

    Attributes:
        prompts: form in which prompts were sent.
        failed: number of failed requests, and the reasons.
        late: number of requests sent more than 50 ms late, and the largest delay.
        tokens_s: answer tokens per second.
        computed: prompt tokens that the server computed.
        recomputed: computed tokens that an earlier prompt had begun with; None if requests failed.
        left_out: figures for which the server has no metric.
    """

    server: str
    prompts: str
    sent: int
    failed: str
    late: str
    seconds: float
    tokens_s: float
    computed: float | None
    recomputed: float | None
    hit_percent: float | None
    left_out: str | None

    @staticmethod
    def of(
        server: str,
        prompts: str,
        answers: Sequence[RequestOutcome],
        seconds: float,
        tokens: Mapping[str, float],
        reusable: int,
        left_out: Sequence[str],
    ) -> Served:
        """Return the totals.

        Args:
            tokens: prompt tokens by source.
            reusable: prompt tokens that an earlier prompt began with.
            left_out: figures for which the server has no metric.
        """
        reasons = Counter(answer.error.partition(":")[0] for answer in answers if answer.error)
        late = [answer.late_s for answer in answers if answer.late_s > LATE_S]
        computed = tokens.get(COMPUTED)
        return Served(
            server,
            prompts,
            len(answers),
            f"{reasons.total()}" + "".join(f"; {reason}: {count}" for reason, count in reasons.items()),
            f"{len(late)}" + (f", up to {max(late):.2f} s" if late else ""),
            seconds,
            sum(answer.tokens for answer in answers if not answer.error) / seconds,
            computed,
            None if computed is None or reasons else max(0.0, computed + reusable - sum(tokens.values())),
            hit_percent(tokens),
            ", ".join(left_out) or None,
        )


@dataclass(frozen=True)
class Source:
    """Prompt tokens by source, and the bytes that each tier gave, took and holds"""

    server: str
    source: str
    tokens: float
    percent: float
    read_mib: float | None
    written_mib: float | None
    used_mib: float | None


@dataclass(frozen=True)
class Interval:
    """Course of a replay: prompt tokens that were not computed, and the median TTFT"""

    server: str
    until_s: float
    sent: int
    in_flight: int
    hit_percent: float | None
    ttft_p50: float | None


Record = Latency | Served | Source | Interval | Workload | Machine


def sources(server: str, start: Counters, end: Counters) -> list[Source]:
    """Return a record for each source of prompt tokens between two times."""
    tokens = end.tokens(start)
    total, mib = sum(tokens.values()), 2**20
    rows = []
    for source in dict.fromkeys([*tokens, *end.tiers]):
        moved = end.bytes_of(source, start) if source in end.tiers else (None, None, None)
        share = tokens.get(source, 0.0)
        sizes = (None if nbytes is None else nbytes / mib for nbytes in moved)
        rows.append(Source(server, source, share, 100 * share / total if total else 0.0, *sizes))
    return rows


def hit_percent(tokens: Mapping[str, float]) -> float | None:
    """Return the share of prompt tokens that were not computed, if there are any."""
    total = sum(tokens.values())
    return 100 * (1 - tokens[COMPUTED] / total) if total else None


def percentile_ms(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile of durations in seconds, converted to milliseconds."""
    return sorted(seconds)[max(0, -(-len(seconds) * percent // 100) - 1)] * 1e3
