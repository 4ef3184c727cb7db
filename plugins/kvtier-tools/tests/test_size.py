"""``kvtier size``: figures that can be checked by hand, and configurations that kvtier accepts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier import TieringConfig
from kvtier._cli import app
from kvtier.errors import ConfigError, KVTierError

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "hidden_size": 4096, "torch_dtype": "bfloat16"}  # fmt: skip
LATENT = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
WINDOWS = {**LLAMA, "sliding_window": 1024, "layer_types": ["full_attention", "sliding_attention"] * 16}


def sizes(folder: Path, config: dict[str, Any], *options: str) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["size", str(folder), "--json", *options])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    TieringConfig.from_extra_config(found["configuration"]["kv_connector_extra_config"])
    return found


@pytest.mark.parametrize(
    ("config", "options", "bytes_per_token"),
    [
        (LLAMA, [], 2 * 32 * 8 * 128 * 2),
        (LLAMA, ["--dtype", "fp8"], 2 * 32 * 8 * 128),
        (LLAMA, ["--tp", "4"], 2 * 32 * 8 * 128 * 2),
        (LATENT, ["--tp", "4"], 61 * 576 * 2),  # one copy
        (WINDOWS, [], 2 * 32 * 8 * 128 * 2),
        ({"text_config": LLAMA}, [], 2 * 32 * 8 * 128 * 2),
    ],
    ids=["full", "fp8", "workers", "latent", "windows", "nested"],
)
def test_bytes_per_token(tmp_path: Path, config: Any, options: list[str], bytes_per_token: int) -> None:
    found = sizes(tmp_path, config, *options)["bytes_per_token"]
    assert bytes_per_token <= found < 1.01 * bytes_per_token  # A chunk fills whole pages.


def test_rooms_and_loads_follow_from_bytes_per_token(tmp_path: Path) -> None:
    found = sizes(tmp_path, LLAMA, "--memory", "64GiB", "--context", "8k", "--prefill", "10000")
    assert found["rooms"][0] == {
        "tier": "cpu", "capacity": 2**36, "chunks": 32768, "tokens": 524288, "conversations": 64
    }  # fmt: skip
    first = found["loads"][0]
    assert (first["tokens"], first["loaded"], first["computed_s"]) == (1024, 1024 * 131072, 0.1024)
    assert first["from_memory_s"] == pytest.approx(first["loaded"] / 20e9)


def test_a_load_needs_only_the_window(tmp_path: Path) -> None:
    loads = sizes(tmp_path, WINDOWS)["loads"]
    assert loads[0]["loaded"] == 1024 * 131072
    assert loads[1]["loaded"] == (8192 + 1024) * 131072 // 2


def test_copies_are_kept_once(tmp_path: Path) -> None:
    settings = sizes(tmp_path, LATENT, "--tp", "4")["configuration"]["kv_connector_extra_config"]
    assert settings["canonical_layout"] is True


def test_a_context_above_the_budget_raises_it(tmp_path: Path) -> None:
    settings = sizes(tmp_path, LLAMA, "--memory", "8GiB")["configuration"]["kv_connector_extra_config"]
    assert settings["promotion_budget"] == 0.5


def test_files_slower_than_computing_ask_for_the_gate(tmp_path: Path) -> None:
    slow = sizes(tmp_path, LLAMA, "--disk-speed", "1GB", "--prefill", "10000")["configuration"]
    fast = sizes(tmp_path, LLAMA, "--disk-speed", "3GB", "--prefill", "10000")["configuration"]
    assert slow["kv_connector_extra_config"]["load_gate"] == "latency"
    assert "load_gate" not in fast["kv_connector_extra_config"]


def test_conversations_that_take_turns_need_memory(tmp_path: Path) -> None:
    needs = sizes(tmp_path, LLAMA, "--memory", "64GiB", "--context", "8k", "--concurrency", "65")["needs"]
    assert (needs[-1]["wanted_bytes"], needs[-1]["has_bytes"]) == (65 * 2**30, 64 * 2**30)


def test_speed_of_files_is_measured(tmp_path: Path) -> None:
    root = tmp_path / "root"
    found = sizes(tmp_path, LLAMA, "--root", str(root), "--measure")
    assert found["disk_bytes_s"] > 0
    assert found["loads"][0]["from_disk_s"] == pytest.approx(
        found["loads"][0]["loaded"] * (1 / found["disk_bytes_s"] + 1 / found["memory_bytes_s"])
    )
    assert not [*root.iterdir()]


def test_the_newest_snapshot_of_the_hub_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--meta--llama" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    result = CliRunner().invoke(app, ["size", "meta/llama"])
    assert "131,072 bytes per token" in result.output


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "index_topk": 2048}, "the cache of llama is not known here"),
        ({"model_type": "x"}, "lacks 'num_hidden_layers'"),
    ],
)
def test_an_unknown_cache_is_refused(tmp_path: Path, config: Any, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["size", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_measuring_names_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvtier_bench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kvtier_bench", None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(KVTierError, match=r"--measure needs kvtier-bench: pip install "):
        raise CliRunner().invoke(app, ["size", str(tmp_path), "--measure"]).exception or AssertionError
