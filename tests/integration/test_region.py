"""The primary tier's region belongs to one start of an engine, even if old processes outlive it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

from kvtier._memory._locked_file import PREFIX
from kvtier._memory.region import Region
from kvtier.adapters.vllm._compat import providing_engine
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec
from tests.integration.configurations import configure, engine_of, make_model

SETTINGS = {"cpu_bytes_to_use": "4MiB", "secondary_tiers": []}

_WORKER = """
import sys
from kvtier._memory.region import Region

name, slots, chunk_bytes, metadata_bytes, contents = sys.argv[1:]
sizes = int(slots), int(chunk_bytes)
with Region.open(name, *sizes, metadata_bytes=int(metadata_bytes), contents=contents) as region:
    print("open", flush=True)
    sys.stdin.readline()
    region.view(0)[:4] = b"late"
    region.metadata[:4] = b"late"
    print("written", flush=True)
    sys.stdin.readline()
"""


def _open(config: VllmConfig) -> tuple[Region, str]:
    """Return the region that a process of this engine opens, and the name that all its processes share."""
    engine = engine_of(config)
    with providing_engine(engine):
        spec = KVTierOffloadingSpec(build_offloading_config(config, engine.kv_cache_config))
    region = spec._open_region(is_first=True)
    return region, f"{region.slots} slots: {spec._shape}"


def _start(model: Path) -> VllmConfig:
    """Return the configuration of a new start of an engine with a fixed id."""
    config = configure(model, SETTINGS)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.engine_id = "fixed"
    return config


def test_surviving_worker_keeps_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = make_model(tmp_path / "model")
    scheduler, contents = _open(_start(model))
    assert scheduler.path is not None
    name, sizes = scheduler.path.name.removeprefix(PREFIX), (scheduler.slots, scheduler.chunk_bytes)
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, name, *map(str, sizes), str(len(scheduler.metadata)), contents],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            assert worker.stdout.readline() == "open\n"
            scheduler.close()
            restarted, _ = _open(_start(model))
            with restarted:
                worker.stdin.write("\n")
                worker.stdin.flush()
                assert worker.stdout.readline() == "written\n"
                assert bytes(restarted.view(0)[:4]) == bytes(restarted.metadata[:4]) == bytes(4)
        finally:
            worker.communicate("\n", timeout=60)


def test_one_start_shares_one_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config = _start(make_model(tmp_path / "model"))
    # vLLM pickles the configuration for its workers.
    with _open(config)[0] as one, _open(pickle.loads(pickle.dumps(config)))[0] as other:
        assert one.path == other.path
