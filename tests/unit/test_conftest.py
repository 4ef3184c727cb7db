"""The tests' own guard works: kvtier's code may not block the event loop."""

from __future__ import annotations

import pytest

from kvtier.tiers import _registry as registry

blockbuster = pytest.importorskip("blockbuster")


async def test_blocking_call_is_refused():
    with pytest.raises(blockbuster.BlockingError):
        registry.installed()  # reads the metadata files of every distribution
