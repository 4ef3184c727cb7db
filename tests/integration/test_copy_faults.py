"""Copies between device and primary tier fail: never a wrong token, and the engine continues if it can."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine.compared import EngineError
from tests.integration.conftest import Ask
from tests.integration.harness import FAULTS, PROMPT_CHUNKS, TWO_RANKS, Engine, Launcher, prompt

SETTINGS = {"cpu_bytes_to_use": "64MiB"}
RECOMPUTING = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}
ATTEMPTS = 2


@pytest.fixture(scope="module")
def engines(launcher: Launcher, llama: Path) -> Iterator[dict[str, Engine]]:
    """An engine with vLLM's connector, and one with kvtier's, which recomputes requests whose load fails."""
    with (
        launcher.start(llama, SETTINGS, faulty_copies=True) as plain,
        launcher.start(llama, SETTINGS, faulty_copies=True, kv_transfer_config=RECOMPUTING) as recomputing,
    ):
        yield {"plain": plain, "recomputing": recomputing}


@pytest.fixture
def plain(engines: dict[str, Engine]) -> Engine:
    engines["plain"].reset()
    return engines["plain"]


@pytest.fixture
def recomputing(engines: dict[str, Engine]) -> Engine:
    engines["recomputing"].reset()
    return engines["recomputing"]


def _failed(engine: Engine) -> dict[tuple[str, str], float]:
    return {
        (labels["verb"], labels["outcome"]): value
        for name, labels, value in engine.metrics().samples
        if name == "kvtier_copy_failed_total" and value
    }


class Counted:
    """Counts of failed copies since this object was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = _failed(engine)

    def __call__(self) -> dict[tuple[str, str], float]:
        since = {key: value - self._before.get(key, 0) for key, value in _failed(self._engine).items()}
        return {key: value for key, value in since.items() if value}


def test_retried_copy_shows_in_counters(plain: Engine, reference: Ask) -> None:
    counted = Counted(plain)
    plain.fail_copies(stores=1, loads=1)
    cold, _ = plain.served(prompt(1))
    plain.reset(connector=False)
    again = plain.served(prompt(1))

    assert cold == reference(prompt(1))
    assert again == (cold, {"cpu": PROMPT_CHUNKS})
    assert counted() == {("store", "repeated"): 1, ("load", "repeated"): 1}


def test_failed_stores_are_never_read(recomputing: Engine, reference: Ask) -> None:
    counted = Counted(recomputing)
    dropped = recomputing.metrics().value("kvtier_dropped_chunks", verb="store")
    recomputing.fail_copies(stores=ATTEMPTS)
    cold, _ = recomputing.served(prompt(1))
    recomputing.reset(connector=False)
    again = recomputing.served(prompt(1))  # computed, and stored this time
    recomputing.reset(connector=False)
    loaded = recomputing.served(prompt(1))

    assert cold == reference(prompt(1))
    assert again == (cold, {})
    assert loaded == (cold, {"cpu": PROMPT_CHUNKS})
    assert counted() == {("store", "dropped"): 1}
    assert recomputing.metrics().value("kvtier_dropped_chunks", verb="store") - dropped == PROMPT_CHUNKS


def test_failed_load_is_computed(recomputing: Engine, reference: Ask) -> None:
    others = [prompt(seed) for seed in (2, 3)]
    recomputing.served(prompt(1), *others)
    recomputing.reset(connector=False)
    counted = Counted(recomputing)
    before = recomputing.metrics()
    recomputing.fail_copies(loads=ATTEMPTS)
    answers = recomputing.generate(prompt(1))
    failed_after = recomputing.settled()
    rest = recomputing.served(*others)
    recomputing.reset(connector=False)
    # vLLM up to 0.32 never offers the chunks of a load again: the next request stores them.
    dropped = recomputing.served(prompt(1))
    recomputing.reset(connector=False)
    stored_anew = recomputing.served(prompt(1))

    assert answers == reference(prompt(1))
    assert counted() == {("load", "recomputed"): 1}
    assert failed_after.value("kvtier_dropped_chunks", verb="load") == (
        before.value("kvtier_dropped_chunks", verb="load") + PROMPT_CHUNKS
    )
    assert failed_after.value("kvtier_misses", reason="load_failed") >= 1
    assert rest == (reference(*others), {"cpu": 2 * PROMPT_CHUNKS})
    assert dropped in [(answers, {}), stored_anew]
    assert stored_anew == (answers, {"cpu": PROMPT_CHUNKS})


