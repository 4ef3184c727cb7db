"""Reasons: the words for misses, drops, refusals and failures, and their meanings in ``_reasons.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Final

_tables: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads(
    (files("kvtier") / "_reasons.toml").read_text(encoding="utf-8")
)

MISS: Final = _tables["MISS"]
WAITS: Final = _tables["WAITS"]
STORE_REFUSED: Final = _tables["STORE_REFUSED"]
DROPPED: Final = _tables["DROPPED"]
KEEP_REFUSED: Final = _tables["KEEP_REFUSED"]
HINT_ACTIONS: Final = _tables["HINT_ACTIONS"]
NO_WORK: Final = _tables["NO_WORK"]
BY_CHOICE: Final = _tables["BY_CHOICE"]
PUT_DROPPED: Final[Mapping[str, str]] = {
    **{word: text for word, text in NO_WORK.items() if word not in ("filter", "gate")},
    **BY_CHOICE,
}
SKIPPED: Final[Mapping[str, str]] = {
    word: text for word, text in NO_WORK.items() if word not in ("backlog", "back_pressure")
}
BREAKER_OPENED: Final = _tables["BREAKER_OPENED"]
RETRY: Final = _tables["RETRY"]
POLICY_REPLACED: Final = _tables["POLICY_REPLACED"]
PROCESS_ENDED: Final = _tables["PROCESS_ENDED"]
TRANSFER: Final = _tables["TRANSFER"]

UNKNOWN: Final = "error"
"""The reason in ``TRANSFER`` under which any undeclared word is counted."""

TRANSIENT: Final = frozenset({"timeout", "connection"})
"""Reasons in ``TRANSFER`` that are worth a retry. ``SecondaryTier.transient`` adds a tier's own."""


def word_for(error: BaseException) -> str:
    """Return the reason in ``TRANSFER`` for an exception."""
    if isinstance(error, TimeoutError):
        return "timeout"
    return "connection" if isinstance(error, ConnectionError) else UNKNOWN


def bounded(counts: Mapping[str, int], words: Collection[str], total: int) -> dict[str, int]:
    """Return counts of reasons that add up to ``total`` and use only ``words``.

    TypeError or ValueError if ``counts`` is not a mapping to numbers.
    """
    result: dict[str, int] = {}
    left = total
    for word, count in counts.items():
        taken = min(left, max(0, int(count)))
        if taken:
            known = word if word in words else UNKNOWN
            result[known] = result.get(known, 0) + taken
            left -= taken
    if left:
        result[UNKNOWN] = result.get(UNKNOWN, 0) + left
    return result
