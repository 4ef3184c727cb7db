"""KV events: what becomes available in which tier, and what ceases to be, reaches a subscriber."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import PROMPT_CHUNKS, Engine, EngineError, Forge, prompt

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")


class Subscriber:
    """Collects the events that an engine publishes."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self.events: list[dict[str, Any]] = []

    def take_in(self) -> None:
        while self._socket.poll(0):
            _, _, payload = self._socket.recv_multipart()
            self.events += msgspec.msgpack.decode(payload)[1]

    def hashes(self, kind: str, medium: str) -> set[bytes]:
        return {
            block
            for event in self.events
            if event["type"] == kind and event["medium"] == medium
            for block in event["block_hashes"]
        }

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def subscriber(endpoint: str) -> Iterator[Subscriber]:
    subscriber = Subscriber(endpoint)
    yield subscriber
    subscriber.close()


def test_events_of_both_tiers_arrive(
    forge: Forge, llama: Path, tmp_path: Path, endpoint: str, subscriber: Subscriber
) -> None:
    settings = {
        "cpu_bytes_to_use": "6MiB",  # three prompts: the fourth evicts
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
    }
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    prompts = [prompt(seed) for seed in range(8)]
    with forge.start(llama, settings, kv_events_config=events) as engine:
        _wait_for_subscription(engine, subscriber)
        for one in prompts:
            engine.served(one)
        everything = len(prompts) * PROMPT_CHUNKS
        _until(engine, subscriber, lambda: len(subscriber.hashes("BlockStored", "STORAGE")) >= everything)

    stored, removed = subscriber.hashes("BlockStored", "CPU"), subscriber.hashes("BlockRemoved", "CPU")
    assert len(stored) >= everything
    assert removed < stored
    assert len(stored) - len(removed) <= 48
    assert subscriber.hashes("BlockStored", "STORAGE") <= stored


def _wait_for_subscription(engine: Engine, subscriber: Subscriber) -> None:
    """Send prompts until the first event arrives: a publisher drops what nobody has subscribed to yet."""
    for seed in range(1000, 1100):
        engine.served(prompt(seed, 70))
        subscriber.take_in()
        if subscriber.events:
            return
    raise EngineError("no event has arrived")


def _until(
    engine: Engine, subscriber: Subscriber, condition: Callable[[], bool], patience_s: float = 20.0
) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, subscriber.events[-5:]
        engine.step()
        subscriber.take_in()
