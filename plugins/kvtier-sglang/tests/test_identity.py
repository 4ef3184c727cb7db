"""Identities by the settings of a real engine. Every setting counts unless it cannot change bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pools
import pytest
import sglang
import torch
from conftest import Attach, settings
from sglang.srt import runtime_context
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.environ import Envs
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.server_args import ServerArgs
from test_storage import load, store

from kvtier import ConfigError
from kvtier_sglang import _settings
from kvtier_sglang._environment import REVIEWED, is_relevant, relevant_environment

READ = re.compile(
    r"""(?:environ(?:\.get|\.setdefault|\.pop)?|getenv|get_(?:bool|int)_env_var)\s*[\[(]\s*["'](\w+)["']"""
    r"""|["'](\w+)["']\s+(?:not\s+)?in\s+os\.environ"""
)
READ_BY_KERNELS = ("AITER_", "FLASHINFER_")  # libraries whose sources are not in this repository


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
    """Attach a storage as an engine with these arguments does. They name its weights."""
    context = runtime_context.RuntimeContext(parallel=runtime_context.ParallelContext())
    resolved = given.pop("resolved", {})
    context.set_server_args(ServerArgs(**given))
    context.override("test", **resolved)
    with runtime_context.use_context(context):
        storage = attach(pool, settings(root, namespace=""))
    result = act(storage)
    storage.close()
    return result


def test_restarted_engine_has_pages(attach: Attach, model: Path, tmp_path: Path) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    same = {"model_path": str(model), "port": 31_000, "log_level": "debug", "max_running_requests": 3}
    found = {"random_seed": 7, "chunked_prefill_size": 512, "cuda_graph_max_bs_decode": 3, "node_rank": 1}
    assert loaded_with(attach, tmp_path / "root", **same, resolved=found)


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
def test_byte_changing_setting_counts(
    attach: Attach, model: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model), **change)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_replaced_model_gets_nothing(attach: Attach, model: Path, tmp_path: Path, name: str) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    (model / name).write_bytes(b"{ }" + bytes(9_997))
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model))


def test_name_without_weights_refused(attach: Attach, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        stored_with(attach, tmp_path / "root", model_path="nobody/nothing")


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Settings that name an adapter's folder, either as passed to SGLang or as resolved. Adapters created in a
# program have random ids.
NAMING: dict[str, Callable[[str], dict[str, Any]]] = {
    "path": lambda path: {"lora_paths": [path]},
    "name=path": lambda path: {"lora_paths": [f"sql={path}"]},
    "mapping": lambda path: {"lora_paths": {"sql": path}},
    "mappings": lambda path: {"lora_paths": [{"lora_name": "sql", "lora_path": path, "pinned": True}]},
    "resolved": lambda path: {"resolved": {"lora_paths": [LoRARef(lora_name="sql", lora_path=path)]}},
    "uno": lambda path: {"uno_lora_path": path},
    "kt": lambda path: {"kt_weight_path": path},
    "file": lambda path: {"quantization_param_path": f"{path}/{WEIGHTS}"},
    "draft": lambda path: {"speculative_draft_model_path": path},
    "inside": lambda path: {"model_loader_extra_config": json.dumps({"qlora_adapter_name_or_path": path})},
}


@pytest.mark.parametrize(
    ("how", "name"),
    [*((how, WEIGHTS) for how in NAMING), *((how, CONFIG) for how in list(NAMING)[:4])],
)
def test_referenced_files_count(attach: Attach, model: Path, tmp_path: Path, how: str, name: str) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / WEIGHTS).write_bytes(bytes(5000))
    (adapter / CONFIG).write_text('{"r": 8}')

    def given() -> dict[str, Any]:
        return {"model_path": str(model), **NAMING[how](str(adapter))}

    stored_with(attach, tmp_path / "root", **given())
    assert loaded_with(attach, tmp_path / "root", **given())
    (adapter / name).write_bytes(b"{ }")
    assert not loaded_with(attach, tmp_path / "root", **given())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_paths", ["sql=nobody/nothing"]),
        ("lora_paths", [LoRARef(lora_name="sql", lora_path="nobody/nothing")]),
        ("kt_weight_path", "/nowhere/at/all"),
        ("quantization_param_path", "/nowhere/scales.json"),
        ("speculative_draft_model_path", "nobody/nothing"),
        ("load_format", "remote_instance"),
        ("speculative_draft_load_format", "private"),
        ("weight_cache_mode", "client"),
        ("checkpoint_engine_wait_weights_before_ready", True),
        ("language_only", True),
        ("disaggregation_mode", "decode"),
        ("enable_pd_role_switch", True),
    ],
    ids=str,
)
def test_unnamed_files_need_namespace(
    attach: Attach, model: Path, tmp_path: Path, field: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"the weights of {field}.* `namespace`"):
        stored_with(attach, tmp_path / "root", model_path=str(model), resolved={field: value})


