"""A wrong setting is refused by name at the start; an unusable root disables only its tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine.compared import EngineError
from tests.integration.conftest import Ask, in_full
from tests.integration.harness import PROMPT_CHUNKS, Launcher, prompt

PROMPTS = [prompt(seed) for seed in (1, 2)]
OTHERS = [prompt(seed) for seed in range(10, 16)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"secondary_tiers": [{"type": "fs"}]}, ["secondary_tiers[0]", "root_dir"]),
        in_full({"cpu_bytes_to_use": 1024}, ["cpu_bytes_to_use", "131072"]),
        in_full({"cpu_bytes_to_use": "1000TiB"}, ["/dev/shm", "needs 1099", "cpu_bytes_to_use"]),
        in_full({"block_size": 33}, ["block_size"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_setting_is_named(
    launcher: Launcher, llama: Path, wrong: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(EngineError) as refusal:
        launcher.start(llama, {"cpu_bytes_to_use": "64MiB", **wrong})
    message = str(refusal.value).splitlines()[0]
    assert [word for word in words if word not in message] == [], message


def test_unwritable_root(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("not a directory")
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
    assert "chunks stored in host memory were not written (down: " in log


def _fs(root: Path) -> dict[str, Any]:
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
