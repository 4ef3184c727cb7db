"""The identity is closed: every engine setting counts unless a review found it irrelevant."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("vllm")

import vllm
from vllm.config import ModelConfig, MultiModalConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.model_executor.model_loader import LoadFormats
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvtier._weights import weights_fingerprint
from kvtier.adapters.vllm import _excluded_settings, _identity
from kvtier.adapters.vllm._canonical import (
    canonical_settings,
    canonical_value,
    foreign_module,
    relevant_environment,
)
from kvtier.adapters.vllm._pages import device_kind, page_format
from kvtier.errors import ConfigError
from tests.integration.configurations import MODELS, configure, engine_of, identity_of, make_model


@pytest.fixture(autouse=True, scope="module")
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a model's configuration."""
    directory = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: make_model(directory / name, name))


def is_shared(model: Path, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether engines with these arguments share one cache."""
    return identity_of(configure(model, **one)).digest == identity_of(configure(model, **other)).digest


def computed_by(module: str | None, model: Path, patch: pytest.MonkeyPatch) -> VllmConfig:
    """Return the configuration of an engine whose model is computed by this module; None for vLLM's."""
    config = configure(model)
    if module is not None:
        theirs = _LazyRegisteredModel(module, "Llama")
        patch.setitem(ModelRegistry.models, config.model_config.architecture, theirs)
    return config


# --- settings that split a cache, and settings that do not -------------------------------------------


@pytest.mark.parametrize(
    ("model", "short", "long", "shared"),
    [
        ("llama", 1024, 4096, True),
        ("yarn", 1024, 8192, True),
        ("mixtral", 1024, 4096, True),
        ("longrope", 1024, 4096, False),
        ("dynamic", 1024, 4096, False),
        ("llama4", 32768, 32769, False),
    ],
)
def test_used_length_counts(
    models: Callable[[str], Path], model: str, short: int, long: int, shared: bool
) -> None:
    assert is_shared(models(model), {"max_model_len": short}, {"max_model_len": long}) is shared


def test_unknown_version_counts_length(
    models: Callable[[str], Path],
) -> None:
    short, long = (configure(models("llama"), max_model_len=tokens) for tokens in (1024, 4096))
    assert canonical_settings(short, is_reviewed=True) == canonical_settings(long, is_reviewed=True)
    assert canonical_settings(short, is_reviewed=False) != canonical_settings(long, is_reviewed=False)


def test_fp8_variants_share_nothing(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    one = identity_of(configure(models("llama")))
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", lambda _: True)
    assert identity_of(configure(models("llama"))).digest != one.digest


def test_page_arrangement_counts(models: Callable[[str], Path]) -> None:
    config = configure(models("llama"))
    assert identity_of(config, page_format=1).digest == identity_of(config, page_format=1).digest
    assert identity_of(config, page_format=1).digest != identity_of(config, page_format=2).digest
    assert identity_of(config, page_format=0).digest != identity_of(config, page_format=0).digest


@dataclasses.dataclass
class Layer:
    """A layer as the worker sees it."""

    backend: type
    kv_cache: object

    def get_attn_backend(self) -> type:
        return self.backend


class UnknownBackend:
    """An attention backend."""


def test_page_format_follows_backend(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(models("llama"))
    engine = engine_of(config)
    offloading = build_offloading_config(config, engine.kv_cache_config)
    names, blocks = offloading.groups[0].layer_names, engine.kv_cache_config.num_blocks

    def formatted(backend: type, *shape: int) -> int:
        layer = Layer(backend, [torch.empty(shape)])
        config.compilation_config.static_forward_context = dict.fromkeys(names, layer)
        return page_format(offloading, engine)

    known, unknown = CPUAttentionBackend, UnknownBackend
    whole = formatted(known, blocks, 2, 128, 8)
    assert whole == formatted(known, blocks, 1, 128, 8), "as with another number of workers"
    assert whole == formatted(known, 2, blocks, 128, 8), "keys and values apart, as vLLM had it before"
    assert whole != formatted(known, 2 * blocks, 2, 64, 8), "cut in two"
    assert whole != (other := formatted(unknown, blocks, 2, 128, 8))
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    assert whole == formatted(known, blocks, 2, 128, 8)
    assert other != formatted(unknown, blocks, 2, 128, 8), "it may arrange pages otherwise"
    config.compilation_config.static_forward_context = {}
    assert page_format(offloading, engine) == 0


@pytest.mark.parametrize("line", ["flags\t: sse amx_tile avx\n", "Features\t: fp i8mm\n"])
def test_processor_pages_count(tmp_path: Path, line: str) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.write_text("processor: 0\nflags\t: sse avx\n")
    other.write_text(line)
    assert device_kind(plain) == device_kind(tmp_path / "absent")
    assert device_kind(other) != device_kind(plain)


def test_online_quantisation_counts(models: Callable[[str], Path]) -> None:
    def online(**more: object) -> dict[str, Any]:
        quantization = {"linear": "fp8_per_channel", **more}
        return {"dtype": "bfloat16", "quantization": "online", "quantization_config": quantization}

    assert not is_shared(models("llama"), online(), online(ignore=["re:.*self_attn.*"]))
    assert is_shared(models("llama"), online(), online())


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_theta": 500.0}},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}},
        {"hf_overrides": {"nobody_knows": 1}},
        {"additional_config": {"nobody_knows": 1}},
        {
            "model_class_overrides": {
                "LlamaForCausalLM": "vllm.model_executor.models.mistral:MistralForCausalLM"
            }
        },
        {"dtype": "bfloat16", "quantization": "fp8"},
        {"load_format": "dummy"},
        {"attention_config": {"backend": "CPU_ATTN"}},
        {"kv_sharing_fast_prefill": True},
        {"disable_sliding_window": True},
        {"compilation_config": {"custom_ops": ["+rms_norm"]}},
        {"enforce_eager": True},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"extra": {"block_size": 64}},
        {"kv_cache_dtype": "fp8_e5m2", "dtype": "bfloat16"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        {"enable_lora": True},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_changed_numbers_split(models: Callable[[str], Path], arguments: dict[str, Any]) -> None:
    assert not is_shared(models("llama"), {}, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 4096, "enable_chunked_prefill": False},
        {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 17},
        {"scheduling_policy": "priority", "async_scheduling": False, "stream_interval": 4},
        {"served_model_name": ["a", "b"], "seed": 7, "max_logprobs": 3, "logprobs_mode": "raw_logits"},
        {"tokenizer_mode": "slow", "hf_token": "hf_0123456789", "override_generation_config": {"top_k": 3}},
        {"disable_log_stats": True, "show_hidden_metrics_for_version": "0.31", "kv_cache_metrics": True},
        {"distributed_executor_backend": "mp", "enable_prefix_caching": False},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 2], "compile_sizes": [1]}},
        {"structured_outputs_config": {"backend": "xgrammar"}, "kv_offloading_size": 1.0},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_excluded_setting_does_not_split(models: Callable[[str], Path], arguments: dict[str, Any]) -> None:
    assert is_shared(models("llama"), {}, arguments)


