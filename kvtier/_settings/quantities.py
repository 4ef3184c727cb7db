"""Sizes: how users write them, and the bounds of numbers. Shared by settings and command-line options.

Absurd values are refused, because later arithmetic uses 64-bit integers: a time-to-live of 1e300 seconds once
wrapped to a negative one and emptied a root.
"""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import PurePath
from typing import Annotated, Final, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, WithJsonSchema, field_validator

MOST_BYTES: Final = 2**63 - 1
MOST_SECONDS: Final = 36_500 * 86_400
"""100 years."""

SIZE_PATTERN: Final = r"^\s*[0-9]*\.?[0-9]+\s*([kKmMgGtTpPeE]?[iI]?[bB]?)\s*$"
SIZE_NEEDED: Final = "write a number of bytes, or text with a unit, such as 64GiB, 500MB or 1073741824"

_AMOUNT: Final = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE: Final = re.compile(r"\s*([0-9]{1,2}\.?[0-9]*)\s*%\s*")
_PREFIXES: Final = "kmgtpe"
_BYTES: Final = {
    "": 1,
    "b": 1,
    **{letter + end: 1000**power for power, letter in enumerate(_PREFIXES, 1) for end in ("", "b")},
    **{letter + end: 1024**power for power, letter in enumerate(_PREFIXES, 1) for end in ("i", "ib")},
}


def size(value: object) -> int:
    """Return ``value`` in bytes. It is a whole number, or text such as ``64GiB``.

    ``kB``, ``MB`` and so on are powers of 1000, ``KiB``, ``MiB`` and so on of 1024. ValueError if it is not a
    size or has more than 63 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(SIZE_NEEDED)
    if isinstance(value, float) and not value.is_integer():  # nan and infinity, too
        raise ValueError(SIZE_NEEDED)
    text = value if isinstance(value, str) else str(int(value))
    amount, unit = amount_of(text, _BYTES, SIZE_NEEDED)
    if amount * unit > MOST_BYTES:
        raise ValueError(f"too large: at most {MOST_BYTES} bytes, just below 8EiB")
    return int(amount * unit)


def size_or_share(value: object) -> int | str:
    """Return bytes as ``size`` does, or unchanged text such as ``12%``, below 100%. Otherwise ValueError."""
    if isinstance(value, str) and (found := _SHARE.fullmatch(value)) and float(found[1]) < 100:
        return value
    try:
        return size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or a share such as 12%") from None


def bytes_of(amount: int | str, whole: int) -> int:
    """Return an amount of ``size_or_share`` in bytes; a share is relative to ``whole``."""
    return amount if isinstance(amount, int) else int(whole * float(amount.strip().rstrip("% ")) / 100)


def amount_of(text: str, units: dict[str, int], needed: str) -> tuple[Decimal, int]:
    """Split a number from its unit. Decimal: no digit of a large number is lost, and none is too large."""
    found = _AMOUNT.fullmatch(text)
    unit = None if found is None else units.get(found[2].lower())
    if found is None or unit is None:
        raise ValueError(needed)
    return Decimal(found[1]), unit


def _schema(pattern: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": pattern}, {"type": "integer", "minimum": 0}]}
    )


Size = Annotated[int, BeforeValidator(size), _schema(SIZE_PATTERN)]
"""Type of a setting in bytes: an ``int`` that users may also write as text with a unit, such as ``64GiB``."""

SizeOrShare = Annotated[
    int | str, BeforeValidator(size_or_share), _schema(rf"{SIZE_PATTERN}|^{_SHARE.pattern}$")
]
"""Type of a setting in bytes that users may also write as a share, such as ``12%``."""


class Settings(BaseModel):
    """Settings whose numbers are bounded, whatever else a field says of them.

    Every number is finite and has 63 bits at most; true and false are none. A name ``*_s`` is a duration of
    100 years at most, a name ``*_bytes`` a size. Text and paths can be encoded.
    """

    # Without inputs in errors: settings may hold secrets.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: object, info: ValidationInfo) -> object:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError("a number is needed, not true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _require_bounded(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):
            _require_bounds(info.field_name or "", value)
        if isinstance(value, str | PurePath):
            _require_text(value)
        return value


def _require_text(value: str | PurePath) -> None:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError("contains characters that are valid in neither text nor a path") from None


def _require_bounds(name: str, value: float) -> None:
    if name.endswith(("_s", "_bytes")) and value < 0:
        raise ValueError("must not be negative")
    if name.endswith("_s") and value > MOST_SECONDS:
        raise ValueError(f"too long: at most {MOST_SECONDS}, which is 100 years")
    if abs(value) > MOST_BYTES:
        raise ValueError(f"too large: at most {MOST_BYTES}")
