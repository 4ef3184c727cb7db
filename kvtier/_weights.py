"""Tells the weights of models apart, by samples of their files."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
_FILES_BESIDE = ("*.json", "*.py")
_NOT_THE_WEIGHTS = re.compile(
    r"config\.json|tokenizer|vocab|added_tokens|special_tokens_map|chat_template|merges", re.IGNORECASE
)
_SAMPLES = 1024
_SAMPLE_BYTES = 4096


def weights_fingerprint(model: Path) -> str | None:
    """Return a digest of a model's files: their names, sizes and samples of their bytes.

    A model that was replaced at the same path must not be given the old one's chunks. Up to 1,024 evenly
    spread samples of 4 KiB are read from each file, some milliseconds of work. A change of less than about
    half a percent of a file can go unseen: that is what the setting ``namespace`` is for. Files that say how
    to use the weights count as well (settings of the quantisation, of image processors and of generation,
    code), but not the tokenizer's, nor ``config.json``, which the caller adds as the engine has read it.

    Args:
        model: the directory that holds the files, or the one file that is all of the model.

    Returns:
        The digest, or None if there are no weights: then the revision names them.
    """
    digest = hashlib.sha256()
    if model.is_file():
        _add_samples(digest, model)
        return digest.hexdigest()[:32]
    weights = [path for pattern in _WEIGHT_FILES for path in sorted(model.glob(pattern))]
    if not weights:
        return None
    beside = [path for pattern in _FILES_BESIDE for path in sorted(model.glob(pattern))]
    for path in [*weights, *(path for path in beside if not _NOT_THE_WEIGHTS.match(path.name))]:
        _add_samples(digest, path)
    return digest.hexdigest()[:32]


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    with path.open("rb", buffering=0) as file:
        for offset in range(0, size, step):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
