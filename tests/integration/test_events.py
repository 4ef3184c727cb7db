"""KV events: a router that follows them knows each tier's blocks, and never assumes more."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
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
from tests.integration.harness import (
    PATIENCE_S,
    PROMPT_CHUNKS,
    Engine,
    Launcher,
    Tokens,
    chunks_in,
    prompt,
)

zmq = pytest.importorskip("zmq")

pytestmark = pytest.mark.releases

BLOCK_BYTES = 128 * 1024
TRAILER_BYTES = 128
CPU, FILES, SMALL = ("CPU", None), ("STORAGE", "fs"), ("CPU", "small")
PROMPTS = [prompt(seed) for seed in range(8)]
NEW_PROMPT = prompt(8)

RECOMPUTING = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}

Place = tuple[str, str | None]
"""A medium, and whose it is."""

Piece = tuple[bytes | None, tuple[int, ...], tuple[Any, ...]]
"""What an index knows a block by: the hash of its parent, its tokens and its extra keys."""


class Router:
    """Follows the events that an engine publishes, as a router does.

    It misses events from before it joined, and knows a prompt by tokens and extra keys alone.

    Attributes:
        endpoint: the endpoint for the engine's events.
        events: the events of kvtier's tiers.
        belief: the hashes of the blocks that it assumes in each place.
        cleared: number of events that cleared everything.
        since_cleared: the belief of a router that forgets all tiers at such an event.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)  # milliseconds
        self._socket.connect(endpoint)
        self.endpoint = endpoint
        self.events: list[dict[str, Any]] = []
        self.belief: defaultdict[Place, set[bytes]] = defaultdict(set)
        self.cleared = 0
        self.since_cleared: defaultdict[Place, set[bytes]] = defaultdict(set)

    def join(self, engine: Engine) -> None:
        """Wait until what the engine publishes gets here."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.cleared:
            assert time.monotonic() < deadline, "nothing is heard of the engine"
            engine.reset(connector=False)  # which it publishes
            engine.step()
            self.take_in()

    def take_in(self) -> None:
        while self._socket.poll(0):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "AllBlocksCleared":
                    self.cleared += 1
                    self.since_cleared.clear()
                elif event["medium"] != "GPU":
                    self._follow(event)

    def _follow(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        hashes, belief = set(event["block_hashes"]), self.belief[_place(event)]
        if event["type"] == "BlockStored":
            assert belief.isdisjoint(hashes), "stored once"
            belief |= hashes
            self.since_cleared[_place(event)] |= hashes
        else:
            assert hashes <= belief, "removed once, and after it was stored"
            belief -= hashes
            self.since_cleared[_place(event)] -= hashes

    def stored(self, place: Place) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == "BlockStored" and _place(event) == place]

    def chain(self, place: Place, tokens: Tokens, salt: str | None = None) -> list[bytes]:
        """Return the hashes of a prompt's leading blocks that were stored in a place."""
        known = {piece: found for event in self.stored(place) for piece, found in _pieces(event)}
        return [found for _, found in _walk(known, tokens, salt)]

    def predicted(self, tokens: Tokens, salt: str | None = None) -> int:
        """Return how many leading tokens of a prompt the tiers hold by the events, orphans dropped."""
        held = set().union(*self.belief.values())
        events = [event for event in self.events if event["type"] == "BlockStored"]
        known = {piece: found for event in events for piece, found in _pieces(event) if found in held}
        return sum(size for size, _ in _walk(known, tokens, salt))

    def close(self) -> None:
        self._socket.close(linger=0)


def _pieces(event: dict[str, Any]) -> Iterator[tuple[Piece, bytes]]:
    """Yield each block of an event with its hash; none if the event does not describe itself."""
    if not event["block_size"]:
        return
    parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
    extra_keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
    for at, (found, extra) in enumerate(zip(event["block_hashes"], extra_keys, strict=True)):
        yield (parent, tuple(tokens[at * size : (at + 1) * size]), tuple(extra or ())), found
        parent = found


def _walk(known: dict[Piece, bytes], tokens: Tokens, salt: str | None) -> Iterator[tuple[int, bytes]]:
    """Yield size and hash of a prompt's leading blocks, as far as they are known from its beginning."""
    sizes = {len(block) for _, block, _ in known}
    begin, parent = 0, None
    while True:
        extra = (salt,) if salt and not begin else ()
        pieces = [(parent, tuple(tokens[begin : begin + size]), extra) for size in sizes]
        if not (found := [piece for piece in pieces if piece in known]):
            return
        parent = known[found[0]]
        yield len(found[0][1]), parent
        begin += len(found[0][1])


def _place(event: dict[str, Any]) -> Place:
    return event["medium"], event.get("ownership")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(f"ipc://{tmp_path}/events")
    yield router
    router.close()


def _start(launcher: Launcher, model: Path, settings: dict[str, Any], router: Router, **more: Any) -> Engine:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    return launcher.start(
        model,
        {"self_describing_kv_events": True, **settings},
        kv_events_config=events,
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
        **more,
    )


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
        _until(
            engine,
            router,
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
        _until(engine, router, lambda: router.cleared > cleared)
        assert router.belief[FILES] == known, "of the device's cache alone"
        assert not any(router.since_cleared.values())
        engine.served(NEW_PROMPT)
        _until(engine, router, lambda: len(router.since_cleared[FILES]) >= chunks)
        assert router.since_cleared[FILES] == router.belief[FILES] - known, "it relearns new chunks alone"

        _check_predictions(engine, router, blocks)

        cleared = router.cleared
        engine.reset()
        _until(engine, router, lambda: router.cleared > cleared and not any(router.belief.values()))


def _check_predictions(engine: Engine, router: Router, blocks: int) -> None:
    """Check that the engine serves what is predicted for prompts that leave amid a chunk, or have a salt."""
    salted = prompt(100)
    engine.served(salted, salt="mine")
    _until(engine, router, lambda: router.predicted(salted, "mine") == PROMPT_CHUNKS * BLOCK_TOKENS)
    branch = prompt(101, shared=PROMPTS[-1][: 3 * BLOCK_TOKENS])
    for asked, salt in [(branch, None), (salted, "mine"), (salted, "theirs"), (salted, None)]:
        engine.reset(connector=False)
        router.take_in()
        predicted = router.predicted(asked, salt)
        _, loaded = engine.served(asked, salt=salt)
        assert predicted == sum(loaded.values()) * blocks * BLOCK_TOKENS


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_chunks_are_described_as_blocks_of_the_device(blocks: int) -> None:
    """vLLM's own events are those of a device whose blocks are as long as chunks."""
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

    described = [list(_pieces(msgspec.to_builtins(event))) for event in ours]
    (expected,) = [list(_pieces(msgspec.to_builtins(event))) for event in pool.take_events()]
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
        _until(engine, router, lambda: len(router.belief[CPU]) == PROMPT_CHUNKS)
        assert router.predicted(PROMPTS[0]) == 0
        assert "self_describing_kv_events" in engine.log()


def _locality(router: Router, place: Place) -> str | None:
    (locality,) = {event.get("locality") for event in router.stored(place)}
    return None if locality is None else str(locality)


def _until(engine: Engine, router: Router, condition: Callable[[], bool]) -> None:
    """Keep the engine stepping until what it has told fulfils a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        engine.step()
        router.take_in()
        if condition():
            return
        assert time.monotonic() < deadline, router.events[-5:]
