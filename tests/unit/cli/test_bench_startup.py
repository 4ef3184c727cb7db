"""The measurement of a start, on regions of a few MiB."""

from __future__ import annotations

import sys

import pytest

from kvtier.cli import bench_startup
from kvtier.cli.bench_startup import Machine, Startup, run
from kvtier.errors import ConfigError
from kvtier.memory.region import SHARED_MEMORY


def test_every_region_is_measured_at_every_size_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtier.adapters.vllm.startup", None)  # as where vLLM is not installed
    others = set(SHARED_MEMORY.glob("kvtier_bench-*"))
    machine, rows = run((0.125, 0.25), rounds=2)
    assert [(type(record), record.vllm.partition(":")[0]) for record in machine] == [(Machine, "not there")]
    assert {row.gib for row in rows} == {0.125, 0.25}
    assert len({row.region for row in rows}) * 2 == len(rows)
    for row in rows:
        assert row.returns_s > 0  # the slots may all be ready by then
        assert 0 < row.first_slot_s <= row.all_slots_s
        assert row.spread >= 1
        assert (row.first_over_vllm, row.all_over_vllm) == (0.0, 0.0)
    assert set(SHARED_MEMORY.glob("kvtier_bench-*")) <= others


def test_beside_another_region_ratios_are_of_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Native:
        seconds = iter((0.5, 0.25))

        @staticmethod
        def version() -> str:
            return "1.2.3"

        @staticmethod
        def open_and_close(slots: int, chunk_bytes: int) -> float:
            assert slots * chunk_bytes == 2**27
            return next(Native.seconds)

    monkeypatch.setitem(sys.modules, "kvtier.adapters.vllm.startup", Native)
    (machine,), rows = run((0.125,), rounds=2)
    assert machine.vllm == "1.2.3"
    (native,) = [row for row in rows if row.region == "vLLM"]
    assert native == Startup("vLLM", 0.125, 0.375, 0.375, 0.375, 2.0, 1.0, 1.0)
    assert all(row.all_over_vllm > 0 for row in rows)


def test_too_little_shared_memory_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_startup, "GIB", 2**60)
    with pytest.raises(ConfigError, match="4 GiB do not fit into /dev/shm"):
        run((1.0, 4.0))