def test_secrets_stay_out_of_manifest(models: Callable[[str], Path]) -> None:
    config = configure(
        models("llama"),
        hf_token="hf_0123456789",
        model_loader_extra_config={"s3_secret_access_key": "hf_0123456789", "concurrency": 3},
        additional_config={"nested": {"api_key": "hf_0123456789", "mask_token": 7}},
    )
    manifest = identity_of(config).manifest
    assert "hf_0123456789" not in manifest
    assert '"concurrency": 3' in manifest
    assert '"mask_token": 7' in manifest


# --- every field -------------------------------------------------------------------------------------

ARGUMENTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "longrope": ("longrope", {}),
    "experts, adapters, drafts": (
        "mixtral",
        {
            "enable_lora": True,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        },
    ),
    "online": (
        "llama",
        {
            "dtype": "bfloat16",
            "quantization": "online",
            "quantization_config": {"linear": "fp8_per_channel"},
        },
    ),
}


def _fields(config: Any, around: tuple[Any, ...] = ()) -> Iterator[tuple[Any, str]]:
    """Yield every field of every configuration, and the configuration that it is in."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and not hasattr(value, "to_diff_dict"):
            if not any(value is one for one in around):
                yield from _fields(value, (*around, config))
        else:
            yield config, field.name


def _reasons(config: VllmConfig) -> Mapping[int, bool]:
    """Return, by the id of each configuration, whether a field that holds it is on the list."""
    left: dict[int, bool] = {id(config): False}

    def visit(one: Any) -> None:
        for field in dataclasses.fields(one):
            value = getattr(one, field.name, None)
            if dataclasses.is_dataclass(value) and not hasattr(value, "to_diff_dict"):
                here = left[id(one)] or f"{type(one).__name__}.{field.name}" in _excluded_settings.SETTINGS
                if left.get(id(value), True):  # not visited, or only in a place that does not count
                    fresh = id(value) not in left or left[id(value)] != here
                    left[id(value)] = here
                    if fresh:
                        visit(value)

    visit(config)
    return left


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_field_changes_digest_or_is_listed(models: Callable[[str], Path], kind: str) -> None:
    model, arguments = ARGUMENTS[kind]
    config = configure(models(model), **arguments)
    left = _reasons(config)
    before = canonical_settings(config, is_reviewed=True)
    wrong = []
    seen = 0
    for owner, name in _fields(config):
        path = f"{type(owner).__name__}.{name}"
        was = getattr(owner, name, None)
        try:
            object.__setattr__(owner, name, "another value")
            after = _without_that(config, path)
        finally:
            object.__setattr__(owner, name, was)
        is_listed = path in _excluded_settings.SETTINGS or left[id(owner)] or _is_conditional(path, config)
        seen += 1
        if (after != before) is is_listed and not name.endswith("token"):
            wrong.append(path)
    assert seen > 250
    assert wrong == []
    assert canonical_settings(config, is_reviewed=True) == before


def _without_that(config: VllmConfig, path: str) -> object:
    if path == "ModelConfig.hf_config":  # values derived from it can no longer be computed
        return "changed"
    return canonical_settings(config, is_reviewed=True)


def _is_conditional(path: str, config: VllmConfig) -> bool:
    is_plain = config.model_config.architecture != "Phi3ForCausalLM"
    return path in _excluded_settings.LENGTH_SETTINGS and is_plain


@pytest.mark.parametrize("model", MODELS)
def test_model_value_changes_digest(models: Callable[[str], Path], model: str) -> None:
    config = configure(models(model))
    hf_config = config.model_config.hf_config
    before = canonical_settings(config, is_reviewed=True)
    unseen = []
    for key, value in hf_config.to_dict().items():
        other = {**value, "more": 1} if isinstance(value, dict) else "another value"
        changed = copy.deepcopy(hf_config)
        changed.__dict__[key] = other
        config.model_config.hf_config = changed
        if canonical_settings(config, is_reviewed=True) == before:
            unseen.append(key)
    # "kind" is the model type; vLLM ignores the attribute "output_attentions".
    without = {"_name_or_path", "transformers_version", "dtype", "model_type", "output_attentions"}
    assert set(unseen) <= without


def test_set_unknown_field_counts(models: Callable[[str], Path]) -> None:
    @dataclasses.dataclass
    class Newer(ModelConfig):
        new_in_the_next_version: int = 0

    config = configure(models("llama"))
    before = canonical_settings(config, is_reviewed=True)
    newer = object.__new__(Newer)
    newer.__dict__.update(config.model_config.__dict__, new_in_the_next_version=0)
    Newer.__name__ = "ModelConfig"
    config.model_config = newer
    assert canonical_settings(config, is_reviewed=True) == before
    newer.__dict__["new_in_the_next_version"] = 1
    assert canonical_settings(config, is_reviewed=True) != before


def test_differing_layers_count() -> None:
    """transformers 5.19 refuses to read from the configuration what each layer sets for itself."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no model whose layers differ")
    values = [
        canonical_value(transformers.Gemma4TextConfig(num_hidden_layers=6, global_head_dim=size), "model")
        for size in (128, 128, 256)
    ]
    assert values[0] == values[1] != values[2]


