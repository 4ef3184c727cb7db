"""What is wrong is said at the start, in words; what cannot be used is gone without."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import TieringConfig
from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, EngineError, Launcher, chunks_in, prompt

PROMPTS = [prompt(seed) for seed in (1, 2)]
OTHERS = [prompt(seed) for seed in range(10, 16)]


# For each setting a wrong value, of types that JSON has, and what the one line says beside its name.
WRONG: dict[str, tuple[object, str]] = {
    "cpu_bytes_to_use": (-1, "Size of the primary tier"),
    "block_size": (48, "multiple"),
    "blocks_per_chunk": (0, "greater than 0"),
    "eviction_policy": (None, "Who leaves the primary tier first"),
    "store_threshold": (-1, "Store a chunk only"),
    "max_tracker_size": (1.5, "Chunks whose requests are counted"),
    "secondary_tiers": ({"type": "fs"}, "a list of tiers is needed"),
    "offload_prompt_only": ("true", "Store only what was computed for prompts"),
    "self_describing_kv_events": (1, "Send KV events"),
    "canonical_layout": ("yes", "Keep chunks as one worker"),
    "namespace": (7, "part of the identity"),
    "promotion_budget": (2.0, "Share of the primary tier"),
    "request_deadline_s": (True, "a number is needed"),
    "copy_deadline_s": (0, "a device copy that has not ended"),
    "audit_rate": (1.5, "Share of chunks that are audited"),
    "isolation": ("both", "'thread' or 'process'"),
    "isolation_memory_limit": ("1MiB", "Memory of its own that the process of the tiers may have"),
    "drain_on_shutdown_s": ("soon", "Seconds a shutdown waits"),
}


def test_every_setting_has_a_wrong_value_here() -> None:
    assert WRONG.keys() == TieringConfig.model_fields.keys()


@pytest.mark.full
@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_of_any_setting_is_named_with_what_it_should_be(
    launcher: Launcher, llama: Path, key: str
) -> None:
    value, words = WRONG[key]
    with pytest.raises(EngineError) as refusal:
        launcher.start(llama, {"cpu_bytes_to_use": "64MiB", key: value})
    message = str(refusal.value).splitlines()[0]
    assert key in message
    assert words in message


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"evictoin_policy": "lru"}, ["evictoin_policy", "eviction_policy"]),
        ({"eviction_policy": "clock"}, ["eviction_policy", "clock", "lru"]),
        ({"secondary_tiers": [{"type": "tape"}]}, ["secondary_tiers[0].type", "tape", "fs"]),
        ({"secondary_tiers": [{"type": "fs"}]}, ["secondary_tiers[0]", "root_dir"]),
        ({"secondary_tiers": [{"type": "dummy", "sede": 1}]}, ["secondary_tiers[0].sede", "seed"]),
        ({"cpu_bytes_to_use": "many"}, ["cpu_bytes_to_use"]),
        ({"cpu_bytes_to_use": 1024}, ["cpu_bytes_to_use", "131072"]),
        ({"cpu_bytes_to_use": "1000TiB"}, ["/dev/shm", "needs 1099", "cpu_bytes_to_use"]),
        ({"block_size": 33}, ["block_size"]),
        ({"tier_poll_interval_s": 1}, ["tier_poll_interval_s"]),
        ({"canonical_layout": "yes"}, ["canonical_layout", "'yes'", "boolean"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_named_at_the_start(
    launcher: Launcher, llama: Path, wrong: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(EngineError) as refusal:
        launcher.start(llama, {"cpu_bytes_to_use": "64MiB", **wrong})
    message = str(refusal.value).splitlines()[0]
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize("place", ["below a file", "a file", "read-only"])
def test_a_root_that_cannot_be_written(
    launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path, place: str
) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    root = {"below a file": file / "root", "a file": file, "read-only": Path("/proc/sys/kvtier")}[place]
    with launcher.start(llama, _fs(root)) as engine:
        cold = engine.generate(*PROMPTS)
        engine.generate(*OTHERS)
        again, loaded = engine.served(*PROMPTS)
        metrics = engine.metrics()
        log = engine.log()

    assert cold == again == reference(*PROMPTS)
    assert loaded == {"cpu": len(PROMPTS) * PROMPT_CHUNKS}
    assert metrics.value("kvtier_tier_up", tier="fs") == 0
    assert metrics.value("kvtier_put_dropped_chunks", tier="fs", reason="down") > 0
    assert "tier fs disabled, retrying" in log
    assert str(root) in log


@pytest.mark.full
def test_a_root_that_is_read_only_is_read(
    launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    written, root = tmp_path / "written", tmp_path / "root"
    with launcher.start(llama, _fs(written)) as engine:
        engine.served(*PROMPTS)
    before = chunks_in(written)
    root.mkdir()
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", written, root], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with launcher.start(llama, _fs(root)) as engine:
            answers, loaded = engine.served(*PROMPTS, *OTHERS)
            metrics = engine.metrics()
    finally:
        subprocess.run(["umount", root], check=True)

    assert answers == reference(*PROMPTS, *OTHERS)
    assert loaded == {"fs": len(PROMPTS) * PROMPT_CHUNKS}
    assert metrics.value("kvtier_put_failed_chunks", tier="fs", reason="erofs") > 0
    assert chunks_in(written) == before


def _fs(root: Path) -> dict[str, Any]:
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
