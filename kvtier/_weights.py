"""Distinguishes the weights and code of models, by samples of their files or the commit of a hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from pathlib import Path

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
_FILES_BESIDE = ("*.json", "*.py")
_FOLDERS = ("", "*/", "*/*/")  # folders of encoders, and of adapters for tasks, which vLLM merges (Jina)
_NOT_THE_WEIGHTS = re.compile(
    r"config\.json|tokenizer|vocab|added_tokens|special_tokens_map|chat_template|merges", re.IGNORECASE
)
_OF_TOKENIZERS = (".json", ".model", ".py", ".tiktoken", ".txt")
_CODE = (".py", ".so")
_SAMPLES = 1024
_SAMPLE_BYTES = 4096


def weights_fingerprint(model: Path) -> str | None:
    """Return a digest of a model's files: their names, sizes and samples of their bytes.

    A model that was replaced at the same path must not get the old model's chunks. The digest has up to 1,024
    evenly spread samples of 4 KiB from each file, which takes milliseconds. It can miss a change of less than
    half a percent of a file. The setting ``namespace`` covers such changes. Files that say how to use the
    weights count as well: settings of quantisation, image processors and generation, and code. Those of the
    tokenizer do not, nor does ``config.json``, which the caller adds as the engine has read it. Encoders and
    adapters may have their own folders: all these files count there.

    ``model`` is the directory of the files, or the one file that is all of the model. None if there are no
    weights: then the revision names them.
    """
    files = [model] if model.is_file() else _files(model)
    return _digest((path, _name_below(model, path)) for path in files)


def tokenizer_fingerprint(place: Path) -> str | None:
    """Return a digest of the files in a folder that may belong to a tokenizer; None if there are none."""
    named = (it for it in sorted(place.glob("*")) if it.suffix in _OF_TOKENIZERS and it.name != "config.json")
    return _digest((it, it.name) for it in named if it.is_file() and os.access(it, os.R_OK))


def code_fingerprint(module: str) -> str | None:
    """Return a digest of the package that a module belongs to; None if its files are unknown."""
    try:
        found = find_spec(module.partition(".")[0])
    except ValueError:  # a script has no spec
        return None
    folders = [Path(it) for it in (found and found.submodule_search_locations) or ()]
    if found is not None and found.origin is not None and not folders:
        return _code_digest([Path(found.origin)])
    return _code_digest(folders)


def transformers_release() -> str:
    """Return the version of transformers, and a digest of its code if it was built from sources."""
    import transformers

    version = str(transformers.__version__)
    return f"{version} {code_fingerprint('transformers')}" if ".dev" in version else version


def remote_code(
    model: str, config: object, revision: str | None, code_revision: str | None
) -> Mapping[str, str | None]:
    """Return the repositories, other than its own, from which a model loads code, and their commits.

    Other repositories are named in an ``auto_map`` of the model's files. Code that is not in the hub's cache
    of this machine has not run here: it has no commit.

    Args:
        model: a directory, or the name of a repository.
        config: the model's configuration, as the engine has read it.
        revision: the revision of the model's own repository.
        code_revision: the revision of all code, if it differs.
    """
    folder = Path(model) if os.path.isdir(model) else _hub_folder(model, revision, None)
    configs = [config, *(_json(path) for path in sorted(folder.glob("*.json") if folder else ()))]
    named = {it for found in configs for it in _repositories(found)} - {model}
    if code_revision is not None:
        named.add(model)
    return {
        it: _code_digest([Path(it)]) if os.path.isdir(it) else hub_commit(it, code_revision, None)
        for it in sorted(named)
    }


def _json(path: Path) -> object:
    with suppress(OSError, ValueError):
        if "config" in path.name:  # the remaining files are large: tokenizers, and indices of weights
            return json.loads(path.read_bytes())
    return None


def _repositories(config: object) -> Iterator[str]:
    """Yield the repositories from which a configuration, or a nested one, loads classes."""
    fields = config if isinstance(config, Mapping) else {}
    for key, value in fields.items():
        if key == "auto_map" and isinstance(value, Mapping):
            names = (it for kind, it in value.items() if isinstance(it, str) and kind != "AutoTokenizer")
            yield from (name.partition("--")[0] for name in names if "--" in name)
        yield from _repositories(value)


def _code_digest(places: list[Path]) -> str | None:
    """Return a digest of modules, and of all code in folders; None if there is none."""
    return _digest(
        (path, _name_below(place, path))
        for place in places
        for path in ([place] if place.is_file() else sorted(place.rglob("*")))
        if path.suffix in _CODE
    )


def _files(model: Path) -> list[Path]:
    """Return the files of weights in a model's directory and folders, and then the other files that count."""
    weights, beside = (
        [
            path
            for folder, pattern in product(_FOLDERS, patterns)
            for path in sorted(model.glob(folder + pattern))
            if path.is_file() and os.access(path, os.R_OK)
        ]
        for patterns in (_WEIGHT_FILES, _FILES_BESIDE)
    )
    counted = (it for it in beside if it.parent != model or not _NOT_THE_WEIGHTS.match(it.name))
    return [*weights, *counted] if weights else []


def _name_below(place: Path, path: Path) -> str:
    return path.name if path == place else str(path.relative_to(place))


def _digest(files: Iterable[tuple[Path, str]]) -> str | None:
    """Return a digest of samples of files, each with its name; None if there are none."""
    digest: hashlib._Hash | None = None
    for path, name in files:
        digest, size = digest or hashlib.sha256(), path.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with path.open("rb", buffering=0) as file:
            for offset in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return None if digest is None else digest.hexdigest()[:32]


def hub_commit(name: str, revision: str | None, cache_dir: str | None) -> str | None:
    """Return the commit of a model in a Hugging Face hub cache; None without one. Uses no network."""
    folder = _hub_folder(name, revision, cache_dir)
    return None if folder is None else folder.name


def _hub_folder(name: str, revision: str | None, cache_dir: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (OSError, ValueError):  # there is no commit, or the name is not a repository
        return None