def test_kv_scales_ignore_first_batch() -> None:
    # They would differ after a restart, and then apply to chunks stored with the old ones.
    names = {field.name for field in dataclasses.fields(VllmConfig)}
    assert "cache_config" in names
    cache = {field.name for field in dataclasses.fields(VllmConfig().cache_config)}
    assert "cache_dtype" in cache
    assert "calculate_kv_scales" not in cache


# --- canonical values -----------------------------------------------------------------------------------


class _Opaque:
    __slots__ = ()


class _WithState:
    def __init__(self, state: object) -> None:
        self.state = state


class _Talkative(_WithState):
    def said(self) -> str:
        return "nothing"

    def __repr__(self) -> str:
        return f"<talkative at {id(self):#014x}>"


def test_objects_have_no_address() -> None:
    for kind in (_WithState, _Talkative):
        one, same, other = kind(1), kind(1), kind(2)
        assert canonical_value(one) == canonical_value(same) != canonical_value(other)
        assert "0x" not in json.dumps(canonical_value(one))
    assert canonical_value(_WithState(1)) != canonical_value(_Talkative(1))
    assert canonical_value(Fraction(1, 2)) != canonical_value(Fraction(1, 3))


def test_recursive_object_ends() -> None:
    one = _WithState(None)
    one.state = [one]
    assert "around" in json.dumps(canonical_value(one))


