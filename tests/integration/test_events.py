"""KV events: a router that follows them knows each tier's blocks, and never assumes more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, make_offload_key
from vllm.v1.request import Request

from kvtier._core.kv_events import KVEvent
from kvtier.adapters.vllm._compat import providing_engine
from kvtier.adapters.vllm._telemetry.events import ChunkEvents, EventStream
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec
from kvtier.keys import content_hash
from kvtier_bench.engine.compared import BLOCK_TOKENS
from tests.integration.configurations import configure, engine_of, make_model
from tests.integration.conftest import in_full
from tests.integration.harness import PROMPT_CHUNKS, Engine, Launcher, chunks_in, prompt
from tests.integration.router import Place, Router, pieces

pytestmark = pytest.mark.releases

BLOCK_BYTES = 128 * 1024
TRAILER_BYTES = 128
CPU, FILES, SMALL = ("CPU", None), ("STORAGE", "fs"), ("CPU", "small")
PROMPTS = [prompt(seed) for seed in range(8)]
NEW_PROMPT = prompt(8)

RECOMPUTING = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(f"ipc://{tmp_path}/events")
    yield router
    router.close()


def _start(launcher: Launcher, model: Path, settings: dict[str, Any], router: Router, **more: Any) -> Engine:
    return launcher.start(model, {"self_describing_kv_events": True, **settings}, **router.arguments, **more)


@pytest.mark.parametrize("blocks", [in_full(1), 2])
def test_router_sees_every_eviction(
    launcher: Launcher, llama: Path, tmp_path: Path, router: Router, blocks: int
) -> None:
    root = tmp_path / "root"
    chunk_bytes, chunks = blocks * BLOCK_BYTES, PROMPT_CHUNKS // blocks
    small = 40 // blocks
    tiers = [
        {"type": "fs", "root_dir": str(root)},
        {"type": "dummy", "name": "small", "capacity_bytes": small * (chunk_bytes + TRAILER_BYTES)},
    ]
    settings = {"cpu_bytes_to_use": 48 * BLOCK_BYTES, "blocks_per_chunk": blocks, "secondary_tiers": tiers}
    with _start(launcher, llama, settings, router, kv_transfer_config=RECOMPUTING) as engine:
        router.join(engine)
        for one in PROMPTS:
            engine.served(one)
        metrics = engine.settled()
        slots = metrics.value("kvtier_slots") - metrics.value("kvtier_free_slots")
        router.until(
            engine,
            lambda: (
                len(router.belief[FILES]) >= len(PROMPTS) * chunks
                and all(len(router.chain(place, PROMPTS[-1])) == chunks for place in (CPU, SMALL))
                and len(router.belief[CPU]) <= slots
                and len(router.belief[SMALL]) <= small
            ),
        )
        chains = [router.chain(FILES, one) for one in PROMPTS]

        assert len(router.belief[CPU]) == slots
        assert len(router.belief[SMALL]) == small
        assert router.belief[FILES] == {content_hash(key) for key in chunks_in(root)}
        assert chains[-1] == router.chain(CPU, PROMPTS[-1]) == router.chain(SMALL, PROMPTS[-1])
        assert all(len(chain) == chunks for chain in chains)
        assert {event["group_idx"] for event in router.events} == {0}
        assert {_locality(router, place) for place in (CPU, FILES)} == {"LOCAL", None}

        cleared, known = router.cleared, set(router.belief[FILES])
        engine.reset(connector=False)
        router.until(engine, lambda: router.cleared > cleared)
        assert router.belief[FILES] == known, "of the device's cache alone"
        assert not any(router.since_cleared.values())
        engine.served(NEW_PROMPT)
        router.until(engine, lambda: len(router.since_cleared[FILES]) >= chunks)
        assert router.since_cleared[FILES] == router.belief[FILES] - known, "it relearns new chunks alone"

        _check_predictions(engine, router, blocks)

        cleared = router.cleared
        engine.reset()
        router.until(engine, lambda: router.cleared > cleared and not any(router.belief.values()))


def _check_predictions(engine: Engine, router: Router, blocks: int) -> None:
    """Check that the engine serves what the router predicts for a prompt that branches inside a chunk, or has
    a salt."""
    salted = prompt(100)
    engine.served(salted, salt="mine")
    router.until(engine, lambda: router.predicted(salted, "mine") == PROMPT_CHUNKS * BLOCK_TOKENS)
    branch = prompt(101, shared=PROMPTS[-1][: 3 * BLOCK_TOKENS])
    for asked, salt in [(branch, None), (salted, "mine"), (salted, "theirs"), (salted, None)]:
        engine.reset(connector=False)
        router.take_in()
        predicted = router.predicted(asked, salt)
        _, loaded = engine.served(asked, salt=salt)
        assert predicted == sum(loaded.values()) * blocks * BLOCK_TOKENS


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_chunks_are_described_as_blocks_of_the_device(blocks: int) -> None:
    """vLLM's own events describe a device whose blocks are as long as kvtier's chunks."""
    init_none_hash(sha256)
    size = 16 * blocks
    images = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=length))
        for name, offset, length in [("first", 5, 20), ("second", 30, 100), ("third", 131, 3)]
    ]
    request = Request(
        "r",
        list(range(256)),
        SamplingParams(),
        None,
        mm_features=images,
        lora_request=LoRARequest("adapter", 1, "/adapter"),
        cache_salt="mine",
        block_hasher=get_request_block_hasher(16, sha256),
    )
    keys = [make_offload_key(found, 0) for found in request.block_hashes[blocks - 1 :: blocks]]
    group: Any = SimpleNamespace(
        group_idx=0,
        tokens_per_block=16,
        tokens_per_chunk=size,
        hashes_per_chunk=blocks,
        sliding_window_size_in_chunks=None,
        kv_event_group_spec=OffloadingEventGroupSpec(None, None),
    )
    tracker = ChunkEvents(OffloadingEventsTracker(OffloadingKVEventsConfig(True, True)))
    tracker.record_lookup(request, group, 0, keys[0])
    assert list(tracker.take_events([])) == []
    assert not tracker._pending_event_metadata, "a chunk that is not announced is forgotten"
    for place, key in enumerate(keys):
        tracker.record_store(request, group, place, key)
    stream = EventStream([], self_describing=True)
    ours = tracker.take_events(stream.events([KVEvent(keys, None, removed=False)]))
    pool = BlockPool(len(keys) + 1, True, 16, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(len(keys)), 0, len(keys), size, 0)

    described = [list(pieces(msgspec.to_builtins(event))) for event in ours]
    (expected,) = [list(pieces(msgspec.to_builtins(event))) for event in pool.take_events()]
    assert [piece for (piece,) in described] == expected
    assert len(expected) == 256 // size


@pytest.mark.parametrize("is_ours", [False, True])
def test_only_kvtiers_connector_describes_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = {"cpu_bytes_to_use": "64MiB", "self_describing_kv_events": True}
    config = configure(make_model(tmp_path / "model"), settings)
    engine = replace(engine_of(config), sees_blocks=is_ours)
    with providing_engine(engine):
        spec = KVTierOffloadingSpec(build_offloading_config(config, engine.kv_cache_config))
    assert spec.kv_events_config.self_describing_kv_events is is_ours


@pytest.mark.full
def test_vllms_connector_announces_hashes_alone(launcher: Launcher, llama: Path, router: Router) -> None:
    with _start(launcher, llama, {"cpu_bytes_to_use": "16MiB"}, router) as engine:
        router.join(engine)
        engine.served(PROMPTS[0], salt="mine")
        router.until(engine, lambda: len(router.belief[CPU]) == PROMPT_CHUNKS)
        assert router.predicted(PROMPTS[0]) == 0
        assert "self_describing_kv_events" in engine.log()


def _locality(router: Router, place: Place) -> str | None:
    (locality,) = {event.get("locality") for event in router.stored(place)}
    return None if locality is None else str(locality)