def test_unrepresentable_is_named(attach: Attach, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"setting dtype .*set it as text"):
        stored_with(attach, tmp_path / "root", model_path=str(model), resolved={"dtype": object()})


@pytest.mark.parametrize(
    "resolved",
    [
        {"attention_backend": "fa3"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"cp_strategy": "interleave"},
        {"enable_hisparse": True},
        {"disable_hybrid_swa_memory": True},
        {"forward_hooks": [{"name": "steer"}]},
        {"weight_version": "2"},
        {"disaggregation_mode": "prefill"},
    ],
    ids=str,
)
def test_resolved_values_count(attach: Attach, model: Path, tmp_path: Path, resolved: dict[str, Any]) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model), resolved=resolved)
    stored_with(attach, tmp_path / "root", model_path=str(model), resolved=resolved)
    assert loaded_with(attach, tmp_path / "root", model_path=str(model), resolved=resolved)


def snapshot(cache: Path, commit: str, name: str = "config.json") -> None:
    """Put a model into a hub's cache, at the commit of the branch "main"."""
    repository = cache / "models--org--model"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / name).write_text("{}")


def test_hub_commit(attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot(tmp_path / "hub", "a" * 40)
    stored_with(attach, tmp_path / "root", model_path="org/model")
    assert loaded_with(attach, tmp_path / "root", model_path="org/model")
    snapshot(tmp_path / "hub", "b" * 40)
    assert not loaded_with(attach, tmp_path / "root", model_path="org/model")


def test_commit_is_from_used_cache(attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot(tmp_path / "hub", "a" * 40)
    given = {"model_path": "org/model", "download_dir": str(tmp_path / "own")}
    with pytest.raises(ConfigError, match="namespace"):
        stored_with(attach, tmp_path / "root", **given)
    snapshot(tmp_path / "own", "b" * 40, "model.safetensors")
    stored_with(attach, tmp_path / "root", **given)
    assert loaded_with(attach, tmp_path / "root", **given)
    snapshot(tmp_path / "own", "c" * 40, "model.safetensors")
    assert not loaded_with(attach, tmp_path / "root", **given)


def test_version_of_transformers_counts(
    attach: Attach, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    monkeypatch.setattr("transformers.__version__", "5.999.0")
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model))


@pytest.mark.parametrize(
    "variable", ["SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"]
)
def test_code_of_packages_counts(
    attach: Attach, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    package = tmp_path / "models_of_others"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(variable, package.name)
    stored_with(attach, tmp_path / "root", model_path=str(model))
    assert loaded_with(attach, tmp_path / "root", model_path=str(model))
    (package / "llama.py").write_text("SCALE = 2")
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model))
    monkeypatch.setenv(variable, "nowhere")
    with pytest.raises(ConfigError, match="the code of nowhere"):
        stored_with(attach, tmp_path / "root", model_path=str(model))


def test_code_of_plugins_counts(
    attach: Attach, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    metadata = tmp_path / "installed" / "plugin-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: plugin\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nplugin = its_code:register\n")
    (tmp_path / "installed" / "its_code.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model))


def test_code_of_other_repositories_counts(
    attach: Attach, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "org/model--modeling.Model"}}))
    given = {"model_path": str(model), "trust_remote_code": True}
    snapshot(tmp_path / "hub", "a" * 40)
    stored_with(attach, tmp_path / "root", **given)
    assert loaded_with(attach, tmp_path / "root", **given)
    snapshot(tmp_path / "hub", "b" * 40)
    assert not loaded_with(attach, tmp_path / "root", **given)