def test_indistinguishable_object_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        canonical_value({"knob": _Opaque()}, "VllmConfig.additional_config")
    words = ["VllmConfig.additional_config.knob", "_Opaque", "secondary_tiers"]
    assert [word for word in words if word not in str(refusal.value)] == []


def test_callables_are_named() -> None:
    partial = functools.partial(make_model, name="llama")
    assert "make_model" in json.dumps(canonical_value(partial))
    assert canonical_value(make_model) != canonical_value(configure) != canonical_value(_Opaque)
    assert "0x" not in json.dumps(canonical_value([partial, make_model, _Opaque, _Talkative(1).said]))


def test_long_values_are_digested() -> None:
    long, other = ([f"layer.{number}" for number in range(start, 9000)] for start in (0, 1))
    assert len(json.dumps(canonical_value(long))) < 100
    assert canonical_value(long) != canonical_value(other)


# --- weights and environment -------------------------------------------------------------------------


WEIGHTS = bytes(range(256)) * 4096


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.pt", "model.pth", "model.gguf"])
def test_fingerprint_depends_on_bytes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WEIGHTS)
    before = weights_fingerprint(tmp_path)
    assert before == weights_fingerprint(tmp_path)
    (tmp_path / name).write_bytes(WEIGHTS[::-1])
    assert weights_fingerprint(tmp_path) not in (before, None)


def test_single_file_has_fingerprint(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(WEIGHTS)
    before = weights_fingerprint(model)
    model.write_bytes(WEIGHTS[1:] + WEIGHTS[:1])
    assert None is not weights_fingerprint(model) != before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "retrieval/adapter_model.safetensors"]
)
def test_fingerprint_covers_folders(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "config.json").write_text("{}")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (tmp_path / "encoder").symlink_to(elsewhere)  # users share folders among models this way
    alone = weights_fingerprint(tmp_path)
    (elsewhere / name).parent.mkdir(exist_ok=True)
    (elsewhere / name).write_bytes(WEIGHTS)
    before = weights_fingerprint(tmp_path)
    (elsewhere / name).write_bytes(WEIGHTS[::-1])
    assert len({alone, before, weights_fingerprint(tmp_path)}) == 3


def test_fingerprint_needs_no_weights_at_top(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "model.safetensors").write_bytes(WEIGHTS)
    assert weights_fingerprint(tmp_path) is not None


def test_unreadable_entries_have_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    before = weights_fingerprint(tmp_path)
    (tmp_path / "broken.bin").symlink_to(tmp_path / "absent")
    (tmp_path / "folder.bin").mkdir()
    assert weights_fingerprint(tmp_path) == before


def test_hub_name_has_no_fingerprint() -> None:
    assert weights_fingerprint(Path("organisation/model")) is None


