"""Whose pages are whose, by the settings of a real engine: every one counts unless it cannot change bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pools
import pytest
from conftest import Attach, settings
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs
from test_storage import load, store

from kvtier import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(10_000))
    (folder / "config.json").write_text("{}")
    return folder


def stored_with(attach: Attach, root: Path, **given: Any) -> None:
    pool = pools.mha()
    with_engine(attach, pool, root, given, lambda storage: store(storage, pool))


def loaded_with(attach: Attach, root: Path, **given: Any) -> bool:
    pool = pools.mha()
    loaded = with_engine(attach, pool, root, given, lambda storage: load(storage, pool))
    assert len(set(loaded)) == 1
    return bool(loaded[0])


def with_engine(attach: Attach, pool: Any, root: Path, given: dict[str, Any], act: Any) -> Any:
    """Attach a storage as in an engine with these arguments, which name its weights."""
    context = runtime_context.RuntimeContext(parallel=runtime_context.ParallelContext())
    context.set_server_args(ServerArgs(**given))
    with runtime_context.use_context(context):
        storage = attach(pool, settings(root, namespace=""))
    result = act(storage)
    storage.close()
    return result


def test_an_engine_started_again_has_its_pages(attach: Attach, model: Path, tmp_path: Path) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    same = {"model_path": str(model), "port": 31_000, "log_level": "debug", "max_running_requests": 3}
    assert loaded_with(attach, tmp_path / "root", **same)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "fp8"},
        {"context_length": 4096},
        {"revision": "other"},
    ],
    ids=str,
)
def test_a_setting_that_can_change_bytes_counts(
    attach: Attach, model: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model), **change)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_that_was_replaced_in_its_folder_gets_nothing(
    attach: Attach, model: Path, tmp_path: Path, name: str
) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    (model / name).write_bytes(b"{ }" + bytes(9_997))
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model))


def test_a_name_without_weights_behind_it_is_refused(attach: Attach, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        stored_with(attach, tmp_path / "root", model_path="nobody/nothing")
