"""The main job: serve computed chunks from the primary tier, and from files after a restart.

After a reset, no tier returns older chunks, even after a restart.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES
from tests.integration.conftest import Ask, from_vllm
from tests.integration.harness import PROMPT_CHUNKS, Launcher, namespaces, prompt

pytestmark = pytest.mark.releases

PROMPTS = [prompt(seed) for seed in (1, 2, 3)]
OTHERS = [prompt(seed) for seed in range(10, 16)]  # more than the device cache holds
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS


def test_restart_serves_from_files(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    with launcher.start(llama, settings) as engine:
        cold, loaded_cold = engine.served(*PROMPTS)
        engine.generate(*OTHERS)
        again, loaded_again = engine.served(*PROMPTS)
        (region,) = engine.regions
        kinds = (*COUNTERS.values(), *BYTES.values(), *GAUGES.values())
        assert {metric.name for metric in kinds} <= engine.metrics().declared  # otherwise vLLM would assert
    assert not region.exists()
    with launcher.start(llama, settings) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS)
        engine.generate(*OTHERS)
        from_memory, loaded_from_memory = engine.served(*PROMPTS)

    assert cold == again == restarted == from_memory == reference(*PROMPTS)
    assert (loaded_cold, loaded_again) == ({}, {"cpu": CHUNKS})
    assert (loaded_restarted, loaded_from_memory) == ({"fs": CHUNKS}, {"cpu": CHUNKS})


def test_reset_and_sleep_hide_chunks(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    with launcher.start(llama, settings) as engine:
        for _ in range(3):
            engine.generate(*PROMPTS, together=True)
            engine.reset()  # with stores and puts in flight
        after_reset, loaded_after_reset = engine.served(*PROMPTS)
        metrics = engine.settled()
        engine.generate(*OTHERS)
        again, loaded_again = engine.served(*PROMPTS)
        engine.sleep()
        after_sleep, loaded_after_sleep = engine.served(*PROMPTS)
        engine.reset()
    with launcher.start(llama, settings) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS)

    assert after_reset == again == after_sleep == restarted == reference(*PROMPTS)
    assert loaded_after_reset == loaded_after_sleep == {}
    assert metrics.value("kvtier_free_slots") == metrics.value("kvtier_slots") - CHUNKS
    assert loaded_again == {"cpu": CHUNKS}
    assert loaded_restarted == {}


@pytest.mark.full
@pytest.mark.parametrize("plugins", ["", "kvtier"])
def test_found_by_path_and_plugin(
    launcher: Launcher, llama: Path, settings: dict[str, Any], plugins: str
) -> None:
    path = {} if plugins else {"spec_module_path": "kvtier.adapters.vllm.spec"}
    with launcher.start(llama, {**settings, **path}, environment={"VLLM_PLUGINS": plugins}) as engine:
        cold = engine.generate(*PROMPTS)
        engine.generate(*OTHERS)
        assert engine.served(*PROMPTS) == (cold, {"cpu": CHUNKS})


@from_vllm((0, 33), "publishes no configuration")
def test_configuration_is_a_metric(launcher: Launcher, llama: Path, settings: dict[str, Any]) -> None:
    with launcher.start(llama, {**settings, "eviction_policy": "arc"}) as engine:
        samples = engine.settled().samples
    published = [labels for name, labels, _ in samples if name == "vllm:kv_offload_config_info" and labels]
    expected = {
        "kvtier_version": metadata.version("kvtier"),
        "eviction_policy": "arc",
        "secondary_tiers": "fs",
    }
    assert [expected.items() <= labels.items() for labels in published] == [True]


def test_replicas_share_lower_tiers(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], tmp_path: Path
) -> None:
    # vLLM names the replicas of a data-parallel engine like this.
    ids: list[dict[str, Any]] = [
        {"kv_transfer_config": {"engine_id": f"replicas_dp{rank}"}} for rank in range(2)
    ]
    with (
        launcher.start(llama, settings, **ids[0]) as first,
        launcher.start(llama, settings, **ids[1]) as second,
    ):
        regions = [path.name for engine in (first, second) for path in engine.regions]
        by_first, _ = first.served(*PROMPTS)
        by_second, loaded = second.served(*PROMPTS)
        first.tell("generate", prompts=OTHERS, output_tokens=8)
        second.tell("generate", prompts=OTHERS[::-1], output_tokens=8)
        at_once = first.hear("generate")["answers"], second.hear("generate")["answers"][::-1]
        second.settled()
        first.settled()

    assert [name.rpartition(".")[0] for name in regions] == ["kvtier_replicas_dp0", "kvtier_replicas_dp1"]
    assert by_first == by_second == reference(*PROMPTS)
    assert loaded == {"fs": CHUNKS}
    assert at_once == (reference(*OTHERS), reference(*OTHERS))
    assert len(namespaces(tmp_path / "root")) == 1
