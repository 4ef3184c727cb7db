"""A root that is shared with vLLM's own fs tier: each reads what the other has written, with right tokens."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import (
    PROMPT_CHUNKS,
    Engine,
    EngineError,
    Forge,
    chunk_files,
    namespaces,
    prompt,
)

STORY = [prompt(seed) for seed in (1, 2, 3)]
CHUNKS = len(STORY) * PROMPT_CHUNKS
PATIENCE_S = 60.0
MEMORY = "64MiB"
HITS = "vllm:kv_offload_tiering_chunk_hits"


def shared(root: Path, **settings: Any) -> dict[str, Any]:
    """Return kvtier's settings for a root that vLLM's own tier uses, too."""
    tier = {"type": "fs", "root_dir": str(root), "layout": "vllm", "integrity": "none"}
    return {"cpu_bytes_to_use": MEMORY, "secondary_tiers": [tier], **settings}


def start_native(forge: Forge, model: Path, root: Path, **more: Any) -> Engine:
    """Start an engine with vLLM's own tiering: its manager, its tier, its files."""
    extra = {
        "spec_name": "NativeTieringSpec",
        "spec_module_path": "kvtier_bench.vllm_tiering",
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        **more.pop("settings", {}),
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return forge.start(model, kv_transfer_config=transfer, **more)


def until_written(engine: Engine, root: Path, count: int) -> None:
    """Keep an engine of vLLM's own stepping until its files are there."""
    deadline = time.monotonic() + PATIENCE_S
    while len(chunk_files(root)) < count:
        assert time.monotonic() < deadline, f"{len(chunk_files(root))} of {count} files"
        engine.step()


def flip(files: list[Path]) -> None:
    """Damage every file in the middle, without changing its length."""
    for file in files:
        held = bytearray(file.read_bytes())
        middle = len(held) // 2
        held[middle : middle + 4096] = bytes(byte ^ 0x55 for byte in held[middle : middle + 4096])
        file.write_bytes(held)


def test_kvtier_reads_what_vllm_has_written(
    forge: Forge, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    with start_native(forge, llama, tmp_path) as engine:
        by_vllm = engine.generate(*STORY)
        until_written(engine, tmp_path, CHUNKS)
    written = {file: file.read_bytes() for file in chunk_files(tmp_path)}
    with forge.start(llama, shared(tmp_path)) as engine:
        by_kvtier, loaded = engine.served(*STORY)
        log = engine.log()
    with start_native(forge, llama, tmp_path) as engine:
        again = engine.generate(*STORY)
        hits = engine.metrics().value(HITS)

    assert by_vllm == by_kvtier == again == reference(*STORY)
    assert loaded == {"fs": CHUNKS}
    assert hits == CHUNKS  # kvtier's visit has not spoiled the place for vLLM
    assert len(namespaces(tmp_path)) == 1
    assert {file: file.read_bytes() for file in chunk_files(tmp_path)} == written
    assert "CAN GIVE WRONG TOKENS" in log


def test_vllm_reads_what_kvtier_has_written(
    forge: Forge, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    with forge.start(llama, shared(tmp_path)) as engine:
        by_kvtier, _ = engine.served(*STORY)
        log = engine.log()
    assert "CAN GIVE WRONG TOKENS" in log
    files = chunk_files(tmp_path)
    with start_native(forge, llama, tmp_path) as engine:
        by_vllm = engine.generate(*STORY)
        hits = engine.metrics().value(HITS)
    # The control: what both serve is what the files say.
    flip(files)
    with forge.start(llama, shared(tmp_path)) as engine:
        misled, loaded = engine.served(*STORY)

    assert by_kvtier == by_vllm == reference(*STORY)
    assert (len(files), hits) == (CHUNKS, CHUNKS)
    assert len(namespaces(tmp_path)) == 1
    assert loaded == {"fs": CHUNKS}
    assert misled != by_kvtier


def test_chunks_of_several_blocks_are_shared_and_other_configurations_are_not(
    forge: Forge, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    two = {"blocks_per_chunk": 2}
    with start_native(forge, llama, tmp_path, settings=two) as engine:
        engine.generate(*STORY)
        until_written(engine, tmp_path, CHUNKS // 2)
    with forge.start(llama, shared(tmp_path, **two)) as engine:
        as_alike, loaded_alike = engine.served(*STORY)
    with forge.start(llama, shared(tmp_path)) as engine:
        as_other, loaded_other = engine.served(*STORY)
    with start_native(forge, llama, tmp_path) as engine:
        by_vllm = engine.generate(*STORY)
        hits = engine.metrics().value(HITS)

    assert as_alike == as_other == by_vllm == reference(*STORY)
    assert (loaded_alike, loaded_other) == ({"fs": CHUNKS // 2}, {})
    assert hits == CHUNKS
    assert len(namespaces(tmp_path)) == 2


def test_a_reset_hides_the_shared_chunks_and_leaves_them_to_vllm(
    forge: Forge, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    with start_native(forge, llama, tmp_path) as engine:
        engine.generate(*STORY)
        until_written(engine, tmp_path, CHUNKS)
    files = chunk_files(tmp_path)
    with forge.start(llama, shared(tmp_path)) as engine:
        engine.reset()
        after, loaded = engine.served(*STORY)
    with forge.start(llama, shared(tmp_path)) as engine:
        reopened, loaded_reopened = engine.served(*STORY)

    assert after == reopened == reference(*STORY)
    assert loaded == loaded_reopened == {}
    assert set(files) <= set(chunk_files(tmp_path))


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"namespace": "mine"}, {}, ["namespace"]),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, ["xxhash", "PYTHONHASHSEED"]),
        ({"canonical_layout": True}, {}, ["canonical_layout"]),
    ],
)
def test_what_vllm_would_keep_otherwise_is_refused(
    forge: Forge,
    llama: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    arguments: dict[str, Any],
    words: list[str],
) -> None:
    with pytest.raises(EngineError) as refusal:
        forge.start(llama, shared(tmp_path, **settings), **arguments)
    message = str(refusal.value).splitlines()[0]
    assert "layout 'vllm'" in message
    assert all(word in message for word in words), message
    assert not chunk_files(tmp_path)


def test_a_place_whose_manifest_says_something_else_is_not_used(
    forge: Forge, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    with start_native(forge, llama, tmp_path) as engine:
        engine.generate(*STORY)
        until_written(engine, tmp_path, CHUNKS)
    (name,) = namespaces(tmp_path)
    manifest = tmp_path / name / "config.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "dtype": "float16"}))
    with forge.start(llama, shared(tmp_path)) as engine:
        answers, loaded = engine.served(*STORY)
        up = engine.metrics().value("kvtier_tier_up", tier="fs")
        log = engine.log()

    assert answers == reference(*STORY)
    assert (loaded, up) == ({}, 0)
    assert "dtype is 'float16' there and 'float32' here" in log


# ----------------------------------------------------------------- without an engine, by its own types


def spec_like(**changes: Any) -> Any:
    """Return what the name is made from, of an engine with one worker; a part may be another one."""
    from vllm.v1.kv_offload import config

    parallel = {"world_size": 1, "tp_size": 1, "pp_size": 1, "is_parallelism_agnostic": True}
    names = {field.name for field in dataclasses.fields(config.OffloadingParallelConfig)}
    others = {"rank": 0, "pcp_size": 1, "dcp_size": 1, "data_parallel_rank_local": None}
    given = {**dict.fromkeys(names, 0), **others, **parallel, **changes.get("parallel", {})}
    made = config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(32, ("layer.0",), 0),),
        worker_kv_bytes_per_block=8192,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=config.OffloadingModelConfig("org/m", "float32"),
        cache=config.OffloadingCacheConfig(32, changes.get("blocks_per_chunk", 1)),
        parallel=config.OffloadingParallelConfig(**given),
    )
    return SimpleNamespace(config=made)


def engine_like(windowed: bool = False) -> Any:
    """Return what of an engine's configuration is asked for."""
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256")
    return SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=cache), is_windowed=lambda group: windowed
    )


