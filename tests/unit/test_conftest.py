"""The tests' own guard works: kvtier's code may not block the event loop."""

from __future__ import annotations

import pytest

from kvtier.tiers import _registry as registry

blockbuster = pytest.importorskip("blockbuster")


async def test_a_blocking_call_of_kvtier_in_the_loop_is_refused():
    with pytest.raises(blockbuster.BlockingError):
        registry.installed()  # reads the metadata files of every distribution


@pytest.mark.blocking(reason="shows that the mark works")
async def test_nor_in_a_test_that_blocks_on_purpose():
    assert registry.installed()


async def test_the_tests_themselves_may_touch_files(tmp_path):
    (tmp_path / "file").write_text("text")
    assert (tmp_path / "file").read_text() == "text"
