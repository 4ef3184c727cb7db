"""How much long tests do: enough for each commit, or all that ``nox -s full`` asks for."""

from __future__ import annotations

import os

FULL = os.environ.get("KVTIER_TESTS") == "full"


def effort(quick: int, full: int) -> int:
    """Return how many examples, steps or rounds a long test does in this run."""
    return full if FULL else quick