@pytest.mark.parametrize("load_format", ["ipc_cache", "modelexpress", "tensorizer", "of_a_plugin"])
def test_weights_from_elsewhere_need_namespace(models: Callable[[str], Path], load_format: str) -> None:
    config = configure(models("llama"))
    config.load_config.load_format = load_format
    with pytest.raises(ConfigError, match=f"load_format {load_format}.*namespace"):
        identity_of(config)
    assert identity_of(config, "one").digest != identity_of(config, "other").digest


def test_load_formats_are_reviewed() -> None:
    others = {"ipc_cache", "modelexpress", "tensorizer"}
    assert set(get_args(LoadFormats)) == _identity._READS_FILES | others


@pytest.mark.parametrize("field", ["audio_model_id", "text_model_id"])
def test_weights_of_parts_count(models: Callable[[str], Path], tmp_path: Path, field: str) -> None:
    config = configure(models("llama"))
    setattr(config.model_config.hf_config, field, str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be identified"):
        identity_of(config)
    digests = set()
    for weights in (WEIGHTS, WEIGHTS[::-1]):
        (tmp_path / "model.safetensors").write_bytes(weights)
        digests.add(identity_of(config).digest)
    assert len(digests) == 2


def test_named_weights_need_namespace(
    models: Callable[[str], Path],
) -> None:
    config = configure(models("llama"))
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(ConfigError) as refusal:
        identity_of(config)
    words = ["s3://bucket/model", "namespace", "secondary_tiers"]
    assert [word for word in words if word not in str(refusal.value)] == []
    assert identity_of(config, "v1").digest != identity_of(config, "v2").digest


def test_hub_name_needs_commit(models: Callable[[str], Path]) -> None:
    config = configure(models("llama"))
    config.model_config.model = "organisation/model"
    for revision in (None, "main"):
        config.model_config.revision = revision
        with pytest.raises(ConfigError):
            identity_of(config)
    found = []
    for commit in ("1" * 40, "2" * 40):
        config.model_config.revision = commit
        found.append(identity_of(config).digest)
    assert len(set(found)) == 2


@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        ("LlamaForCausalLM", None),
        ("Olmo2ForCausalLM", "transformers"),  # vLLM has no code for it
        ("TransformersForCausalLM", "transformers"),
    ],
)
def test_code_of_others_is_known(architecture: str, module: str | None) -> None:
    model: Any = SimpleNamespace(registry=ModelRegistry, architecture=architecture)
    assert foreign_module(model) == module


@pytest.mark.parametrize("module", [None, "vllm.model_executor.models.transformers"])
def test_version_of_transformers_counts(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, module: str | None
) -> None:
    config = computed_by(module, models("llama"), monkeypatch)
    before = identity_of(config).digest
    monkeypatch.setattr("transformers.__version__", "5.999.0")
    assert (identity_of(config).digest == before) is (module is None)


