"""The effort of long tests: enough for each commit, or everything for ``nox -s full``."""

from __future__ import annotations

import os

FULL = os.environ.get("KVTIER_TESTS") == "full"


def effort(quick: int, full: int) -> int:
    """Return how many examples, steps or rounds a long test runs this time."""
    return full if FULL else quick
