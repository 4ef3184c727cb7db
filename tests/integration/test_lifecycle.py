"""The engine's life: memory pressure, sleep, new weights, shutdown; and the related settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask
from tests.integration.faulty_backends import Files
from tests.integration.harness import (
    PATIENCE_S,
    PROMPT_CHUNKS,
    UNTIL_S,
    Launcher,
    chunks_in,
    patient,
    prompt,
    wait_until_removed,
)

PROMPTS = [prompt(seed) for seed in (1, 2)]
OTHERS = [prompt(seed) for seed in range(10, 16)]
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS


def _fs(root: Path, **more: Any) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root), **more}


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.full
def test_later_tier_fills_first(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    first, second = _fs(tmp_path / "first", name="first"), _fs(tmp_path / "second", name="second")
    size = {"cpu_bytes_to_use": "64MiB"}
    for tier, stored in ((first, PROMPTS[0]), (second, PROMPTS[1])):
        with launcher.start(llama, {**size, "secondary_tiers": [tier]}) as engine:
            engine.served(stored)
    with launcher.start(llama, {**size, "secondary_tiers": [first, second]}) as engine:
        from_both = engine.served(*PROMPTS)
        metrics = engine.settled()
    with launcher.start(llama, {**size, "secondary_tiers": [first]}) as engine:
        from_first = engine.served(*PROMPTS)

    expected = reference(*PROMPTS)
    assert from_both == (expected, {"first": PROMPT_CHUNKS, "second": PROMPT_CHUNKS})
    assert metrics.value("kvtier_backfilled_chunks", tier="first") == PROMPT_CHUNKS
    assert metrics.value("kvtier_put_chunks", tier="first") == PROMPT_CHUNKS
    assert from_first == (expected, {"first": CHUNKS})


@pytest.mark.full
def test_threshold_holds_for_all_tiers(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], tmp_path: Path
) -> None:
    with launcher.start(llama, {**settings, "store_threshold": 2}) as engine:
        loads = []
        for _ in range(3):
            engine.reset(connector=False)
            answers, loaded = engine.served(*PROMPTS)
            loads.append((loaded, len(chunks_in(tmp_path / "root"))))
            assert answers == reference(*PROMPTS)
        refused = engine.metrics().value("kvtier_store_refused_chunks", reason="store_threshold")
    with launcher.start(llama, settings) as engine:
        restarted = engine.served(*PROMPTS)

    assert loads == [({}, 0), ({}, CHUNKS), ({"cpu": CHUNKS}, CHUNKS)]
    assert refused == CHUNKS
    assert restarted == (reference(*PROMPTS), {"fs": CHUNKS})


@pytest.mark.full
def test_vllm_option_sets_size(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    """``--kv-offloading-size`` sets the connector and the bytes; other settings stay in their usual place."""
    extra = {"spec_name": "KVTierOffloadingSpec", **patient({"secondary_tiers": [_fs(tmp_path)]})}
    transfer = {"kv_connector_extra_config": extra}
    with launcher.start(llama, kv_offloading_size=1 / 16, kv_transfer_config=transfer) as engine:
        engine.has_kvtier = True
        engine.served(*PROMPTS)
        engine.reset(connector=False)
        assert engine.served(*PROMPTS) == (reference(*PROMPTS), {"cpu": CHUNKS})
        assert engine.metrics().value("kvtier_slots") == 64 * 2**20 // 2**17


# --- preemption -----------------------------------------------------------------------------------


def test_preempted_requests_are_reloaded(launcher: Launcher, llama: Path, reference: Ask) -> None:
    prompts = [prompt(seed, 130) for seed in range(6)]
    settings = {"cpu_bytes_to_use": "64MiB", "offload_prompt_only": False}
    with launcher.start(llama, settings, num_gpu_blocks_override=26, max_model_len=512) as engine:
        answers = engine.generate(*prompts, output_tokens=60, together=True)
        metrics = engine.settled()

    assert answers == reference(*prompts, output_tokens=60)
    assert metrics.value("vllm:num_preemptions") > 0
    assert metrics.loaded()["cpu"] >= metrics.value("vllm:num_preemptions")
    assert metrics.is_idle


# --- resets during running requests -----------------------------------------------------------------


@pytest.mark.parametrize("preempts", [False, True])
def test_reset_blocks_are_not_stored(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], preempts: bool
) -> None:
    """vLLM resets the connector even if running requests keep their blocks, and does not report it."""
    running, output_tokens = OTHERS[:3], 40
    with launcher.start(llama, settings) as engine:
        engine.served(*PROMPTS)
        over = engine.call("requests", prompts=running, output_tokens=output_tokens, resets=[(2, preempts)])
        refused = engine.settled().value("kvtier_store_refused_chunks", reason="reset")
        engine.reset(connector=False)
        of_before = engine.served(*PROMPTS)
        again = engine.served(*running)
        engine.reset()
        engine.served(*PROMPTS)
        engine.reset(connector=False)
        after = engine.served(*PROMPTS)
        log = engine.log()

    chunks = len(running) * PROMPT_CHUNKS
    assert over["answers"] == reference(*running, output_tokens=output_tokens)
    assert over["were_reset"] == [preempts]
    assert refused == (0 if preempts else chunks)
    assert ("nothing is stored until the next reset" in log) is not preempts
    assert of_before == (reference(*PROMPTS), {})
    assert again == (reference(*running), {"cpu": chunks} if preempts else {})
    assert after == (reference(*PROMPTS), {"cpu": CHUNKS})


def test_reset_of_the_device_reloads_running_requests(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    """vLLM preempts them between two steps, so the next step can load them."""
    running, output_tokens = OTHERS[:3], 40
    connector = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}
    with launcher.start(llama, settings, kv_transfer_config=connector) as engine:
        engine.served(*running)
        engine.reset(connector=False)
        before = engine.settled().loaded()
        over = engine.call(
            "requests", prompts=running, output_tokens=output_tokens, resets=[(2, True)], connector=False
        )
        metrics = engine.settled()

    assert over["answers"] == reference(*running, output_tokens=output_tokens)
    assert over["were_reset"] == [True]
    assert metrics.loaded()["cpu"] == before.get("cpu", 0) + 2 * len(running) * PROMPT_CHUNKS
    assert metrics.is_idle


def test_resumed_request_keeps_old_blocks(launcher: Launcher, llama: Path, settings: dict[str, Any]) -> None:
    """vLLM does not report that a preempted request without a whole chunk runs again, and has blocks."""
    short = prompt(20, 70)
    longer = prompt(21, shared=short[:64])
    with launcher.start(llama, {**settings, "blocks_per_chunk": 4}) as engine:
        over = engine.call("requests", prompts=[short], output_tokens=40, resets=[(2, True), (4, False)])
        engine.generate(longer)
        stored = engine.settled().value("kvtier_stored_chunks")

    assert over["were_reset"] == [True, False]
    assert stored == 0


# --- new weights ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(make_llama: Callable[..., Path]) -> Path:
    """The same model with other weights."""
    return make_llama(seed=2)


@pytest.fixture(scope="module")
def answers_of_trained(launcher: Launcher, trained: Path) -> list[list[int]]:
    with launcher.start(trained, enable_prefix_caching=False) as engine:
        return engine.generate(*PROMPTS)


@pytest.mark.full
@pytest.mark.parametrize("told_by", ["sleep", "a reset", "a reset of the device"])
def test_new_weights_need_new_chunks(
    launcher: Launcher,
    llama: Path,
    trained: Path,
    reference: Ask,
    answers_of_trained: list[list[int]],
    settings: dict[str, Any],
    told_by: str,
) -> None:
    with launcher.start(llama, settings) as engine:
        engine.served(*PROMPTS)
        if told_by == "sleep":
            engine.sleep(weights=trained)
        else:
            engine.call("reload", weights=str(trained))
            engine.reset(connector=told_by == "a reset")
        after = engine.served(*PROMPTS)
        engine.reset(connector=False)
        again = engine.served(*PROMPTS)
    with launcher.start(llama, settings) as engine:  # with the weights in its files: the first ones
        restarted = engine.served(*PROMPTS)

    assert answers_of_trained != reference(*PROMPTS)
    assert after == (answers_of_trained, {})
    assert again == (answers_of_trained, {"cpu": CHUNKS})
    assert restarted == (reference(*PROMPTS), {})


# --- shutdown -------------------------------------------------------------------------------------


def test_confirmed_chunks_survive(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    """Stores not yet reported by the workers are lost: their outcome is unknown."""
    stored = "kvtier_stored_chunks"
    with launcher.start(llama, {**settings, "drain_on_shutdown_s": PATIENCE_S}) as engine:
        engine.generate(*PROMPTS, *OTHERS, together=True)
        told = engine.until(lambda metrics: metrics.value(stored) >= CHUNKS, "some stores are confirmed")
        confirmed = told.value(stored)
    with launcher.start(llama, settings) as engine:
        answers, loaded = engine.served(*PROMPTS, *OTHERS)
    assert answers == reference(*PROMPTS, *OTHERS)
    assert loaded["fs"] >= confirmed


@pytest.mark.full
def test_hung_tier_delays_nothing(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    hanging = {"type": "dummy", "hang_rate": 1.0}
    tiers = [hanging, *settings["secondary_tiers"]]
    with launcher.start(llama, {**settings, "secondary_tiers": tiers, "drain_on_shutdown_s": 3.0}) as engine:
        engine.generate(*PROMPTS)
        engine.until(lambda metrics: metrics.value("kvtier_stored_chunks") == CHUNKS, "all is confirmed")
        begin = time.monotonic()
        engine.stop()
        took_s = time.monotonic() - begin
        log = engine.log()
    assert f"tier dummy: {CHUNKS} of {CHUNKS} chunks in flight at the shutdown were not written" in log
    with launcher.start(llama, settings) as engine:
        assert engine.served(*PROMPTS) == (reference(*PROMPTS), {"fs": CHUNKS})
    assert 3.0 <= took_s < UNTIL_S  # the drain and the engine's exit; a hang would last forever


@pytest.mark.full
def test_hung_disk_delays_no_shutdown(
    launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    """vLLM kills an engine that takes longer than 5 s to stop. The tier process still hangs in the kernel."""
    with ExitStack() as stack:
        backend = Files(tmp_path, stack)
        settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [backend.settings]}
        environment = {**backend.launch["environment"], "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with launcher.start(llama, settings, environment=environment) as engine:
            (region,) = engine.regions
            engine.generate(*PROMPTS)
            engine.settled()
            backend.begin("hang")
            assert engine.generate(*OTHERS) == reference(*OTHERS)
            began_s = time.monotonic()
            engine.stop()
            took_s = time.monotonic() - began_s
            log = engine.log()
        assert took_s < UNTIL_S, log[-2000:]
        # vLLM waits for its workers first; if that takes its 5 s, it never shuts kvtier down.
        assert "in flight at the shutdown were not written" in log or "force killing" in log
        wait_until_removed([region])
