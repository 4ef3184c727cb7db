"""What tells a model's weights from others at the same path."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.adapters.vllm._identity import weights_fingerprint

WEIGHTS = bytes(range(256)) * 4096


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.pt", "model.pth", "model.gguf"])
def test_other_bytes_of_the_same_length_have_another_fingerprint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WEIGHTS)
    before = weights_fingerprint(tmp_path)
    assert before == weights_fingerprint(tmp_path)
    (tmp_path / name).write_bytes(WEIGHTS[::-1])
    assert weights_fingerprint(tmp_path) not in (before, None)


def test_a_model_that_is_one_file_has_one(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(WEIGHTS)
    before = weights_fingerprint(model)
    model.write_bytes(WEIGHTS[1:] + WEIGHTS[:1])
    assert None is not weights_fingerprint(model) != before


def test_a_name_on_a_hub_has_none() -> None:
    assert weights_fingerprint(Path("organisation/model")) is None
