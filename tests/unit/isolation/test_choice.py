"""The choice of isolation: the configured one, or a thread with a warning if no process can start."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch

from kvtier import KVCaches, PageRef, TieringConfig, TieringManager, open_manager
from kvtier._build import make_tiers, start_executor
from kvtier._core.messages import Event, Get, GetEnded, Put, PutEnded
from kvtier._execution.executor import ExecutorThread, NamedTier
from kvtier._isolation import link as links
from kvtier._isolation.process import AnyExecutor, ExecutorProcess
from kvtier._memory.region import Region
from kvtier.errors import ConfigError, IsolationError
from kvtier_testing.dummy import DummyConfig, DummyTier
from tests.common import wait_until

from .conftest import CHUNK_BYTES, IDENTITY, PATIENCE_S, SLOTS, SWIFT, Harness, Launch, key, make_tier
from .test_managed import processes_of_tiers
from .test_process import resources, until_no_more_than

Begin = Callable[..., AnyExecutor]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start executors with these settings over a tier in memory; the fixture closes them."""
    region, made = Region.unnamed(SLOTS, CHUNK_BYTES), []

    def start(*tiers: NamedTier, tier: str = "dummy", **settings: Any) -> AnyExecutor:
        config = TieringConfig.from_mapping(
            {"cpu_bytes_to_use": SLOTS * CHUNK_BYTES, "secondary_tiers": [{"type": tier}], **settings}
        )
        executor = start_executor(config, tiers or make_tiers(config), IDENTITY, region)
        made.append(executor)
        return executor

    yield start
    for executor in made:
        assert executor.close(0.0, PATIENCE_S)  # a machine may stall for seconds
    region.close()


def works(executor: AnyExecutor) -> bool:
    """Return whether a put and a get of a chunk succeed."""
    executor.submit([Put(1, 0, [key(1)], [0])])
    put = ended(executor)
    executor.submit([Get(2, 0, [key(1)], [1], False)])
    got = ended(executor)
    return isinstance(put, PutEnded) and isinstance(got, GetEnded) and put.kept[0] and not got.reasons


def ended(executor: AnyExecutor) -> PutEnded | GetEnded:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        while executor.events:
            event: Event = executor.events.popleft()
            if isinstance(event, PutEnded | GetEnded):
                return event
        time.sleep(0.001)
    raise AssertionError("no end")


@pytest.fixture(params=["no program", "no descriptor", "no support"])
def nowhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make every process start fail, for one of several reasons; return the reason in the log."""
    if request.param == "no program":
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        return "No such file or directory"
    if request.param == "no descriptor":  # as before Linux 5.3

        def lack(_: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", lack)
        return "Function not implemented"
    monkeypatch.delattr(os, "pidfd_open")  # by a Python built for an older system
    return "pidfd_open"


@pytest.mark.parametrize(
    ("isolation", "kind"),
    [("auto", ExecutorProcess), ("process", ExecutorProcess), ("thread", ExecutorThread)],
)
def test_isolation_chooses_process(
    begin: Begin, caplog: pytest.LogCaptureFixture, isolation: str, kind: type[AnyExecutor]
) -> None:
    executor = begin(isolation=isolation)
    assert isinstance(executor, kind)
    assert works(executor)
    assert not [record for record in caplog.records if record.name.startswith("kvtier")]


def test_no_tiers_no_process(begin: Begin) -> None:
    assert isinstance(begin(isolation="auto", secondary_tiers=[]), ExecutorThread)


def test_auto_falls_back_to_thread(begin: Begin, caplog: pytest.LogCaptureFixture, nowhere: str) -> None:
    begin(isolation="thread")  # the first thread creates lasting objects
    before = resources()
    executor = begin(isolation="auto")
    assert isinstance(executor, ExecutorThread)
    assert works(executor)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert nowhere in record.getMessage()
    assert "set isolation to 'thread'" in record.getMessage()
    assert resources()["children"] <= before["children"]


@pytest.mark.usefixtures("nowhere")
def test_unstartable_process_is_an_error(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    before = resources()
    with pytest.raises(IsolationError, match="set isolation to 'thread'"):
        begin(isolation="process")
    until_no_more_than(before)  # the earlier count may include leftovers of the previous test
    assert not caplog.records


def test_unsendable_tier_runs_in_thread(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    class Homemade(DummyTier):
        pass

    homemade = NamedTier("homemade", lambda: Homemade(DummyConfig()))
    assert isinstance(begin(homemade, isolation="auto"), ExecutorThread)
    assert "does not name its class" in caplog.text
    with pytest.raises(ConfigError, match="does not name its class"):
        begin(homemade, isolation="process")


@pytest.mark.usefixtures("reckless")
@pytest.mark.parametrize(
    "act", [pytest.param("crash_when_loaded", marks=pytest.mark.full), "crash_when_opened"]
)
def test_crashing_tier_stays_outside(launch: Launch, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TEST_CRASH", act)
    it = launch(make_tier("reckless"), times=SWIFT)
    it.until(lambda: len(it.endings) > 1, "two ends")
    assert set(it.endings) == {"crashed"}
    monkeypatch.delenv("KVTIER_TEST_CRASH")
    it.until_up()
    it.hold([1])


def test_slow_start_is_not_awaited(launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "acme_slow.py").write_text(
        "import pathlib, sys, time\n"
        "from kvtier._isolation import child\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
        "sys.exit(child.main(sys.argv[1:]))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(links, "_PROGRAM", "acme_slow")
    it: Harness = launch(make_tier("dummy", deadline_s=600))
    put = it.put([1])
    (tmp_path / "go").touch()  # the start must not have waited
    assert it.kept(put) == [True]
    assert it.endings == []


async def make_manager(**settings: Any) -> TieringManager:
    return await anyio.to_thread.run_sync(lambda: _make_manager(settings))


def _make_manager(settings: dict[str, Any]) -> TieringManager:
    config = TieringConfig.from_mapping(
        {"cpu_bytes_to_use": 16 * 4096, "secondary_tiers": [{"type": "dummy"}], **settings}
    )
    caches = KVCaches((torch.zeros((4, 4096), dtype=torch.int8),), ((PageRef(0, 4096),),))
    return open_manager(config, IDENTITY, caches)


async def test_manager_starts_no_process() -> None:
    async with await make_manager(isolation="auto"):
        assert not processes_of_tiers()
    async with await make_manager(isolation="process"):
        # A process that has just started has no command line yet.
        await anyio.to_thread.run_sync(wait_until, lambda: len(processes_of_tiers()) == 1)
