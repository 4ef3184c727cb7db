"""``kvtier bench restart`` measures kept memory, and frees it."""

from __future__ import annotations

import os

from kvtier._memory.region import SHARED_MEMORY
from kvtier_bench.storage import restart


def test_kept_memory_is_measured_and_freed() -> None:
    row = restart.run([1 / 64], [65536], rounds=1)[0]
    assert isinstance(row, restart.Restart)
    assert (row.gib, row.chunk_kib) == (1 / 64, 64)
    assert 0 < row.first_ms / 1e3 <= row.verified_s
    assert not [*SHARED_MEMORY.glob(f"kvtier_bench-*-{os.getpid()}*")]
