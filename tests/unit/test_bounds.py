"""Sizes and durations: accepted forms, and the rejection of absurd values in every setting."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kvtier import TieringConfig
from kvtier._settings import validation
from kvtier._settings.quantities import MOST_BYTES, MOST_SECONDS, size
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers import TierConfig
from kvtier.tiers import _registry as registry
from kvtier.tiers.fs._maintenance import ages
from kvtier_tools.durations import duration

ABSURD = [math.inf, -math.inf, math.nan, -1, -0.5, 1e300, 10**30, "99999999999TiB", "1e300", "Infinity"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (0, 0),
        ("17", 17),
        (1e9, 10**9),
        ("200G", 200 * 10**9),
        ("200gb", 200 * 10**9),
        ("64 GiB", 64 * 2**30),
        ("1.5 KiB", 1536),
        (".5MB", 500_000),
        (MOST_BYTES, MOST_BYTES),
        ("4503599627370497KiB", 4503599627370497 * 1024),  # a float would lose the last bits
    ],
)
def test_sizes_have_units(text: object, meant: int) -> None:
    assert size(text) == meant


@pytest.mark.parametrize("value", [*ABSURD, True, None, [], "", "much", "8EiB", "1 potato", 1.5, "9" * 9999])
def test_bad_size_names_format(value: object) -> None:
    with pytest.raises(ValueError, match=r"64GiB|at most 9223372036854775807"):
        size(value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0), ("90s", 90), ("1.5m", 90), ("12h", 43_200), ("30 d", 2_592_000)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert duration(text) == seconds
    assert duration("36500d") == MOST_SECONDS


@pytest.mark.parametrize(
    "text", ["", "30", "never", "-1d", "nan", "1e300d", "36501d", "99999999999999999d", "9" * 9999 + "s"]
)
def test_bad_duration_names_format(text: str) -> None:
    with pytest.raises(ValueError, match=r"12h|at most 36500d"):
        duration(text)


def models() -> Iterator[tuple[type[BaseModel], dict[str, Any]]]:
    """Yield the settings model and each installed tier's model, with their minimal settings."""
    needed = {"root_dir": "/chunks", "bucket": "b", "addresses": ["localhost"], "path": "/chunks.db"}
    yield TieringConfig, {"cpu_bytes_to_use": "1GiB"}
    for name in sorted({info.name for info in registry.installed()}):
        model = registry.load(name).Config
        yield model, {"type": name, **{key: needed[key] for key in needed if key in model.model_fields}}


def numbers() -> list[tuple[type[BaseModel], dict[str, Any], str]]:
    return [
        (model, least, name)
        for model, least in models()
        for name, field in model.model_fields.items()
        if {int, float} & set(_kinds(field.annotation))
    ]


def _kinds(annotation: object) -> Iterator[object]:
    yield annotation if not typing.get_args(annotation) else None
    for inner in typing.get_args(annotation):
        yield from _kinds(inner)
    if isinstance(annotation, type) and issubclass(annotation, int) and annotation is not bool:
        yield int


@pytest.mark.parametrize(
    ("model", "least", "name"), [pytest.param(*one, id=f"{one[0].__name__}.{one[2]}") for one in numbers()]
)
def test_absurd_numbers_are_refused(model: type[BaseModel], least: dict[str, Any], name: str) -> None:
    may_be_negative = name in ("seed",)
    for value in ABSURD:
        if not (may_be_negative and value == -1):
            with pytest.raises(KVTierError, match=name):
                validation.build(model, {**least, name: value})


class Third(TierConfig):
    """Another distribution's settings, which set no bounds."""

    pause_s: float = 1.0
    window_bytes: int = 1
    ratio: float = 1.0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pause_s", math.inf, "finite"),
        ("pause_s", 1e300, "100 years"),
        ("pause_s", -1, "negative"),
        ("window_bytes", -1, "negative"),
        ("window_bytes", 10**30, "at most 9223372036854775807"),
        ("ratio", math.nan, "finite"),
    ],
)
def test_tier_author_need_not_check(name: str, value: float, words: str) -> None:
    from kvtier._settings import validation

    with pytest.raises(ConfigError, match=f"tier.{name}.*{words}"):
        validation.build(Third, {"type": "third", name: value}, "tier")


@given(st.floats(min_value=0, allow_nan=False))
def test_long_ttl_still_expires(ttl_s: float) -> None:
    leaving, ttl_us = ages.expired(ttl_s), int(min(ttl_s * 1e6, 2.0**64))
    assert len(leaving) == ages.CLASSES * ages.BUCKETS
    oldest = min(ttl_us, 2**50 - 1)
    assert ttl_us == 0 or not leaving[ages.bucket_of(oldest - 1)]
    assert leaving[ages.bucket_of(oldest + oldest // 128 + 1)] or ttl_us >= 2**50
    assert sorted(leaving[: ages.BUCKETS]) == list(leaving[: ages.BUCKETS])
    assert leaving == leaving[: ages.BUCKETS] * ages.CLASSES