@pytest.mark.parametrize(
    ("changes", "windowed", "shape", "words"),
    [
        ({"parallel": {"world_size": 2, "tp_size": 2}}, False, (2, 8192, 1), "2 workers"),
        ({"parallel": {"world_size": 2, "pp_size": 2}}, False, (2, 8192, 1), "2 workers"),
        ({"blocks_per_chunk": 2}, True, (1, 8192, 2), "a window or state"),
        ({}, False, (1, 4096, 1), "vLLM's chunks have 8192 bytes and kvtier's 4096"),
    ],
)
def test_bytes_that_differ_are_refused(
    changes: dict[str, Any], windowed: bool, shape: tuple[int, int, int], words: str
) -> None:
    pytest.importorskip("vllm")
    from kvtier.adapters.vllm.interop import native_identity
    from kvtier.adapters.vllm.parallel import SlotShape
    from kvtier.errors import ConfigError

    with pytest.raises(ConfigError, match=words) as refusal:
        native_identity(spec_like(**changes), engine_like(windowed), SlotShape(*shape), "")
    assert "layout 'vllm'" in str(refusal.value)


def test_the_name_is_that_of_vllms_own_mapper() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.kv_offload.file_mapper import FileMapper

    from kvtier.adapters.vllm.interop import native_identity
    from kvtier.adapters.vllm.parallel import SlotShape
    from kvtier.keys import pack_key
    from kvtier.tiers.fs.layout import chunk_path, data_dir

    spec, key = spec_like(), pack_key(bytes(range(32)), 3)
    identity = native_identity(spec, engine_like(), SlotShape(1, 8192, 1), "")
    mapper = FileMapper.from_offloading_spec("/root", spec, blocks_per_file=1, parallel_agnostic=True)
    ours = chunk_path(data_dir(identity.namespace, 0), key)
    assert mapper.get_file_name(key) == f"/root/{ours}"
    assert mapper.get_config_file_path() == f"/root/{identity.namespace}/config.json"
    assert json.loads(identity.manifest) == mapper.get_run_config()
