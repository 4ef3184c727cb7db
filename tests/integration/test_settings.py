"""What is wrong is said at the start, in words; what cannot be used is gone without."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, EngineError, Forge, chunk_files, prompt

STORY = [prompt(seed) for seed in (1, 2)]
OTHERS = [prompt(seed) for seed in range(10, 16)]


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
        ({"cpu_bytes_to_use": "1000TiB"}, ["/dev/shm", str(1000 * 2**40), "cpu_bytes_to_use"]),
        ({"block_size": 33}, ["block_size"]),
        ({"tier_poll_interval_s": 1}, ["tier_poll_interval_s"]),
        ({"canonical_layout": True}, ["canonical_layout"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_named_at_the_start(
    forge: Forge, llama: Path, wrong: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(EngineError) as refusal:
        forge.start(llama, {"cpu_bytes_to_use": "64MiB", **wrong})
    message = str(refusal.value).splitlines()[0]
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize("place", ["below a file", "a file", "read-only"])
def test_a_root_that_cannot_be_written(
    forge: Forge, llama: Path, reference: Ask, tmp_path: Path, place: str
) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    root = {"below a file": file / "root", "a file": file, "read-only": Path("/proc/sys/kvtier")}[place]
    with forge.start(llama, _fs(root)) as engine:
        cold = engine.generate(*STORY)
        engine.generate(*OTHERS)
        again, loaded = engine.served(*STORY)
        metrics = engine.metrics()
        log = engine.log()

    assert cold == again == reference(*STORY)
    assert loaded == {"cpu": len(STORY) * PROMPT_CHUNKS}
    assert metrics.value("kvtier_tier_up", tier="fs") == 0
    assert metrics.value("kvtier_put_dropped_chunks", tier="fs", reason="down") > 0
    assert "tier fs is not used any more" in log
    assert str(root) in log


def test_a_root_that_is_read_only_is_read(forge: Forge, llama: Path, reference: Ask, tmp_path: Path) -> None:
    written, root = tmp_path / "written", tmp_path / "root"
    with forge.start(llama, _fs(written)) as engine:
        engine.served(*STORY)
    before = chunk_files(written)
    root.mkdir()
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", written, root], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with forge.start(llama, _fs(root)) as engine:
            answers, loaded = engine.served(*STORY, *OTHERS)
            metrics = engine.metrics()
    finally:
        subprocess.run(["umount", root], check=True)

    assert answers == reference(*STORY, *OTHERS)
    assert loaded == {"fs": len(STORY) * PROMPT_CHUNKS}
    assert metrics.value("kvtier_put_failed_chunks", tier="fs", reason="erofs") > 0
    assert chunk_files(written) == before


def _fs(root: Path) -> dict[str, Any]:
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
