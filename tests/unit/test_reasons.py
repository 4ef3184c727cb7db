"""Reasons become metric labels: few words, known in advance, that add up."""

from __future__ import annotations

import socket

import pytest

from kvtier import _reasons as reasons


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (TimeoutError(), "timeout"),
        (socket.timeout(), "timeout"),  # noqa: UP041 - the old name is what libraries raise
        (ConnectionRefusedError(), "connection"),
        (BrokenPipeError(), "connection"),
        (OSError(28, "no space"), "error"),
        (KeyError("x"), "error"),
    ],
)
def test_exceptions_have_words(error: BaseException, word: str) -> None:
    assert reasons.word_for(error) == word
    assert word in reasons.TRANSFER


def test_unknown_words_are_errors() -> None:
    words = {"full", "checksum"}
    assert reasons.bounded({"full": 2, "of their own": 3}, words, 5) == {"full": 2, "error": 3}
    assert reasons.bounded({"full": 2}, words, 5) == {"full": 2, "error": 3}
    assert reasons.bounded({"full": 5, "checksum": 5}, words, 6) == {"full": 5, "checksum": 1}
    assert reasons.bounded({"full": 5}, words, 0) == {}
    assert reasons.bounded({"full": -5, "checksum": 1}, words, 1) == {"checksum": 1}
