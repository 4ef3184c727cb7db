"""The simulation covers its events, repeats exactly, and accepts other implementations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from kvtier.keys import OffloadKey
from kvtier.policies import LRU
from kvtier.tiers import Batch, Outcome
from kvtier_testing.dummy import DummyConfig, DummyTier
from kvtier_testing.sim import Backend, Overrides, SimTier, SimTierConfig, Violation, run
from kvtier_testing.sim.__main__ import main
from kvtier_testing.sim.backend import corrupt
from kvtier_testing.sim.model import GARBAGE

SEEDS = range(600)
TRACE = """
import hashlib, sys
from kvtier_testing.sim import run
for seed in range(2):
    lines = []
    run(seed, engines=1 + 2 * seed, trace=lines.append)
    print(seed, len(lines), hashlib.sha256("\\n".join(lines).encode()).hexdigest())
"""


def test_seed_repeats_across_processes() -> None:
    traces = {
        subprocess.run(
            [sys.executable, "-c", TRACE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(traces) == 1
    assert len(set(traces.pop().splitlines())) == 2


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """Counts of events over some runs."""
    total: Counter[str] = Counter()
    for seed in SEEDS:
        total += run(seed).seen
    return total


SHOWN = (
    *("crash", "shutdown", "reset", "aborted", "cancelled", "copy failed"),
    *("chunks offered with holes", "core dropped store incomplete"),
    *("chunks located", "chunks written"),
    *("chunks left by a process", "core put adopted", "core fetched adopted", "core loaded adopted"),
    *("answer lost", "bits rotted", "cancelled by nobody", "chunks damaged", "put arrived twice"),
    *(f"{verb} {how}" for verb in ("get", "put", "contains") for how in ("failed", "hung", "late")),
    *("open hung", "open failed", "reset hung", "touch failed"),
    *("core loaded cpu", "core loaded", "core evicted", "core backfilled", "core expired", "core tier_down"),
    *("core miss deadline", "core miss budget", "core miss filter", "core miss load_failed"),
    *("shared by another engine", "core waits arrived", "core waits in_vain", "core waits aborted"),
    *("core miss not_arrived", "core waits gave_up"),
    *("core get_failed checksum", "core get_failed torn", "core get_failed foreign"),
    *("core put_failed full", "core overdue get", "core overdue put"),
    *("core put_dropped backlog", "core put_dropped back_pressure", "core store_refused no_slot"),
    *(f"core {what} {why}" for what in ("put_dropped", "skipped") for why in ("down", "breaker_open")),
    *("core put_dropped not_reused", "core put_dropped write_budget"),
    *("core put_dropped unresponsive", "core skipped unresponsive", "core skipped filter"),
    *(f"core retries {verb} {how}" for verb in ("get", "put") for how in ("helped", "failed")),
    *("core retries get no_time", "core retries get no_budget", "core prefetched"),
    *("core released", "core keep_refused budget"),
    *(f"core breaker_opened {verb} {why}" for verb in ("get", "put") for why in ("failures", "overdue")),
    *("core breaker_opened get probe", "core breaker_closed get", "core breaker_closed put"),
)


@pytest.mark.full
def test_every_event_happens(seen: Counter[str]) -> None:
    """The simulation does not test an event that never happens in it."""
    assert [what for what in SHOWN if not seen[what]] == []


@pytest.mark.full
def test_stores_are_mostly_useful(seen: Counter[str]) -> None:
    """If nearly everything failed, wrong bytes could not show."""
    assert seen["chunks loaded"] > seen["chunks stored"] / 10
    assert seen["core loaded"] > seen["core loaded cpu"] / 20


PEERS_SHOWN = (
    *("crash", "shutdown", "reset", "core get_failed lease", "core get_failed transfer"),
    *("peers lease", "peers timeout", "peers connection", "peers transfer"),
)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_peer_event_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += run(seed, engines=4).seen
    assert [what for what in PEERS_SHOWN if not seen[what]] == []


@pytest.mark.parametrize("trailer", [b"", b"trailer"])
def test_damage_changes_bytes(trailer: bytes) -> None:
    """A chunk that ends like a torn one must still change when torn."""
    for payload in (GARBAGE[:-1] + b"x", b"x" + GARBAGE[1:], b"x" * (len(GARBAGE) - 1) + GARBAGE[-1:]):
        for seed in range(1000):
            assert corrupt(Random(seed), payload, trailer) != (payload, trailer)


# --- other implementations ------------------------------------------------------------------------


def dummy(backend: Backend) -> DummyTier:
    return DummyTier(DummyConfig(get_latency_s=0.001, complete_index=backend.capacity % 2 == 0))


def run_some(count: int, given: Overrides) -> None:
    for seed in range(count):
        run(seed, given)


def test_own_tier() -> None:
    run_some(20, Overrides(tier=dummy))


class Forgetful(SimTier):
    """Ignores a reset, and keeps earlier chunks."""

    async def reset(self) -> None:
        pass


class Careless(SimTier):
    """Overwrites the slots shortly after the get has ended."""

    verifies = True

    async def get(self, batch: Batch) -> Outcome:
        outcome = await super().get(batch)
        views = batch.views
        self.backend.world.loop.call_later(0.01, lambda: [view.__setitem__(0, 0) for view in views])
        return outcome


class Trusting(SimTier):
    """Claims to verify its chunks, and does not."""

    verifies = True


@pytest.mark.parametrize("tier", [Forgetful, Careless, Trusting])
def test_bad_tier_is_found(tier: type[SimTier]) -> None:
    def make(backend: Backend) -> SimTier:
        return tier(SimTierConfig(), backend)

    with pytest.raises(Violation):
        run_some(200, Overrides(tier=make))


class Stale(LRU):
    """Evicts pinned chunks."""

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        pass


def test_bad_policy_is_found() -> None:
    with pytest.raises(AssertionError):
        run_some(50, Overrides(policy=Stale))


# --- the command ---------------------------------------------------------------------------------


def test_command_runs_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "8", "--jobs", "2", "--show"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("8 runs")
    assert "chunks stored" in told


def test_command_runs_many_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--jobs", "1", "--engines", "3"]) == 0
    assert main(["--fleet", "5"]) == 0
    assert "5 engines, 25 connections" in capsys.readouterr().out
