"""Names of the weights behind SGLang's settings (model, draft, adapters, other files), and of other code."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP

from kvtier import ConfigError
from kvtier._weights import (
    code_fingerprint,
    hub_commit,
    remote_code,
    transformers_release,
    weights_fingerprint,
)

ADAPTERS = "lora_paths"

_REVISIONS = {
    "model_path": "revision",
    "speculative_draft_model_path": "speculative_draft_model_revision",
}
"""Settings whose weights SGLang downloads from a hub into ``download_dir``, and their revisions' settings."""

_LOAD_FORMATS = {
    "auto", "bitsandbytes", "dummy", "fastsafetensors", "flash_rl", "gguf", "instanttensor", "jax", "layered",
    "mistral", "npcache", "pt", "runai_streamer", "safetensors", "sharded_state",
}  # fmt: skip
_WITH_FILES: Mapping[str, Collection[object]] = {
    "load_format": _LOAD_FORMATS,
    "speculative_draft_load_format": {None, *_LOAD_FORMATS},
    "weight_cache_mode": ("off",),
    "checkpoint_engine_wait_weights_before_ready": (False,),
    "language_only": (False,),
    "disaggregation_mode": ("null", "prefill"),
    "enable_pd_role_switch": (False,),
}
"""Values that take all weights from the files that settings name. Other values bring weights from another
engine, a daemon or a trainer, embeddings from remote encoders, or pages from a prefill engine."""


def weights_identity(
    settings: Mapping[str, object], download_dir: str | None, namespace: str
) -> Mapping[str, object]:
    """Return an identifier of the files behind each setting that has a path.

    Closed by default: a setting named ``..._path`` or ``..._file`` must be identified. Other settings count
    if they name existing files.

    Args:
        settings: SGLang's settings, by name.
        download_dir: the hub's cache that SGLang loads models from; None for the hub's own.
        namespace: the user's own part. If it is set, weights need no other identifier.

    Raises:
        ConfigError: the files of a setting cannot be distinguished from others of the same name.
    """
    found: dict[str, object] = {"model_path": None}
    for field, value in settings.items():
        if field == ADAPTERS:
            for name, path in _adapters(value):
                found[f"{field} {name}={path}"] = _target(path)
        elif isinstance(value, str) and value and field.endswith(("_path", "_file")):
            revision = settings.get(_REVISIONS.get(field, ""))
            cache = download_dir if field in _REVISIONS else None
            found[field] = _target(value, revision, cache)
        else:
            found.update({f"{field} {text}": files for text in _texts(value) if (files := _files(text))})
        if field in _WITH_FILES and value not in _WITH_FILES[field]:
            found[f"{field}={value}"] = None
    unknown = [field for field, target in found.items() if target is None]
    if unknown and not namespace:
        raise ConfigError(
            f"the weights of {', '.join(unknown)} cannot be identified: they come neither from a local "
            "directory nor from a known commit of Hugging Face's hub, or other engines compute pages, with "
            "their own settings. Set `namespace` in `kvtier` of the extra config to a name that changes "
            "with the weights and with what computes pages"
        )
    return found


def code_identity(settings: Mapping[str, object], namespace: str) -> Mapping[str, object]:
    """Return the versions of other code: transformers, packages, and repositories that models name.

    Raises:
        ConfigError: a package cannot be found, and there is no ``namespace``.
    """
    plugins = (*entry_points(group=GENERAL_PLUGINS_GROUP), *entry_points(group=PLATFORM_PLUGINS_GROUP))
    named = (envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get(), envs.SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE.get())
    packages = {*filter(None, named), *(plugin.module for plugin in plugins)}
    found = {it: code_fingerprint(it) for it in sorted(packages)}
    unknown = [package for package, digest in found.items() if digest is None]
    if unknown and not namespace:
        raise ConfigError(
            f"the code of {', '.join(unknown)} cannot be found: install it as a package, or set `namespace` "
            "in `kvtier` of the extra config to a name that changes with it"
        )
    models = [(settings.get(field), settings.get(revision)) for field, revision in _REVISIONS.items()]
    remote = {
        str(model): remote_code(str(model), None, str(revision) if revision else None, None)
        for model, revision in models
        if model and settings.get("trust_remote_code")
    }
    return {"transformers": transformers_release(), "packages": found, "remote": remote}


def _adapters(value: object) -> Iterator[tuple[str, str]]:
    """Yield the name and path of each LoRA adapter, from any form that SGLang accepts."""
    if isinstance(value, Mapping):
        yield from ((str(name), str(path)) for name, path in value.items())
        return
    items: Iterable[Any] = value if isinstance(value, list | tuple) else ()
    for item in items:
        if isinstance(item, str):
            name, is_named, path = item.partition("=")
            yield name, path if is_named else name
        elif isinstance(item, Mapping):
            yield str(item.get("lora_name")), str(item.get("lora_path"))
        else:  # SGLang's LoRARef
            yield str(getattr(item, "lora_name", None)), str(getattr(item, "lora_path", item))


def _target(
    path: str, revision: object = None, download_dir: str | None = None
) -> Mapping[str, object] | None:
    """Return an identifier of the files at a path or on the hub, or None if there is none."""
    if os.path.exists(path):
        return _files(path)
    if envs.SGLANG_USE_MODELSCOPE.get():
        return None  # the name belongs to another hub
    asked = str(revision) if revision else None
    commit = hub_commit(path, asked, download_dir)
    if commit is None:
        return None
    if download_dir is None:
        return {"commit": commit}
    return {"commit": commit, "config": hub_commit(path, asked, None)}  # transformers has its own cache


def _files(path: str) -> Mapping[str, object] | None:
    """Return an identifier of local files, or None if none of them is known to contain weights."""
    if not os.path.exists(path) or not (files := weights_fingerprint(Path(path))):
        return None
    config = Path(path) / "config.json"
    return {"files": files, "config": _digest(config) if config.is_file() else None}


def _texts(value: object) -> Iterator[str]:
    """Yield the strings of a setting that may be paths, including strings inside JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(value)
        except ValueError:
            return
    if isinstance(value, str) and os.sep in value:
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _texts(item)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