def test_without_connector_load_is_staged(plain: Engine, reference: Ask) -> None:
    plain.served(prompt(1))
    plain.reset(connector=False)
    counted = Counted(plain)
    plain.fail_copies(loads=ATTEMPTS)
    again = plain.served(prompt(1))

    assert again == (reference(prompt(1)), {"cpu": PROMPT_CHUNKS})
    assert counted() == {("load", "staged"): 1}


@pytest.mark.parametrize("connector", ["plain", "recomputing"])
def test_copies_end_before_a_reset_returns(engines: dict[str, Engine], connector: str) -> None:
    """vLLM sleeps right after a reset, and then the cache's memory is gone."""
    engine = engines[connector]
    before, after = _copies_after(engine, prompt(70), "reset")
    assert before > 0
    assert after == 0
    if connector == "recomputing":
        engine.reset()  # vLLM's own connector fails if no step ran before
    engine.step()


def test_no_copy_begins_while_caches_are_unregistered(recomputing: Engine, reference: Ask) -> None:
    asked, counted = prompt(71), Counted(recomputing)
    before, after, meanwhile = _copies_after(recomputing, asked, "unregister")
    assert before > 0
    assert (after, meanwhile) == (0, 0)
    assert counted() == {("store", "dropped"): 1}
    recomputing.reset(connector=False)
    answers, loaded = recomputing.served(asked, asked[::-1])
    assert (answers, loaded) == (reference(asked, asked[::-1]), {"cpu": PROMPT_CHUNKS})


def _copies_after(engine: Engine, asked: list[int], ends: str) -> list[int]:
    counts: list[int] = engine.call("copies_after", module=FAULTS, prompt=asked, ends=ends)["counts"]
    return counts


def test_connector_survives_lost_device(recomputing: Engine, reference: Ask) -> None:
    """This test must be the engine's last: the engine has no device from here on."""
    prompts = [prompt(seed) for seed in range(1, 9)]
    recomputing.served(*prompts)
    recomputing.reset(connector=False)
    counted = Counted(recomputing)
    recomputing.fail_copies(stores=-1, loads=-1)
    start = time.monotonic()
    answers = recomputing.generate(*prompts)
    again = recomputing.generate(*prompts, together=True)
    passed_s = time.monotonic() - start
    metrics = recomputing.until(  # not settled: a store in flight keeps its slots forever
        lambda metrics: metrics.value("kvtier_device_up", worker="0") == 0, "the device is lost"
    )

    assert answers == again == reference(*prompts)
    assert passed_s < 60  # on a busy machine; no request waits for copies
    assert metrics.value("kvtier_misses", reason="device_lost") >= 1
    assert sum(counted().values()) >= 5
    assert recomputing.log().count("nothing is stored or loaded any more") == 1
    assert "the last with: this copy was told to fail" in recomputing.log()


@pytest.mark.full
def test_one_failed_worker_fails_all(launcher: Launcher, llama: Path, reference: Ask) -> None:
    faulty = {**RECOMPUTING, "kv_connector_module_path": "tests.integration.faulty_connector"}
    with launcher.start(
        llama, SETTINGS, faulty_copies=True, kv_transfer_config=faulty, **TWO_RANKS
    ) as engine:
        counted = Counted(engine)
        engine.fail_copies(stores=ATTEMPTS, rank=1)
        cold, _ = engine.served(prompt(1))
        engine.reset(connector=False)
        not_stored = engine.served(prompt(1))
        engine.reset(connector=False)
        engine.fail_copies(loads=ATTEMPTS, rank=1)
        computed, _ = engine.served(prompt(1))
        engine.reset(connector=False)
        dropped = engine.served(prompt(1))
        engine.reset(connector=False)
        loaded = engine.served(prompt(1))
        counts = counted()

    assert cold == computed == reference(prompt(1))
    assert not_stored == dropped == (cold, {})
    assert loaded == (cold, {"cpu": PROMPT_CHUNKS})
    assert counts == {("store", "dropped"): 1, ("load", "recomputed"): 1}


@pytest.mark.full
@pytest.mark.parametrize(
    ("transfer", "settings", "message"),
    [
        ({"kv_connector": "KVTierConnector"}, SETTINGS, 'kv_load_failure_policy is "fail"'),
        (RECOMPUTING, {"cpu_bytes_to_use": 2**26, "spec_name": "CPUOffloadingSpec"}, "set spec_name"),
    ],
)
def test_unsupported_is_refused(
    launcher: Launcher, llama: Path, transfer: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        launcher.start(llama, settings, kv_transfer_config=transfer)
