"""The guard in the tests' conftest works: kvtier's code may not block the event loop."""

from __future__ import annotations

import pytest

from kvtier._plugins import TIERS, _entries_of, installed

blockbuster = pytest.importorskip("blockbuster")


async def test_blocking_call_is_refused():
    _entries_of.cache_clear()
    with pytest.raises(blockbuster.BlockingError):
        installed(TIERS)  # reads the metadata files of every distribution
