"""Each setting of the installed vLLM was reviewed: it is excluded with a reason, or counts on purpose.

``reviewed_settings.json`` has the settings that count, with the default that versions of one KV format share,
because an identity names only what differs from its default. A failure names the setting or file to review:

- a field that is new: put it on the list in ``excluded_settings.toml`` with the reason, or into the file;
- a default that has changed: the version starts its own KV format generation, or the field joins the
  list;
- a file of vLLM's that is new in naming ``max_model_len``: see whether numbers are computed with it, and
  add its models to ``length_dependent`` there, or the file to the file.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvtier.adapters.vllm import _excluded_settings
from kvtier.adapters.vllm._canonical import NO_DEFAULT, canonical_value, field_default
from kvtier.adapters.vllm._compat import is_reviewed

pytestmark = pytest.mark.releases

REVIEWED = Path(__file__).with_name("reviewed_settings.json")
SOURCES = ("model_executor/models", "model_executor/layers/rotary_embedding", "models", "transformers_utils")
COMPUTED = "decided by vLLM"


def _configurations(kind: type, seen: set[type]) -> Iterator[type]:
    """Yield a configuration's class and the classes of its relevant fields."""
    if kind in seen:
        return
    seen.add(kind)
    yield kind
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if f"{kind.__name__}.{field.name}" in _excluded_settings.SETTINGS:
            continue
        for inner in _classes(hints[field.name]):
            if dataclasses.is_dataclass(inner) and inner.__module__.startswith("vllm.config"):
                yield from _configurations(inner, seen)


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for argument in typing.get_args(hint):
        yield from _classes(argument)


def counted_defaults() -> Mapping[str, object]:
    """Return the default of each setting that counts."""
    found: dict[str, object] = {}
    for kind in [*_configurations(VllmConfig, set()), *_specs()]:
        for field in dataclasses.fields(kind):
            path = f"{kind.__name__}.{field.name}"
            if path not in {*_excluded_settings.SETTINGS, *_excluded_settings.LENGTH_SETTINGS}:
                found[path] = _default(field)
    return found


def _specs() -> list[type]:
    """Return the kinds of KV cache groups, whose fields are reviewed like configurations'."""
    found = vars(kv_cache_interface).values()
    return [one for one in found if isinstance(one, type) and issubclass(one, KVCacheSpec)]


def _default(field: dataclasses.Field[Any]) -> object:
    default = field_default(field)
    if default is NO_DEFAULT:
        return COMPUTED
    value = canonical_value(default)
    return value if not isinstance(value, dict) or "kind" not in value else {"kind": value["kind"]}


def files_with_length() -> set[str]:
    """Return vLLM's model files that name ``max_model_len``."""
    package = Path(vllm.__file__).parent
    files = (path for folder in SOURCES for path in (package / folder).rglob("*.py"))
    return {str(path.relative_to(package)) for path in files if "max_model_len" in path.read_text()}


@pytest.fixture(scope="module")
def reviewed() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(REVIEWED.read_text())
    return found


@pytest.fixture(scope="module")
def defaults() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(json.dumps(counted_defaults()))
    return found


def test_every_setting_was_reviewed(reviewed: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    new = sorted(defaults.keys() - reviewed["defaults"].keys())
    assert not new, f"vLLM {vllm.__version__} has settings that are not reviewed:\n" + "\n".join(
        f"{path} = {defaults[path]!r}" for path in new
    )


def test_counted_defaults_are_unchanged(reviewed: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    known = reviewed["defaults"]
    changed = [
        f"{path} = {value!r}, and {known[path]!r} before"
        for path, value in defaults.items()
        if path in known and known[path] != value
    ]
    assert not changed, f"vLLM {vllm.__version__} has other defaults:\n" + "\n".join(changed)


def test_length_models_were_reviewed(reviewed: Mapping[str, Any]) -> None:
    new = sorted(files_with_length() - set(reviewed["files"]))
    assert not new, f"vLLM {vllm.__version__} names max_model_len in files that are not reviewed: {new}"


def test_listed_names_exist() -> None:
    """With a misspelled name, a setting that should be excluded would count."""
    kinds = {kind.__name__: kind for kind in _configurations(VllmConfig, set())}
    missing = []
    for path in _excluded_settings.SETTINGS:
        owner, _, name = path.partition(".")
        if owner in kinds and name.partition(".")[0] not in {
            f.name for f in dataclasses.fields(kinds[owner])
        }:
            missing.append(path)
    # In at least one of the versions that share the list.
    assert set(missing) <= ELSEWHERE


ELSEWHERE = {
    "CacheConfig.simple_cpu_offload_num_blocks",
    "CacheConfig.user_specified_mamba_block_size",
    "CacheConfig.hash_block_size",
    "CacheConfig.cache_hit_alignment_tokens",
    "CompilationConfig.cudagraph_decoder_replay",
    "CompilationConfig.decoder_replay_trim_threshold",
    "CompilationConfig.decoder_replay_cudagraph_capture_sizes",
    "AttentionConfig.sparse_mla_prefill_workspace_factor",
    "KVTransferConfig.kv_buffer_size",
    "KVTransferConfig.kv_ip",
    "KVTransferConfig.kv_rank",
    "KVTransferConfig.kv_parallel_size",
    "KernelConfig.enable_rocm_segmented_attn_autotune",
    "ModelConfig.sleep_mode_offload_cudagraph",
    "ParallelConfig.enable_shm_tensor_arena",
    "ParallelConfig.sd_worker_cls",
    "PassConfig.enable_sp",
    "PassConfig.fuse_gemm_comms",
    "PassConfig.sp_min_token_num",
    "VllmConfig.watchdog_config",
}


def test_version_was_reviewed() -> None:
    assert is_reviewed(), f"vLLM {vllm.__version__} has no KV format generation in compat.KV_FORMATS"
