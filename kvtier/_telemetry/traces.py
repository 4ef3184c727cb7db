"""Spans of lookups, loads, promotions and puts, through OpenTelemetry's API if it is installed.

They go to the process's tracer provider, which the program configures: vLLM by ``otlp_traces_endpoint``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvtier._core.messages import Command, Event, Get, GetEnded, Put, PutEnded, TransferHealth
from kvtier._core.shared import PRIMARY, SharedState
from kvtier._core.transfers import Handle, Pinned
from kvtier._log import GuardedLogger

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = GuardedLogger("kvtier.traces")

REQUEST = "gen_ai.request.id"
"""Where vLLM's own spans have the request's id, too."""

_MOST_REQUESTS = 16


def open_traces(shared: SharedState) -> Traces | None:
    """Return the traces of a core; None if OpenTelemetry is not installed or has no provider."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    try:
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return None
        return Traces(provider.get_tracer("kvtier"), shared)
    except Exception as error:  # A name that is not installed raises a bare StopIteration.
        logger.warning(
            "tracing disabled: OpenTelemetry's tracer provider cannot be used (%r); set "
            "OTEL_PYTHON_TRACER_PROVIDER to one that is installed, or unset it",
            error,
        )
        return None


class Traces:
    """The open spans. Only the owner's thread calls it; no method raises."""

    def __init__(self, tracer: Tracer, shared: SharedState) -> None:
        self._tracer = tracer
        self._shared = shared
        self._transfers: dict[int, Span] = {}
        self._loads: dict[Handle, Span] = {}
        self._has_failed = False

    def submitted(self, commands: Iterable[Command], request: str = "") -> None:
        """Start the spans of gets, for the requests that wait for them, and of puts, for ``request``."""
        with self._guarded():
            for command in commands:
                if isinstance(command, Get | Put) and (transfer := self._shared.transfers.get(command.id)):
                    names = [waiter.name for waiter in transfer.waiters] or [request]
                    name = "kvtier.put" if transfer.is_put else "kvtier.promotion"
                    self._transfers[command.id] = self._begin(name, names, len(command.keys))
                    self._transfers[command.id].set_attribute("kvtier.tier", self._name(command.tier))

    def ended(self, event: Event) -> None:
        if not isinstance(event, GetEnded | PutEnded):
            return
        with self._guarded():
            if (span := self._transfers.pop(event.id, None)) is None:
                return
            results = event.kept if isinstance(event, PutEnded) else [it == it.COPIED for it in event.answers]
            span.set_attribute("kvtier.chunks_done", sum(results))
            span.set_attribute("kvtier.tier_seconds", event.seconds)
            for reason, count in event.reasons.items():
                span.set_attribute(f"kvtier.failed.{reason}", count)
            _end(span, is_failed=event.health in (TransferHealth.BAD, TransferHealth.LATE))

    def load_began(self, pinned: Pinned, request: str) -> None:
        with self._guarded():
            span = self._loads[pinned] = self._begin("kvtier.load", [request], len(pinned.chunks))
            for tier in set(pinned.origins):
                span.set_attribute(f"kvtier.chunks.{self._name(tier)}", pinned.origins.count(tier))

    def load_ended(self, pinned: Pinned, *, is_failed: bool) -> None:
        with self._guarded():
            if (span := self._loads.pop(pinned, None)) is not None:
                _end(span, is_failed=is_failed)

    def looked_up(self, attributes: dict[str, Any], seconds: float, *, is_explained: bool) -> None:
        """Make the span of a request's lookups, which end now, with the explanation as an event."""
        with self._guarded():
            now_ns = time.time_ns()
            span = self._tracer.start_span(
                "kvtier.lookup", start_time=now_ns - int(seconds * 1e9), attributes=attributes
            )
            if is_explained:
                span.add_event("kvtier.explain", attributes, timestamp=now_ns)
            span.end(now_ns)

    def close(self) -> None:
        """End all open spans as failed."""
        for open_spans in (self._transfers, self._loads):
            while open_spans:
                with self._guarded():
                    _end(open_spans.popitem()[1], is_failed=True)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Log the first exception of the tracer provider. No exception may reach the engine's thread."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("the tracer provider failed, spans are lost: %r", error)

    def _begin(self, name: str, requests: Sequence[str], chunks: int) -> Span:
        """Start a span for requests. In vLLM's attribute, the first of several represents all."""
        attributes: dict[str, Any] = {"kvtier.chunks": chunks}
        if named := [request for request in requests if request][:_MOST_REQUESTS]:
            attributes |= {REQUEST: named[0], "kvtier.requests": named}
        return self._tracer.start_span(name, attributes=attributes)

    def _name(self, tier: int | None) -> str:
        return PRIMARY if tier is None else self._shared.tiers[tier].name


def _end(span: Span, *, is_failed: bool) -> None:
    from opentelemetry.trace import StatusCode

    if is_failed:
        span.set_status(StatusCode.ERROR)
    span.end()
