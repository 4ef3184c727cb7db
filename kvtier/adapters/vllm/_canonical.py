"""Canonical values of the engine's configuration, for its identity: every setting except the excluded ones.

**Closed by default.** All fields of ``VllmConfig`` and of its nested configurations are included, under any
name; ``excluded_settings.toml`` lists the exceptions and their reasons.

**Only values that differ from their default are included.** So a field that a newer vLLM adds or removes
changes nothing while it is unset, and versions of one KV format share a cache. Values are those that vLLM
resolved, not those that the user gave, so decisions of the platform and the model count. A default that a
newer version changes is covered by the KV format generation (``_compat``): only releases whose defaults a
test has compared get one.

**A value that names a file counts with the file's contents**, which can change under its name.

**A value has the same canonical value in every process, or the engine is refused.** An object without one is
represented by its type and attributes; a memory address would split the cache at each start.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from transformers import PretrainedConfig
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvtier._identity import LIBRARY_VARIABLES, canonical
from kvtier._weights import weights_fingerprint
from kvtier.adapters.vllm import _excluded_settings as excluded
from kvtier.errors import ConfigError, IdentityError

_ADDRESS: Final = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_TRANSFORMERS_BACKEND: Final = "vllm.model_executor.models.transformers"
_SECRET: Final = re.compile(r"(^|_)(secret|password|token|credentials?|(api|access|secret)_key(_id)?)$", re.I)
_OF_KUBERNETES: Final = re.compile(r"VLLM(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT|PORT)(_[A-Z0-9_]+)?$")
_LONGEST: Final = (
    16_384  # characters of a value that is not hashed; the manifest is read whole at each opening
)
NO_DEFAULT: Final = object()


def canonical_settings(vllm_config: VllmConfig, *, is_reviewed: bool) -> Mapping[str, object]:
    """Return every setting that may change the bytes of a chunk and is not at its default.

    If this version of vLLM was not reviewed, the maximum request length counts, because its effects are
    unknown. Raises ConfigError for an object without a canonical value.
    """
    settings = _Canonicalizer(is_reviewed).fields(vllm_config)
    del settings["kind"]
    return settings


def generation_config(model: ModelConfig, *, is_reviewed: bool) -> Mapping[str, object]:
    """Return the generation config of a model that may compute with it, else nothing.

    It lies in the folder of any of three settings. Llama 4 reads the temperature of its attention from it.
    """
    if is_reviewed and not computes_with_length(model):
        return {}
    try:
        found = model.try_get_generation_config()
    except Exception:  # then the model has none either
        return {}
    return {"generation": canonical_value({**found, "transformers_version": None}, "generation_config")}


def relevant_environment() -> Mapping[str, object]:
    """Return the environment variables that are set and may change the bytes of a chunk.

    They are all variables of vLLM except the excluded ones, and a few of other libraries that are known to
    matter.
    """
    return {name: _with_file(value) for name, value in os.environ.items() if _is_relevant(name)}


def _is_relevant(variable: str) -> bool:
    if not variable.startswith("VLLM_"):
        return variable in LIBRARY_VARIABLES
    if variable in excluded.ENVIRONMENT or _SECRET.search(variable):
        return False
    # Kubernetes sets variables for a service named vllm that are not vLLM's.
    return variable in envs.environment_variables or not _OF_KUBERNETES.fullmatch(variable)


def canonical_value(value: object, name: str = "value") -> object:
    """Return the canonical value, equal in every process and for every equal value.

    A dataclass, such as a KV cache spec, becomes its kind and the fields that are neither excluded nor at
    their default. Raises ConfigError, which begins with ``name``, for a value that has none.
    """
    return _Canonicalizer(is_reviewed=False).value(value, name)


def field_default(field: dataclasses.Field[Any]) -> object:
    """Return the default of a field of a dataclass or of pydantic's; ``NO_DEFAULT`` if it has none."""
    default = field.default
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True, validated_data={})
        return NO_DEFAULT if default is PydanticUndefined else default
    if default is not dataclasses.MISSING:
        return default
    if field.default_factory is dataclasses.MISSING:
        return NO_DEFAULT
    try:
        return field.default_factory()
    except Exception:  # such as a configuration that needs arguments: all its fields are included
        return NO_DEFAULT


