"""Another model at the same path finds none of the previous model's chunks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.integration.conftest import Ask, in_full
from tests.integration.harness import Launcher, namespaces, prompt

PROMPTS = [prompt(1), prompt(2)]


def _other_weights(model: Path) -> None:
    """Negate every weight; the file keeps its length."""
    path = model / "model.safetensors"
    held = path.read_bytes()
    header = 8 + int.from_bytes(held[:8], "little")
    path.write_bytes(held[:header] + (-np.frombuffer(held[header:], np.float32)).tobytes())


def _other_rope(model: Path) -> None:
    path = model / "config.json"
    fields = json.loads(path.read_text())
    rope = fields.get("rope_parameters", fields)
    assert rope["rope_theta"] != 500.0
    rope["rope_theta"] = 500.0
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("change", [_other_weights, in_full(_other_rope)])
def test_other_model_at_same_path(
    launcher: Launcher,
    llama: Path,
    reference: Ask,
    tmp_path: Path,
    change: Callable[[Path], None],
) -> None:
    model, root = shutil.copytree(llama, tmp_path / "model"), tmp_path / "root"
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
    with launcher.start(model, settings) as engine:
        engine.served(*PROMPTS)
    change(model)
    with launcher.start(model, settings) as engine:
        answers, loaded = engine.served(*PROMPTS)

    assert answers != reference(*PROMPTS)
    assert loaded == {}
    assert len(namespaces(root)) == 2
