"""Parsers reject malformed bytes and do nothing else: the corpus, and a few random edits of it.

``nox -s fuzz`` searches for new inputs, guided by coverage. Inputs that fail go into ``corpus/<parser>/``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.keys import pack_key
from kvtier.tiers import _seal as seal
from kvtier.tiers._seal import Integrity
from tests.effort import effort
from tests.fuzz import parsers
from tests.fuzz.parsers import CORPUS, PARSERS

FILES = sorted(path for path in CORPUS.glob("*/*") if path.parent.name in PARSERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_corpus_is_safe(path: Path) -> None:
    PARSERS[path.parent.name](path.read_bytes())


@st.composite
def edited(draw: st.DrawFn, whole: list[bytes]) -> bytes:
    """Draw an input with a few pieces replaced, removed, inserted or doubled."""
    data = draw(st.sampled_from(whole))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 64)))
        piece = draw(st.binary(max_size=16) | st.just(data[start:end] * 2))
        data = data[:start] + piece + data[end:]
    return data


@pytest.mark.parametrize("name", PARSERS)
def test_edited_corpus_is_safe(name: str) -> None:
    whole = [path.read_bytes() for path in FILES if path.parent.name == name]

    @given(edited(whole) | st.binary(max_size=512))
    @settings(max_examples=effort(40, 5000))
    def edits_are_refused_or_sound(data: bytes) -> None:
        PARSERS[name](data)

    edits_are_refused_or_sound()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"groups":' * 900 + "1" + "}" * 900,
        '{"groups":' + "[" * 700 + "]" * 700 + "}",
        '{"dtype": "' + "x" * 1_000_000 + '"}',
        "{" + ",".join(f'"field{number}": {number}' for number in range(10_000)) + "}",
        '{"\\u001b[2Jgone\\n": "\\n"}',
        "1" * 10_000,
    ],
    ids=lambda text: text[:12],
)
def test_huge_manifests_are_safe(text: str) -> None:
    parsers.manifest(text.encode())


def test_sound_input_is_accepted() -> None:
    """If parsers rejected everything, the tests above would show nothing."""
    parsers.IDENTITY.require(parsers.IDENTITY.manifest, "here")
    payload, key = memoryview(parsers.PAYLOAD), parsers.KEY
    assert seal.check(parsers.TRAILER, key, payload, parsers.DIGEST) is Integrity.SOUND
    assert seal.check(parsers.TRAILER, pack_key(b"b" * 64, 1), payload, parsers.DIGEST) is Integrity.FOREIGN
