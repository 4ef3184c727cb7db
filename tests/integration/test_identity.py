"""Who shares a root's chunks: the same cache, however it is spelled, and nobody else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LLAMA, Ask, in_full
from tests.integration.harness import PROMPT_CHUNKS, Launcher, Tokens, namespaces, prompt

PROMPTS = [prompt(1), prompt(2)]
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """Return a copy of the model that may be changed."""
    return shutil.copytree(llama, tmp_path / "model")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": "64MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
    }


@pytest.fixture
def fill(launcher: Launcher, model: Path, settings: dict[str, Any]) -> None:
    """Have a first engine write its chunks."""
    with launcher.start(model, settings) as engine:
        engine.served(*PROMPTS)


def _other_weights(model: Path, make_llama: Callable[..., Path]) -> None:
    shutil.rmtree(model)
    make_llama(model, seed=2)


def _other_rope(model: Path, make_llama: Callable[..., Path]) -> None:
    path = model / "config.json"
    fields = json.loads(path.read_text())
    rope = fields.get("rope_parameters", fields)
    assert rope["rope_theta"] != 500.0
    rope["rope_theta"] = 500.0
    path.write_text(json.dumps(fields))


@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize("change", [_other_weights, in_full(_other_rope)])
def test_another_model_at_the_same_path(
    launcher: Launcher,
    model: Path,
    make_llama: Callable[..., Path],
    reference: Ask,
    settings: dict[str, Any],
    tmp_path: Path,
    change: Callable[[Path, Callable[..., Path]], None],
) -> None:
    change(model, make_llama)
    with launcher.start(model, settings) as engine:
        answers, loaded = engine.served(*PROMPTS)
    with launcher.start(model) as engine:
        expected = engine.generate(*PROMPTS)

    assert answers == expected != reference(*PROMPTS)
    assert loaded == {}
    assert len(namespaces(tmp_path / "root")) == 2


@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize(
    ("more_settings", "arguments"),
    [
        in_full({}, {"revision": "another"}),
        in_full({}, {"dtype": "bfloat16"}),
        in_full({}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}),
        in_full({}, {"block_size": 64}),
        in_full({}, {"prefix_caching_hash_algo": "sha256_cbor"}),
        in_full({"block_size": 64}, {}),
        in_full({"namespace": "mine"}, {}),
    ],
    ids=["revision", "dtype", "kv_cache_dtype", "block_size", "hash", "chunk_size", "namespace"],
)
def test_another_cache_of_the_same_model(
    launcher: Launcher,
    model: Path,
    settings: dict[str, Any],
    tmp_path: Path,
    more_settings: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    with launcher.start(model, {**settings, **more_settings}, **arguments) as engine:
        answers, loaded = engine.served(*PROMPTS)
    with launcher.start(model, **arguments) as engine:
        expected = engine.generate(*PROMPTS)

    assert loaded == {}
    assert answers == expected
    assert len(namespaces(tmp_path / "root")) == 2


PHI3 = {
    **LLAMA,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 1024,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [4.0] * 32},
    "pad_token_id": 0,
}


@pytest.mark.full
def test_engines_of_different_length_share_nothing_where_the_embedding_depends_on_it(
    launcher: Launcher, settings: dict[str, Any], tmp_path: Path
) -> None:
    """LongRoPE picks its factors by ``max_model_len``: the same prompt has other keys and values."""
    model = launcher.make_model(tmp_path / "model", "Phi3Config", "Phi3ForCausalLM", PHI3)
    room = {"num_gpu_blocks_override": 200}
    lengths: list[dict[str, Any]] = [{"max_model_len": tokens, **room} for tokens in (1024, 4096)]
    expected: list[list[Tokens]] = []
    cold: list[Any] = []
    restarted: list[Any] = []
    for length in lengths:
        with launcher.start(model, **length) as engine:
            expected.append(engine.generate(*PROMPTS))
    for served in (cold, restarted):
        for length in lengths:
            with launcher.start(model, settings, **length) as engine:
                served.append(engine.served(*PROMPTS))

    assert expected[0] != expected[1]
    assert cold == [(answers, {}) for answers in expected]
    assert restarted == [(answers, {"fs": CHUNKS}) for answers in expected]
    assert len(namespaces(tmp_path / "root")) == 2


@pytest.mark.full
@pytest.mark.usefixtures("fill")
@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        ({}, {"distributed_executor_backend": "uni"}),
        ({}, {"distributed_executor_backend": "mp"}),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, {}),
    ],
    ids=["uni", "mp", "engine process"],
)
def test_the_same_cache_by_another_executor(
    launcher: Launcher,
    model: Path,
    reference: Ask,
    settings: dict[str, Any],
    tmp_path: Path,
    environment: dict[str, str],
    arguments: dict[str, Any],
) -> None:
    with launcher.start(model, settings, environment=environment, **arguments) as engine:
        answers, loaded = engine.served(*PROMPTS)

    assert answers == reference(*PROMPTS)
    assert loaded == {"fs": CHUNKS}
    assert len(namespaces(tmp_path / "root")) == 1