def test_code_of_transformers_from_git_counts(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = computed_by("vllm.model_executor.models.transformers", models("llama"), monkeypatch)
    monkeypatch.setattr("transformers.__version__", "5.999.0.dev0")
    code = tmp_path / "llama.py"
    spec = ModuleSpec("transformers", None, origin=str(code))
    monkeypatch.setattr("kvtier._weights.find_spec", lambda _: spec)
    digests = set()
    for scale in (1, 1, 2):
        code.write_text(f"SCALE = {scale}")
        digests.add(identity_of(config).digest)
    assert len(digests) == 2


@pytest.mark.parametrize("named_by", ["config.json", "preprocessor_config.json", "code_revision"])
def test_code_of_other_repositories_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = make_model(tmp_path / "model")
    config = computed_by("vllm.model_executor.models.transformers", model, monkeypatch)
    config.model_config.trust_remote_code = True
    if named_by == "code_revision":
        monkeypatch.setattr(config.model_config, "model", "org/code")
        monkeypatch.setattr(config.model_config, "revision", "f" * 40)
        config.model_config.code_revision = "main"
    else:
        (model / named_by).write_text(json.dumps({"auto_map": {"AutoModel": "org/code--modeling.Model"}}))
    digests = set()
    for commit in ("a" * 40, "a" * 40, "b" * 40):
        repository = tmp_path / "hub" / "models--org--code"
        (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        digests.add(identity_of(config).digest)
    assert len(digests) == 2


def test_version_that_prepares_media_counts(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(models("llama"))
    config.model_config.multimodal_config = MultiModalConfig()
    before = identity_of(config).digest
    monkeypatch.setattr("transformers.__version__", "5.999.0")
    assert identity_of(config).digest != before


def test_tokenizer_counts_where_models_compute_with_it(models: Callable[[str], Path], tmp_path: Path) -> None:
    config = configure(models("llama"))
    model = config.model_config

    def kinds() -> int:
        digests = set()
        for text, mode in [("a", "hf"), ("a", "hf"), ("b", "hf"), ("b", "mistral")]:
            (tmp_path / "tokenizer.json").write_text(text)
            model.tokenizer, model.tokenizer_mode = str(tmp_path), mode
            digests.add(identity_of(config).digest)
        for model.tokenizer_revision in ("a" * 40, "b" * 40):
            model.tokenizer = "org/tokenizer"
            digests.add(identity_of(config).digest)
        return len(digests)

    assert kinds() == 1
    model.hf_config.engram_layer_ids = [1]
    assert kinds() == 5
    del model.hf_config.engram_layer_ids
    model.multimodal_config = MultiModalConfig()
    assert kinds() == 5


@pytest.mark.parametrize("named_by", ["setting", "override", "variable"])
def test_contents_of_named_files_count(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    config = configure(models("llama"))
    file = tmp_path / "scales.json"
    if named_by == "setting":
        config.model_config.multimodal_config = MultiModalConfig()
        config.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(file)
    elif named_by == "override":
        config.model_config.hf_overrides = {"quantization_config_file": str(file)}
    else:
        monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(file))
    digests = set()
    for scale in (1, 1, 2):
        file.write_text(f'{{"scale": {scale}}}')
        digests.add(identity_of(config).digest)
    assert len(digests) == 2


@pytest.mark.parametrize("named_by", ["generation_config", "hf_config_path"])
@pytest.mark.parametrize(("model", "kinds"), [("llama4", 2), ("llama", 1)])
def test_generation_config_counts_where_models_compute_with_it(
    models: Callable[[str], Path], tmp_path: Path, named_by: str, model: str, kinds: int
) -> None:
    config = configure(models(model))
    setattr(config.model_config, named_by, str(tmp_path))
    digests = set()
    for is_tuned in ("true", "true", "false"):
        (tmp_path / "generation_config.json").write_text(f'{{"attn_temperature_tuning": {is_tuned}}}')
        digests.add(identity_of(config).digest)
    assert len(digests) == kinds


@pytest.mark.parametrize("field", ["worker_cls", "worker_extension_cls"])
def test_code_of_workers_counts(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    config = configure(models("llama"))
    monkeypatch.syspath_prepend(tmp_path)
    digests = {identity_of(config).digest}
    setattr(config.parallel_config, field, "workers_of_others.module.Worker")
    (tmp_path / "workers_of_others").mkdir()
    for scale in (1, 1, 2):
        (tmp_path / "workers_of_others" / "__init__.py").write_text(f"SCALE = {scale}")
        digests.add(identity_of(config).digest)
    assert len(digests) == 3


def test_code_of_loaded_plugins_counts(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(models("llama"))
    monkeypatch.syspath_prepend(tmp_path)
    digests = {identity_of(config).digest}
    (found := tmp_path / "plugins-1.0.dist-info").mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text("[vllm.general_plugins]\npatches = patches_of_others.all:apply\n")
    (tmp_path / "patches_of_others").mkdir()
    for scale in (1, 1, 2):
        (tmp_path / "patches_of_others" / "__init__.py").write_text(f"SCALE = {scale}")
        digests.add(identity_of(config).digest)
    assert len(digests) == 3
    monkeypatch.setattr("vllm.envs.VLLM_PLUGINS", ["kvtier"], raising=False)
    digests.add(identity_of(config).digest)
    assert len(digests) == 3, "it is not loaded"


def test_length_counts_for_code_of_others(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = computed_by("vllm.model_executor.models.transformers", models("llama"), monkeypatch)
    before = identity_of(short).digest
    short.model_config.max_model_len *= 2
    assert identity_of(short).digest != before


def test_code_of_packages_counts(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = computed_by("models_of_others.llama", models("llama"), monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models_of_others").mkdir()
    digests = set()
    for scale in (1, 1, 2):
        (tmp_path / "models_of_others" / "__init__.py").write_text("")
        (tmp_path / "models_of_others" / "rope.py").write_text(f"SCALE = {scale}")
        digests.add(identity_of(config).digest)
    assert len(digests) == 2


def test_other_classes_are_of_their_release(models: Callable[[str], Path]) -> None:
    config = configure(models("llama"))
    assert not _identity._code(config)["kv_format"].startswith("vllm")
    overrides = {"LlamaForCausalLM": "vllm.model_executor.models.mistral:MistralForCausalLM"}
    config.model_config.model_class_overrides = overrides
    assert _identity._code(config)["kv_format"].startswith("vllm")


def test_code_of_scripts_is_private(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = computed_by("__main__", models("llama"), monkeypatch)
    monkeypatch.setattr("__main__.__spec__", None)
    assert identity_of(config).digest != identity_of(config).digest


def test_dummy_seed_counts(models: Callable[[str], Path]) -> None:
    dummy = {"load_format": "dummy"}
    assert not is_shared(models("llama"), {**dummy, "seed": 1}, {**dummy, "seed": 2})
    assert is_shared(models("llama"), {"seed": 1}, {"seed": 2})


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("VLLM_FLOAT32_MATMUL_PRECISION", True),
        ("VLLM_MLA_DISABLE", True),
        ("VLLM_OF_A_PLUGIN_OR_OF_THE_NEXT_VERSION", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("FLA_TRIL_PRECISION", True),  # of vLLM's copy of flash-linear-attention
        ("VLLM_LOGGING_LEVEL", False),
        ("VLLM_HOST_IP", False),
        ("VLLM_DIST_IDENT", False),  # vLLM draws it at each start
        ("VLLM_API_KEY", False),
        ("VLLM_OF_A_PLUGIN_API_KEY", False),
        ("VLLM_SERVICE_HOST", False),  # Kubernetes sets it for a service named vllm
        ("VLLM_PORT_8000_TCP_ADDR", False),
        ("VLLM_ROUTER_SERVICE_PORT", False),
        ("HOME_OF_SOMETHING", False),
        ("XHS_VIDEO_JPEG_QUALITY", True),
    ],
)
def test_counted_environment_variables(monkeypatch: pytest.MonkeyPatch, name: str, counts: bool) -> None:
    monkeypatch.setenv(name, "1")
    assert (name in relevant_environment()) is counts


READ = re.compile(r"""(?:environ(?:\.get|\.setdefault)?|getenv)\s*[\[(]\s*["'](\w+)["']""")
OTHERS_OF_MODELS = """
ARCH AWS_ENDPOINT_URL COMPILE_ONLY FLYDSL_RUNTIME_CACHE_DIR HF_XET_HIGH_PERFORMANCE LOCAL_RANK
MODELSCOPE_API_TOKEN NCCL_LAUNCH_MODE PYTORCH_ROCM_ARCH RUNAI_STREAMER_S3_ENDPOINT
AITER_BF16_FP8_MOE_BOUND CUBLASLT_WORKSPACE_SIZE INKLING_GFX950_GLUON INKLING_SPLIT_KV LAMPORT_RS_SCONV
USE_FLAGOS
"""
"""Variables of builds, places and transfers; then those that select kernels, which round differently."""


def test_variables_of_models_are_reviewed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(vllm.__file__).parent
    folders = ("models", "model_executor", "multimodal", "renderers", "transformers_utils")
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    names = {name for path in sources for name in READ.findall(path.read_text())}
    read = {name for name in names if not name.startswith("VLLM_")}
    for name in read:
        monkeypatch.setenv(name, "1")
    assert read - relevant_environment().keys() - set(OTHERS_OF_MODELS.split()) == set()