def test_foreign_hub_needs_namespace(attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    snapshot(tmp_path / "hub", "a" * 40)
    with pytest.raises(ConfigError, match="namespace"):
        stored_with(attach, tmp_path / "root", model_path="org/model")


@pytest.mark.parametrize(
    ("variable", "counts"),
    [
        ("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", True),
        ("SGLANG_USE_AITER_FP8_PER_TOKEN", True),
        ("SGLANG_OF_A_LATER_VERSION", True),
        ("FLASHINFER_NVFP4_4OVER6", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("MOONCAKE_MASTER", False),
        ("SGLANG_RUN_ID", False),
        ("SGLANG_LOG_MS", False),
        ("SGLANG_SERVICE_PORT_HTTP", False),
        ("SGLANG_API_KEY", False),
        ("AITER_FORCE_A8W4", True),
        ("ROCM_QUICK_REDUCE_QUANTIZATION", True),
        ("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", True),
        ("TRTLLM_DISABLE_FP4_QUANT_FAST_MATH", True),
        ("ASCEND_USE_FIA", True),
        ("FLA_USE_FAST_OPS", True),
        ("FLASHINFER_WORKSPACE_BASE", False),
        ("TRTLLM_SERVICE_HOST", False),
    ],
)
def test_unsafe_variables_count(
    attach: Attach, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, counts: bool
) -> None:
    stored_with(attach, tmp_path / "root", model_path=str(model))
    monkeypatch.setenv(variable, "1")
    assert (variable in relevant_environment()) is counts
    assert loaded_with(attach, tmp_path / "root", model_path=str(model)) is not counts


def test_amd_architecture_counts(
    attach: Attach, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(architecture: str) -> None:
        monkeypatch.setattr(torch.version, "hip", "7.2")
        given = SimpleNamespace(gcnArchName=architecture)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: given)

    stored_with(attach, tmp_path / "root", model_path=str(model))
    give("gfx942")
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model))
    stored_with(attach, tmp_path / "root", model_path=str(model))
    assert loaded_with(attach, tmp_path / "root", model_path=str(model))
    give("gfx950")
    assert not loaded_with(attach, tmp_path / "root", model_path=str(model))


def test_review_covers_all_secrets() -> None:
    fields = set(namespace_of(ServerArgs))
    assert not _settings.REVIEWED - fields
    assert not [it for it in fields - _settings.REVIEWED if it.endswith(("_key", "_password", "_secret"))]


def names(path: Path) -> Iterator[str]:
    """Yield the environment variables that a file reads by a literal name."""
    for either in READ.findall(path.read_text("utf-8")):
        yield "".join(either)


@pytest.fixture(scope="module")
def read_by_name() -> dict[str, str]:
    """Return the variables that SGLang's engine and kernels read by a literal name, and the places."""
    root = Path(sglang.__path__[0])
    files = [path for part in ("srt", "kernels") for path in sorted((root / part).rglob("*.py"))]
    return {name: str(path) for path in files for name in names(path)}


def test_every_variable_was_reviewed(read_by_name: dict[str, str]) -> None:
    assert {"AITER_FORCE_A8W4", "ROCM_QUICK_REDUCE_QUANTIZATION", "ASCEND_USE_FIA"} < set(read_by_name)
    new = {name: path for name, path in read_by_name.items() if not (is_relevant(name) or name in REVIEWED)}
    assert not new, "count these, or add them to REVIEWED under what they do"


def test_reviewed_variables_are_read(read_by_name: dict[str, str]) -> None:
    known = {*vars(Envs), *read_by_name, "SGLANG_RUN_ID"}  # the last one is created at the start
    assert not {it for it in REVIEWED - known if not it.startswith(READ_BY_KERNELS)}
