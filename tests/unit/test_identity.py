"""Identities: one spelling, one digest, and differences in words."""

from __future__ import annotations

import enum
import re
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import Identity
from kvtier._identity import Difference, canonical, canonical_dtype, differences
from kvtier.errors import IdentityError


class Layout(enum.Enum):
    NHD = "nhd"
    NESTED = (1, PurePosixPath("/a"))


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        ("text", "text"),
        (PurePosixPath("/models/x"), "/models/x"),
        (b"\x00\xff", "00ff"),
        (Layout.NHD, "nhd"),
        (Layout.NESTED, [1, "/a"]),
        (Number.ONE, 1),
        ((1, 2), [1, 2]),
        ([1, (2, [3])], [1, [2, [3]]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (OrderedDict([("b", (1,)), (1, Layout.NHD)]), {"b": [1], "1": "nhd"}),
    ],
)
def test_canonical_spelling(value, expected):
    spelled = canonical(value)
    assert spelled == expected
    assert type(spelled) is type(expected)


@pytest.mark.parametrize("value", [object(), len, 1j, [object()], {"a": object()}])
def test_unspellable_is_refused(value):
    with pytest.raises(IdentityError, match="cannot be part of an identity"):
        canonical(value)


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        ("half", "float16"),
        ("torch.float16", "float16"),
        ("float", "float32"),
        ("fp8", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
    ],
)
def test_dtype_spellings(given_name, expected):
    assert canonical_dtype(given_name) == expected


def test_torch_dtype_has_its_name():
    torch = pytest.importorskip("torch")
    assert canonical(torch.bfloat16) == "bfloat16"


def test_callers_spelling_is_irrelevant():
    one = Identity.make("m", {"ranks": (1, 2), "root": Path("/a"), "kind": Layout.NHD, "tags": {"y", "x"}})
    two = Identity.make("m", {"tags": ["x", "y"], "kind": "nhd", "root": "/a", "ranks": [1, 2]})
    assert one.digest == two.digest
    assert one.namespace == two.namespace
    assert one.manifest == two.manifest


BASE = {"block_size": 16, "dtype": "bfloat16", "groups": [{"heads": 2}], "namespace": ""}


def test_field_cannot_pose_as_model():
    assert Identity.make("m", {"model": "n", "kvtier_format": 99}) == Identity.make("m", {})


@pytest.mark.parametrize(
    ("model", "readable"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/llama/", "llama"),
        ("..", "model"),
        ("../..", "model"),
        (".hidden", "hidden"),
        ("a b\nc\x00d", "a-b-c-d"),
        ("数字", "model"),
        ("", "model"),
        ("x" * 300, "x" * 48),
    ],
)
def test_namespace_is_readable(model, readable):
    namespace = Identity.make(model, {}).namespace
    assert namespace.rpartition("_")[0] == readable


@given(st.text())
def test_namespace_is_a_file_name(model):
    assert re.fullmatch(r"[A-Za-z0-9-][A-Za-z0-9.-]{0,47}_[0-9a-f]{16}", Identity.make(model, {}).namespace)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _values, max_size=4))
def test_own_manifest_is_accepted(fields):
    identity = Identity.make("m", fields)
    identity.require(identity.manifest, "config.json")


def test_difference_is_in_words():
    there = Identity.make("m", {**BASE, "seed": 1})
    here = Identity.make("m", {**BASE, "groups": [{"heads": 4}], "block_size": 32, "hash": "sha256"})
    with pytest.raises(IdentityError) as caught:
        here.require(there.manifest, "/cache/config.json")
    assert str(caught.value) == (
        "/cache/config.json belongs to another cache: block_size is 16 there and 32 here; "
        "groups is [{'heads': 2}] there and [{'heads': 4}] here; "
        "hash is not set there and 'sha256' here; seed is 1 there and not set here"
    )


UNREADABLE = r"^config.json is not readable JSON .*; move it away to start an empty cache$"


@pytest.mark.parametrize(
    ("text", "words"),
    [*((text, UNREADABLE) for text in ("", "{", "\x00")), ("null", "another cache"), ("[]", "another cache")],
)
def test_torn_manifest_is_refused(text, words):
    with pytest.raises(IdentityError, match=words):
        Identity.make("m", {}).require(text, "config.json")


def test_non_json_numbers_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        _ = Identity.make("m", {"scale": float("nan")}).digest


@pytest.mark.parametrize(
    ("found", "expected", "lines"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": True}, {"a": 1}, [Difference("a", True, 1)]),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [Difference("a.b", 1, 2)]),
        ({"a": {"b": 1}}, {"a": 3}, [Difference("a", {"b": 1}, 3)]),
        ({"a": {}}, {"a": {"b": None}}, [Difference("a.b", None, None, (False, True))]),
        ({"a": {"b": 1}}, {"a": {}}, [Difference("a.b", 1, None, (True, False))]),
        (
            {"a": {"b": 1}},
            {"c": 0},
            [Difference("a", {"b": 1}, None, (True, False)), Difference("c", None, 0, (False, True))],
        ),
    ],
)
def test_value_differences(found, expected, lines):
    assert differences(found, expected) == lines