class _Canonicalizer:
    """Makes canonical values. It remembers the enclosing objects, to detect references to itself."""

    def __init__(self, is_reviewed: bool) -> None:
        self._is_reviewed = is_reviewed
        self._enclosing: list[int] = []

    def fields(self, config: Any) -> dict[str, object]:
        """Return the fields of a dataclass that are neither excluded nor at their default, and its kind."""
        kind = type(config).__name__
        fields: dict[str, object] = {"kind": kind}
        for field in dataclasses.fields(config):
            path = f"{'KVCacheSpec' if isinstance(config, KVCacheSpec) else kind}.{field.name}"
            value = getattr(config, field.name, NO_DEFAULT)
            if value is NO_DEFAULT or self._is_excluded(path, value, config):
                continue
            result = self.value(value, path)
            if result != self._default(field, value, path):
                fields[field.name] = result
        return fields

    def _default(self, field: dataclasses.Field[Any], value: object, path: str) -> object:
        default = field_default(field)
        if default is NO_DEFAULT:
            return NO_DEFAULT
        if dataclasses.is_dataclass(value) and type(default) is type(value):
            return {"kind": type(value).__name__}  # its own fields are compared with their own defaults
        try:
            return self.value(default, path)
        except ConfigError:
            return NO_DEFAULT

    def _is_excluded(self, path: str, value: object, config: object) -> bool:
        if path in excluded.SETTINGS:
            return True
        if path in excluded.LENGTH_SETTINGS and isinstance(config, ModelConfig):
            return self._is_reviewed and not computes_with_length(config)
        return not isinstance(config, KVCacheSpec) and _is_secret(path.rpartition(".")[2], value)

    def value(self, value: object, name: str) -> object:
        """Return the canonical value of any object; ``name`` is its path."""
        if id(value) in self._enclosing:
            return {"kind": type(value).__name__, "is": "around this"}
        self._enclosing.append(id(value))
        try:
            return _shortened(self._value(value, name))
        finally:
            self._enclosing.pop()

    def _value(self, value: object, name: str) -> object:
        match value:
            case PretrainedConfig():
                return self._of_transformers(value)
            case Enum():
                return self.value(value.value, name)
            case str() | PurePath():
                return _with_file(str(value))
            case Mapping():
                return dict(self._items(value, name))
            case set() | frozenset():
                return sorted((self.value(item, name) for item in value), key=_as_json)
            case list() | tuple():
                return [self.value(item, name) for item in value]
            case type() | FunctionType() | BuiltinFunctionType():
                return f"{value.__module__}.{value.__qualname__}"
            case MethodType():
                return self.value(value.__func__, name)
            case functools.partial():
                parts = (value.func, value.args, value.keywords)
                return {"partial": [self.value(part, name) for part in parts]}
            case _ if dataclasses.is_dataclass(value):
                return self.fields(value)
        try:
            return canonical(value)
        except IdentityError:
            return self._object(value, name)

    def _items(self, value: Mapping[Any, object], name: str) -> Iterator[tuple[str, object]]:
        for key, item in value.items():
            path = f"{name}.{key}"
            if path not in excluded.SETTINGS and not _is_secret(str(key), item):
                yield str(key), self.value(item, path)

    def _of_transformers(self, config: PretrainedConfig) -> object:
        """Return differences from the class's defaults, which never change: checkpoints omit defaults."""
        try:
            defaults = type(config)().to_dict()
        except Exception:  # it needs arguments: all its fields are included
            defaults = {}
        fields: dict[str, object] = {"kind": type(config).__name__}
        own = vars(config)  # if layers differ, transformers refuses to read an attribute
        for key, value in config.to_dict().items():
            inner = own.get(key)
            if f"PretrainedConfig.{key}" in excluded.SETTINGS:
                continue
            if isinstance(inner, PretrainedConfig):
                fields[key] = self._of_transformers(inner)
            elif key not in defaults or value != defaults[key]:
                fields[key] = self.value(value, key)
        return fields

    def _object(self, value: object, name: str) -> object:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        for how in ("uuid", "compute_hash"):  # as vLLM itself distinguishes such objects
            if callable(identify := getattr(value, how, None)):
                try:
                    return {"kind": kind, how: str(identify())}
                except Exception as error:
                    raise ConfigError(f"{name} cannot be identified uniquely: {error!r}") from error
        if type(value).__repr__ is not object.__repr__ and not _ADDRESS.search(text := repr(value)):
            return text
        if state := getattr(value, "__dict__", None):
            return {"kind": kind, **{key: self.value(item, f"{name}.{key}") for key, item in state.items()}}
        raise ConfigError(
            f"{name} is a {kind}, which has no representation that is the same in every process, so caches "
            "in secondary tiers cannot be told apart: remove the setting, or secondary_tiers"
        )


def _is_secret(name: str, value: object) -> bool:
    """Return whether these are texts that no manifest may show. Numbers and mappings can change the model."""
    return isinstance(value, str | bytes | list | tuple | set) and bool(_SECRET.search(name))


def computes_with_length(model: ModelConfig) -> bool:
    """Return whether the model's numbers may depend on ``max_model_len`` or on the generation config.

    They do if rotary embeddings are scaled by a length or by an unreviewed method. They do for models known
    to depend on it, for models with images, whose size a processor may fit to the length, and for foreign
    code.
    """
    kinds = set(_rope_kinds(model.hf_config.to_dict()))
    return (
        not kinds <= excluded.LENGTH_INDEPENDENT_ROPES
        or any(
            fnmatchcase(architecture, pattern)
            for architecture in (model.architecture, *model.architectures)
            for pattern in excluded.LENGTH_DEPENDENT_MODELS
        )
        or model.multimodal_config is not None
        or bool(model.model_class_overrides)
        or foreign_module(model) is not None
    )


def foreign_module(model: ModelConfig) -> str | None:
    """Return the module whose code computes a model; None if that is vLLM's own.

    vLLM has no code for some architectures, and hands them to transformers under their names.
    """
    registered = model.registry.models.get(model.architecture)
    module = getattr(registered, "module_name", None) or getattr(registered, "model_cls", object).__module__
    if module.startswith(_TRANSFORMERS_BACKEND):
        return "transformers"
    return None if module.startswith("vllm.") else str(module)


def _rope_kinds(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of rotary embedding anywhere in a model's configuration."""
    for key, value in fields.items():
        if not isinstance(value, Mapping):
            continue
        if "rope" in key or "rope_type" in value:
            kind = value.get("rope_type", value.get("type"))
            if kind is not None:
                yield str(kind)
            if not value.keys().isdisjoint(("long_factor", "short_factor")):
                yield "longrope"
        yield from _rope_kinds(value)


def _with_file(value: str) -> object:
    """Return a text; if it is the name of a file, with a digest of that."""
    is_file = ("." in value or os.sep in value) and os.path.isfile(value) and os.access(value, os.R_OK)
    return {"path": value, "contents": weights_fingerprint(Path(value))} if is_file else value


def _shortened(value: object) -> object:
    """Return a digest in place of a text or list that is too long to read."""
    if not isinstance(value, str | list):
        return value
    text = value if isinstance(value, str) else _as_json(value)
    return value if len(text) <= _LONGEST else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
