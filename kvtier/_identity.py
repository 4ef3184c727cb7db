"""The identity of a cache: everything that must be equal before engines may share chunks.

Tiers store chunks under the digest of the identity, together with the manifest, so that differences can be
listed. Values have one canonical spelling: two processes of an engine that spell a value differently still
share (vllm-project/vllm#56928).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import PurePath
from typing import Final

from kvtier.errors import IdentityError

FORMAT_VERSION = 2
"""Raised when older caches must not be read. Format 1 can hold chunks stored in part or from other blocks."""

LIBRARY_VARIABLES: Final = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "FLA_TRIL_PRECISION",
        "FLA_USE_FAST_OPS",
        "NVIDIA_TF32_OVERRIDE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "XHS_VIDEO_JPEG_QUALITY",  # Engines read this variable for models that process videos as JPEGs.
    }
)
"""Variables without an engine's prefix that count, because they change how numbers are computed. The one open
list: the libraries below engines have too many variables to name them all."""

_LINES, _LINE = 20, 400  # maximum number of differences in a message, and of characters of each

Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]

_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "fp8": "fp8_e4m3",
}


def canonical(value: object) -> Value:
    """Return the canonical form of ``value``, which identities use.

    Enums become their values, paths and types their names, a torch dtype its bare name, tuples and
    sets lists (sets sorted), mappings dicts with string keys.

    Raises:
        IdentityError: the value has no canonical spelling.
    """
    if isinstance(value, Enum):
        return canonical(value.value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((canonical(item) for item in value), key=repr)
    if isinstance(value, Sequence):
        return [canonical(item) for item in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return canonical_dtype(str(value))
    raise IdentityError(f"a {type(value).__name__} cannot be part of an identity: {value!r}")


def canonical_dtype(name: str) -> str:
    """Return a dtype's name as torch spells it, without the module."""
    bare = name.removeprefix("torch.").lower()
    return _DTYPES.get(bare, bare)


@dataclass(frozen=True)
class Identity:
    """Everything that determines a chunk's bytes, except for the tokens: its key names those.

    Attributes:
        model: name of the model; the readable part of ``namespace``.
        fields: everything that the bytes depend on, in canonical spelling; see ``make``.
    """

    model: str
    fields: Mapping[str, Value]

    @staticmethod
    def make(model: str, fields: Mapping[str, object]) -> Identity:
        """Return the identity of ``fields``, the model and kvtier's format version."""
        spelled = {str(name): canonical(value) for name, value in fields.items()}
        return Identity(model, {**spelled, "model": model, "kvtier_format": FORMAT_VERSION})

    @cached_property
    def manifest(self) -> str:
        """The identity as JSON with sorted keys: the contents of ``config.json``."""
        return json.dumps(self.fields, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False) + "\n"

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the manifest: 32 bytes."""
        return hashlib.sha256(self.manifest.encode()).digest()

    @property
    def short_digest(self) -> bytes:
        """The first 16 bytes of the digest, as in a chunk's trailer."""
        return self.digest[:16]

    @cached_property
    def namespace(self) -> str:
        """The cache's name in a tier, ``<model>_<digest>``; safe as a file name."""
        readable = re.sub(r"[^A-Za-z0-9.-]+", "-", self.model.rstrip("/").rsplit("/", 1)[-1]).strip(".-")
        return f"{readable[:48] or 'model'}_{self.digest.hex()[:16]}"

    def require(self, manifest: str, where: str) -> None:
        """Raise IdentityError if a stored manifest is not JSON or differs; the message says how."""
        try:
            found = differences(json.loads(manifest), dict(self.fields))
        except (ValueError, RecursionError) as error:
            raise IdentityError(
                f"{where} is not readable JSON ({error}); move it away to start an empty cache"
            ) from None
        if found:
            lines = [_in_words(difference) for difference in found]
            raise IdentityError(f"{where} belongs to another cache: " + _listed(lines))


def _listed(lines: Sequence[str]) -> str:
    """Join differences to one message of bounded length."""
    shown = [line if len(line) <= _LINE else f"{line[:_LINE]}..." for line in lines[:_LINES]]
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    text = "; ".join(shown + more)
    # the text goes to logs and terminals
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Difference:
    """A value that two identities do not have in common."""

    setting: str  # name of the field, nested names joined by dots
    one: object  # the first one's value; None if it is not set there: at its default, say
    other: object
    is_set: tuple[bool, bool] = (True, True)  # in the first and in the other


_ABSENT: Final = object()


def differences(one: object, other: object, path: str = "") -> list[Difference]:
    """Return the differences of two canonical values, with mappings compared name by name."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return [
            found
            for name in sorted({*one, *other})
            for found in differences(
                one.get(name, _ABSENT), other.get(name, _ABSENT), f"{path}.{name}" if path else str(name)
            )
        ]
    if one is _ABSENT:
        return [Difference(path, None, other, (False, True))]
    if other is _ABSENT:
        return [Difference(path, one, None, (True, False))]
    # Compared as spelled: the digest tells 1 from 1.0 and from true, which Python's equality does not.
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    return [] if same else [Difference(path, one, other)]


def _in_words(difference: Difference) -> str:
    values = zip((difference.one, difference.other), difference.is_set, strict=True)
    there, here = (repr(value) if is_set else "not set" for value, is_set in values)
    return f"{difference.setting} is {there} there and {here} here"
