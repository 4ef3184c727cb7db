"""A router that follows the KV events of an engine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.integration.harness import PATIENCE_S, Engine, Tokens

zmq = pytest.importorskip("zmq")

Place = tuple[Any, ...]
"""A medium, its owner, and a KV cache group other than the first."""

Piece = tuple[bytes | None, tuple[int, ...], tuple[Any, ...]]
"""An index identifies a block by its parent's hash, its tokens and its extra keys."""


class Router:
    """Follows the events that an engine publishes.

    It misses events from before it joined, and knows a prompt only by its tokens and extra keys.

    Attributes:
        endpoint: the endpoint for the engine's events.
        events: the events of kvtier's tiers.
        belief: the hashes of the blocks that it assumes in each place.
        cleared: number of events that cleared everything.
        since_cleared: the belief of a router that forgets all tiers on such an event.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 0)  # all messages since the last call
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)  # milliseconds
        self._socket.connect(endpoint)
        self.endpoint = endpoint
        self.events: list[dict[str, Any]] = []
        self.belief: defaultdict[Place, set[bytes]] = defaultdict(set)
        self.cleared = 0
        self.since_cleared: defaultdict[Place, set[bytes]] = defaultdict(set)

    def join(self, engine: Engine) -> None:
        """Wait until the engine's published events arrive."""
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
        """Return the hashes of a prompt's leading blocks that are stored in a place."""
        known = {piece: found for event in self.stored(place) for piece, found in pieces(event)}
        return [found for _, found in _walk(known, tokens, salt)]

    def predicted(self, tokens: Tokens, salt: str | None = None) -> int:
        """Return how many leading tokens of a prompt the tiers hold by the events, orphans excluded."""
        held = set().union(*self.belief.values())
        events = [event for event in self.events if event["type"] == "BlockStored"]
        known = {piece: found for event in events for piece, found in pieces(event) if found in held}
        return sum(size for size, _ in _walk(known, tokens, salt))

    def close(self) -> None:
        self._socket.close(linger=0)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``Launcher.start`` for an engine that publishes to this router."""
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}
        return {"kv_events_config": events, "environment": {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}}

    def until(self, engine: Engine, condition: Callable[[], bool]) -> None:
        """Keep the engine stepping until its published events fulfil a condition."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            engine.step()
            self.take_in()
            if condition():
                return
            assert time.monotonic() < deadline, self.events[-5:]


def pieces(event: dict[str, Any]) -> Iterator[tuple[Piece, bytes]]:
    """Yield each block of an event with its hash; none if the event does not describe itself."""
    if not event["block_size"]:
        return
    parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
    extra_keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
    for at, (found, extra) in enumerate(zip(event["block_hashes"], extra_keys, strict=True)):
        yield (parent, tuple(tokens[at * size : (at + 1) * size]), tuple(extra or ())), found
        parent = found


def _walk(known: dict[Piece, bytes], tokens: Tokens, salt: str | None) -> Iterator[tuple[int, bytes]]:
    """Yield size and hash of a prompt's leading blocks, as far as an unbroken chain of them is known."""
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
    group = event["group_idx"]
    return event["medium"], event.get("ownership"), *([group] if group else [])
