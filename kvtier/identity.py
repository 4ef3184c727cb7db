"""The full identity of a cache: what must be equal for bytes to be given from one engine to another.

The digest of the identity names the place where chunks are kept; the manifest spells it out beside
the data, so that a difference can be shown in words. Values are spelled in one canonical way, so
that two executors of one engine that spell a value differently still share (vllm-project/vllm#56928).
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

from kvtier.errors import IdentityError

FORMAT_VERSION = 1

_LINES, _LINE = 20, 400  # most that a message lists, and characters of each

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
    """Spell ``value`` in the one way that identities use.

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
    """Spell a dtype's name as torch does, without the module."""
    bare = name.removeprefix("torch.").lower()
    return _DTYPES.get(bare, bare)


@dataclass(frozen=True)
class Identity:
    """All that the bytes of a chunk depend on, apart from the tokens that its key names.

    Attributes:
        model: the model's name, used in readable names of places.
        fields: everything the bytes depend on, canonically spelled; see ``make``.
    """

    model: str
    fields: Mapping[str, Value]

    @staticmethod
    def make(model: str, fields: Mapping[str, object]) -> Identity:
        """Spell ``fields`` canonically and add the model and kvtier's format version."""
        spelled = {str(name): canonical(value) for name, value in fields.items()}
        return Identity(model, {**spelled, "model": model, "kvtier_format": FORMAT_VERSION})

    @cached_property
    def manifest(self) -> str:
        """The identity as JSON text, keys sorted: what ``config.json`` holds."""
        return json.dumps(self.fields, sort_keys=True, indent=2, ensure_ascii=True, allow_nan=False) + "\n"

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the manifest: 32 bytes."""
        return hashlib.sha256(self.manifest.encode()).digest()

    @property
    def short_digest(self) -> bytes:
        """The first 16 bytes of the digest: what a chunk's trailer carries."""
        return self.digest[:16]

    @cached_property
    def namespace(self) -> str:
        """A name for places that hold this cache: ``<model>_<digest>``, safe as a file name."""
        readable = re.sub(r"[^A-Za-z0-9.-]+", "-", self.model.rstrip("/").rsplit("/", 1)[-1]).strip(".-")
        return f"{readable[:48] or 'model'}_{self.digest.hex()[:16]}"

    def require(self, manifest: str, where: str) -> None:
        """Compare with a manifest found beside data.

        Raises:
            IdentityError: it cannot be read, or it differs; the message lists what differs.
        """
        try:
            differences = difference(json.loads(manifest), dict(self.fields))
        except (ValueError, RecursionError) as error:
            raise IdentityError(
                f"{where} is not readable JSON ({error}); move it away to start anew"
            ) from None
        if differences:
            raise IdentityError(f"{where} belongs to another cache: " + _listed(differences))


def _listed(differences: Sequence[str]) -> str:
    """Join differences to one message, which stays readable whatever was found."""
    shown = [line if len(line) <= _LINE else f"{line[:_LINE]}..." for line in differences[:_LINES]]
    more = [f"and {len(differences) - _LINES} more"] if len(differences) > _LINES else []
    text = "; ".join(shown + more)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)  # it goes to logs and terminals


def difference(found: object, expected: object, path: str = "") -> list[str]:
    """List in words what differs between two canonical values."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        lines: list[str] = []
        for name in sorted({*found, *expected}):
            inner = f"{path}.{name}" if path else str(name)
            if name not in expected:
                lines.append(f"{inner} is {found[name]!r} there and not set here")
            elif name not in found:
                lines.append(f"{inner} is not set there and {expected[name]!r} here")
            else:
                lines += difference(found[name], expected[name], inner)
        return lines
    # Compared as spelled: the digest tells 1 from 1.0 and from true, which Python's equality does not.
    same = json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
    return [] if same else [f"{path} is {found!r} there and {expected!r} here"]
