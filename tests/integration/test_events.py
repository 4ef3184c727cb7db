"""KV events: a router that follows them knows each tier's blocks, and never assumes more."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.keys import content_hash
from kvtier_bench.engine.compared import BLOCK_TOKENS
from tests.integration.conftest import in_full
from tests.integration.harness import (
    PATIENCE_S,
    PROMPT_CHUNKS,
    PROMPT_TOKENS,
    Engine,
    Launcher,
    Tokens,
    chunks_in,
    prompt,
)

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

pytestmark = pytest.mark.releases

BLOCK_BYTES = 128 * 1024
TRAILER_BYTES = 128
CPU, FILES, SMALL = ("CPU", None), ("STORAGE", "fs"), ("CPU", "small")
PROMPTS = [prompt(seed) for seed in range(8)]
NEW_PROMPT = prompt(8)

Place = tuple[str, str | None]
"""A medium, and whose it is."""


class Router:
    """Follows the events that an engine publishes, as a router does.

    It misses events from before it joined.

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

    def chain(self, place: Place, tokens: Tokens, blocks: int = 1) -> list[bytes]:
        """Return the hashes of a prompt's blocks, found in the events by their tokens and parents alone."""
        known = {
            (event["parent_block_hash"], *event["token_ids"]): event["block_hashes"]
            for event in self.stored(place)
            if event["block_size"] == BLOCK_TOKENS
        }
        chain: list[bytes] = []
        width = blocks * BLOCK_TOKENS
        for start in range(0, len(tokens) - width + 1, width):
            chain += known[chain[-1] if chain else None, *tokens[start : start + width]]
        return chain

    def has_heard_of(self, place: Place, tokens: Tokens, blocks: int) -> bool:
        """Return whether all blocks of a prompt were said to be stored there, be they there still or not."""
        try:
            self.chain(place, tokens, blocks)
        except KeyError:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=0)


def _place(event: dict[str, Any]) -> Place:
    return event["medium"], event.get("ownership")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(f"ipc://{tmp_path}/events")
    yield router
    router.close()


def _start(launcher: Launcher, model: Path, settings: dict[str, Any], router: Router) -> Engine:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    return launcher.start(
        model,
        {"self_describing_kv_events": True, **settings},
        kv_events_config=events,
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    )


@pytest.mark.parametrize("blocks", [1, in_full(2)])
def test_router_sees_every_eviction(
    launcher: Launcher, llama: Path, tmp_path: Path, router: Router, blocks: int
) -> None:
    root = tmp_path / "root"
    chunk_bytes = blocks * BLOCK_BYTES
    tiers = [
        {"type": "fs", "root_dir": str(root)},
        {"type": "dummy", "name": "small", "capacity_bytes": 40 // blocks * (chunk_bytes + TRAILER_BYTES)},
    ]
    settings = {"cpu_bytes_to_use": 48 * BLOCK_BYTES, "blocks_per_chunk": blocks, "secondary_tiers": tiers}
    with _start(launcher, llama, settings, router) as engine:
        router.join(engine)
        for one in PROMPTS:
            engine.served(one)
        metrics = engine.settled()
        slots = metrics.value("kvtier_slots") - metrics.value("kvtier_free_slots")
        _until(
            engine,
            router,
            lambda: (
                len(router.belief[FILES]) >= len(PROMPTS) * PROMPT_CHUNKS
                and all(router.has_heard_of(place, PROMPTS[-1], blocks) for place in (CPU, SMALL))
                and len(router.belief[CPU]) <= slots * blocks
                and len(router.belief[SMALL]) <= 40
            ),
        )
        files = {content_hash(key) for key in chunks_in(root)}
        chains = [router.chain(FILES, one, blocks) for one in PROMPTS]

        assert len(router.belief[CPU]) == slots * blocks
        assert len(router.belief[SMALL]) == 40
        assert files <= router.belief[FILES]
        assert len(router.belief[FILES]) == len(files) * blocks
        assert (
            chains[-1] == router.chain(CPU, PROMPTS[-1], blocks) == router.chain(SMALL, PROMPTS[-1], blocks)
        )
        assert all(len(chain) == PROMPT_TOKENS // BLOCK_TOKENS for chain in chains)
        assert {event["group_idx"] for event in router.events} == {0}
        assert {_locality(router, place) for place in (CPU, FILES)} == {"LOCAL", None}

        cleared, known = router.cleared, set(router.belief[FILES])
        engine.reset(connector=False)
        _until(engine, router, lambda: router.cleared > cleared)
        assert router.belief[FILES] == known, "of the device's cache alone"
        assert not any(router.since_cleared.values())
        engine.served(NEW_PROMPT)
        _until(engine, router, lambda: len(router.since_cleared[FILES]) >= PROMPT_CHUNKS)
        assert router.since_cleared[FILES] == router.belief[FILES] - known, "it relearns new chunks alone"

        cleared = router.cleared
        engine.reset()
        # Of chunks of several blocks a subscriber learns by AllBlocksCleared alone: docs/vllm.md.
        _until(
            engine,
            router,
            lambda: router.cleared > cleared and (blocks > 1 or not any(router.belief.values())),
        )


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
