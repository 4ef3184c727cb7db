"""Spans of the core's work: they carry the requests' ids; there are none if tracing is off."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtier._core.messages import Command, Get, GetEnded, Put, PutEnded, TransferHealth
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier._execution.driver import Driver
from kvtier._telemetry.traces import open_traces
from kvtier.tiers import GuardedLogger
from kvtier_testing.dummy import DummyConfig
from tests.unit.core.world import COPIED, HIT, MISSING, ask, keys, make, reserve
from tests.unit.test_manager import Deaf, opened, prompt

logger = GuardedLogger("kvtier.tests")


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The exporter of a provider that the program configured."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


class Sent:
    """Receives commands in place of an executor."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def submit(self, commands: Sequence[Command]) -> None:
        self.commands += commands

    def take(self) -> list[Command]:
        taken, self.commands = self.commands, []
        return taken


def driven(**more: Any) -> tuple[Tiering, Driver, Sent]:
    core, sent = make(**more), Sent()
    return core, Driver(core, sent.submit, logger, clock=lambda: 0.0), sent


def spans(exporter: InMemorySpanExporter) -> list[tuple[str, dict[str, Any], bool]]:
    """Return the ended spans: name, attributes, and whether they succeeded."""
    return [
        (span.name, dict(span.attributes or {}), span.status.is_ok) for span in exporter.get_finished_spans()
    ]


def test_promotion_names_waiters(exporter: InMemorySpanExporter) -> None:
    core, driver, sent = driven()
    one, two, prompt = Request("one"), Request("two"), keys("a", 3)
    ask(core, one, prompt)
    ask(core, two, prompt)
    driver.settle()
    (fetch,) = sent.take()
    assert isinstance(fetch, Get)
    assert spans(exporter) == []
    driver.on_event(GetEnded(fetch.id, [COPIED, MISSING, MISSING], {"checksum": 1}, 0.5, TransferHealth.BAD))
    (span,) = spans(exporter)
    assert span == (
        "kvtier.promotion",
        {
            "gen_ai.request.id": "one",
            "kvtier.requests": ("one", "two"),
            "kvtier.chunks": 3,
            "kvtier.tier": "t0",
            "kvtier.chunks_done": 1,
            "kvtier.tier_seconds": 0.5,
            "kvtier.failed.checksum": 1,
        },
        False,
    )


def test_put_names_its_request(exporter: InMemorySpanExporter) -> None:
    core, driver, sent = driven(tiers=2)
    driver.commit(reserve(core, keys("a", 2)), "storing")
    for put in sent.take():
        assert isinstance(put, Put)
        driver.on_event(PutEnded(put.id, [True, False], {"full": 1}, 0.1, TransferHealth.GOOD))
    for number, (name, attributes, is_ok) in enumerate(spans(exporter)):
        assert (name, is_ok, attributes["gen_ai.request.id"]) == ("kvtier.put", True, "storing")
        assert (attributes["kvtier.tier"], attributes["kvtier.chunks_done"]) == (f"t{number}", 1)
    assert len(spans(exporter)) == 2


def test_load_lasts_through_copies(exporter: InMemorySpanExporter) -> None:
    core, driver, _ = driven(tiers=0)
    prompt, request = keys("a", 2), Request("one")
    driver.commit(reserve(core, prompt))
    for is_failed in (False, True):
        assert ask(core, request, prompt) == [HIT, HIT]
        pinned = core.acquire(prompt, request)
        assert driver.traces is not None
        driver.traces.load_began(pinned, "one")
        driver.end_load(pinned, failed=is_failed)
    expected = {
        "gen_ai.request.id": "one",
        "kvtier.requests": ("one",),
        "kvtier.chunks": 2,
        "kvtier.chunks.cpu": 2,
    }
    assert spans(exporter) == [("kvtier.load", expected, True), ("kvtier.load", expected, False)]


def test_close_fails_unfinished(exporter: InMemorySpanExporter) -> None:
    core, driver, sent = driven()
    driver.commit(reserve(core, stored := keys("a", 2)), "storing")
    (put,), request = sent.take(), Request("one")
    assert ask(core, request, stored) == [HIT, HIT]
    assert driver.traces is not None
    driver.traces.load_began(core.acquire(stored, request), "one")
    for _ in range(2):
        driver.close()
    assert [(name, is_ok) for name, _, is_ok in spans(exporter)] == [
        ("kvtier.put", False),
        ("kvtier.load", False),
    ]
    assert isinstance(put, Put)
    driver.on_event(PutEnded(put.id, [True, True]))
    assert len(spans(exporter)) == 2


async def test_abandoned_put_has_failed(exporter: InMemorySpanExporter) -> None:
    deaf, tasks = Deaf(DummyConfig(deadline_s=600)), asyncio.all_tasks()
    with anyio.fail_after(30):
        async with opened(deaf, drain_s=0.01, close_s=0.05) as it:
            await it.store(prompt(1, 2))
            await deaf.begun.wait()
        assert [(name, is_ok) for name, _, is_ok in spans(exporter)] == [("kvtier.put", False)]
        deaf.let_go.set()
        if left := asyncio.all_tasks() - tasks:
            await asyncio.wait(left)
    await anyio.to_thread.run_sync(it.region.close)  # waits for the thread that has acquired the memory


def test_no_traces_without_provider() -> None:
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    _, driver, _ = driven()
    assert driver.traces is None


def test_missing_api_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert open_traces(make().shared) is None


def test_missing_provider_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_PYTHON_TRACER_PROVIDER", "missing")
    assert open_traces(make().shared) is None
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvtier.traces"]
    assert "StopIteration" in line
    assert "OTEL_PYTHON_TRACER_PROVIDER" in line


def test_provider_without_tracer_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def get_tracer(self, *arguments: Any, **more: Any) -> Any:
            raise RuntimeError("no tracer left")

    monkeypatch.setattr(trace, "get_tracer_provider", Failing)
    assert open_traces(make().shared) is None
    (line,) = caplog.records
    assert "no tracer left" in line.getMessage()


def test_failing_provider_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def get_tracer(self, *arguments: Any, **more: Any) -> Failing:
            return self

        def start_span(self, *arguments: Any, **more: Any) -> Any:
            raise RuntimeError("no room for spans")

    monkeypatch.setattr(trace, "get_tracer_provider", Failing)
    core, driver, sent = driven()
    for number in range(3):
        driver.commit(reserve(core, keys(f"a{number}", 2)))
        for put in sent.take():
            assert isinstance(put, Put)
            driver.on_event(PutEnded(put.id, [True, True]))
    (line,) = caplog.records
    assert "no room for spans" in line.getMessage()
