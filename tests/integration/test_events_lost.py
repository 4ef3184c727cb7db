"""A subscriber that loses messages or whose engine restarts never assumes blocks that do not exist.

vLLM's own publisher sends the manager's events; a random scheduler evicts, resets and fails. The
subscriber follows docs/vllm.md: it requests missed batches again, and forgets everything if they are
unavailable or the connection is lost.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.v1.kv_offload.base import Medium, OffloadingEvent

from kvtier import Identity
from kvtier._core.states import ChunkState
from kvtier.keys import OffloadKey
from kvtier.tiers import Knowledge
from kvtier.tiers.fs import FsTier
from kvtier.tiers.fs._layout import chunk_path, data_dir
from tests.integration.harness import PATIENCE_S
from tests.integration.test_bridge import CHUNK_BYTES, AnyTier, Scheduler, World, dummy, files

zmq = pytest.importorskip("zmq")

TRAILER_BYTES = 128
PLENTY, FEW = 100_000, 2
"""Number of batches that the publisher keeps for replays."""

Place = tuple[str, str | None]
Belief = defaultdict[Place, set[bytes]]


class Feed:
    """vLLM's publisher, and the number of published batches."""

    def __init__(self, folder: Path, kept: int) -> None:
        self._publisher = ZmqEventPublisher(
            0, f"ipc://{folder}/events", f"ipc://{folder}/replay", buffer_steps=kept
        )
        self.sent = 0

    def publish(self, events: Iterable[OffloadingEvent] = ()) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=[_published(event) for event in events]))
        self.sent += 1

    def close(self) -> None:
        self._publisher.shutdown()


def _published(event: OffloadingEvent) -> BlockStored | BlockRemoved:
    if event.removed:
        return BlockRemoved(
            block_hashes=list(event.keys), medium=event.medium.value, ownership=event.ownership
        )
    return BlockStored(
        block_hashes=list(event.keys),
        parent_block_hash=None,
        token_ids=[],
        block_size=1,
        lora_id=None,
        lora_name=None,
        medium=event.medium.value,
        ownership=event.ownership,
    )


class Subscriber:
    """Follows a feed that loses messages, as well as possible.

    Args:
        folder: where the feed's sockets are.
        loses: returns whether the next message is lost.

    Attributes:
        belief: the blocks that it assumes in each place.
        lost: messages that did not arrive.
        forgot: how often it has forgotten everything.
    """

    def __init__(self, folder: Path, loses: Callable[[], bool]) -> None:
        self._folder = folder
        self._loses = loses
        self.belief: Belief = defaultdict(set)
        self.lost = self.forgot = 0
        self._connect()

    def _connect(self) -> None:
        """Join with a new socket, whose queue has no messages from an earlier engine."""
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)  # milliseconds
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"ipc://{self._folder}/events")
        self._last = -1

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def catch_up(self, feed: Feed) -> None:
        """Process all sent messages; losses at the end show up with the next message."""
        target, deadline = feed.sent - 1, time.monotonic() + PATIENCE_S
        while self._last < target:
            assert time.monotonic() < deadline, (self._last, target)
            if not self._socket.poll(50):
                feed.publish()
            while self._socket.poll(0):
                _, seq, payload = self._socket.recv_multipart()
                if self._loses():
                    self.lost += 1
                else:
                    self._arrived(int.from_bytes(seq, "big"), payload)

    def wait_for_loss_of_connection(self) -> None:
        assert self._monitor.poll(PATIENCE_S * 1000), "the connection is still there"
        self.close()
        self._forget()
        self._connect()

    def _arrived(self, seq: int, payload: bytes) -> None:
        if seq > self._last + 1:
            self._ask_again()
        if seq == self._last + 1:  # those before it arrived again
            self._follow(seq, payload)

    def _ask_again(self) -> None:
        """Request the batches after the last one received, as far as the publisher still has them."""
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"ipc://{self._folder}/replay")
            socket.send_multipart([b"", (self._last + 1).to_bytes(8, "big")])
            while True:
                assert socket.poll(PATIENCE_S * 1000), "no batch is sent again"
                _, _, seq_bytes, payload = socket.recv_multipart()
                if seq_bytes == ZmqEventPublisher.END_SEQ:
                    return
                seq = int.from_bytes(seq_bytes, "big")
                if seq > self._last + 1:
                    self._forget()
                self._follow(seq, payload)

    def _forget(self) -> None:
        self.belief.clear()
        self.forgot += 1

    def _follow(self, seq: int, payload: bytes) -> None:
        self._last = seq
        for event in msgspec.msgpack.decode(payload)[1]:
            believed = self.belief[event["medium"], event.get("ownership")]
            if event["type"] == "BlockStored":
                believed |= set(event["block_hashes"])
            else:
                believed -= set(event["block_hashes"])


class Engine(Scheduler):
    """A random scheduler whose engine publishes its events."""

    def __init__(self, it: World, seed: int, feed: Feed) -> None:
        self.feed = feed
        super().__init__(it, seed, "0.33")

    def _follow(self, events: Iterable[OffloadingEvent]) -> None:
        given = list(events)
        super()._follow(given)
        self.feed.publish(given)

    @property
    def heard(self) -> dict[tuple[Medium, str | None], set[OffloadKey]]:
        """Return the belief of a subscriber that missed no message."""
        return {place: set(blocks) for place, blocks in self.belief.items()}  # type: ignore[misc]

    def settle(self) -> None:
        """Let everything in flight end and be published."""
        self.end()
        self.it.settle()
        self._follow(self.it.manager.take_events())


def _there(it: World, tiers: Iterable[AnyTier], belief: Belief) -> Belief:
    """Return the believed blocks that really exist."""
    visible = it.core.table.visible
    there: Belief = defaultdict(set)
    names = {gate.name: tier for gate, tier in zip(it.core.shared.tiers, tiers, strict=True)}
    for (medium, owner), blocks in belief.items():
        keys = [OffloadKey(block) for block in blocks]
        if owner is None:
            found = [key in visible and visible[key].state is ChunkState.READY for key in keys]
        else:
            found = [_has(names[owner], key) for key in keys]
        there[medium, owner] = {key for key, is_there in zip(keys, found, strict=True) if is_there}
    return there


def _has(tier: AnyTier, key: OffloadKey) -> bool:
    """Return whether a tier has a chunk, in memory or as a file of the tier's current epoch."""
    if isinstance(tier, FsTier):
        epoch = data_dir(Identity.make("model", {}).namespace, tier.statistics().epoch or 0)
        return (Path(tier.config.root_dir) / chunk_path(epoch, key)).exists()
    return list(tier.known([key])) == [Knowledge.PRESENT]


def _blocks(belief: Belief) -> dict[Place, set[bytes]]:
    return {place: blocks for place, blocks in belief.items() if blocks}


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[Subscriber]:
    chance = random.Random(7)
    subscriber = Subscriber(tmp_path, lambda: chance.random() < 0.1)
    yield subscriber
    subscriber.close()


@pytest.mark.parametrize("kept", [PLENTY, FEW])
def test_beliefs_are_never_overstated(tmp_path: Path, subscriber: Subscriber, kept: int) -> None:
    believed = 0
    for seed in range(3):  # the same root each time
        small = dummy(
            capacity_bytes=12 * (CHUNK_BYTES + TRAILER_BYTES),
            complete_index=True,
            failure_rate=0.05,
            corruption_rate=0.05,
            seed=seed,
        )
        tiers: list[AnyTier] = [small, files(tmp_path / "root")]
        it, feed = World(*tiers, slots=20), Feed(tmp_path, kept)
        engine = Engine(it, seed, feed)
        for _ in range(4):
            for _ in range(40):
                engine.step(arriving=True)
            _check(engine, tiers, subscriber, kept)
            believed += sum(map(len, subscriber.belief.values()))
        it.manager.shutdown()
        feed.close()
        subscriber.wait_for_loss_of_connection()
        assert _blocks(subscriber.belief) == {}
    assert believed > 0
    assert subscriber.lost > 10
    assert subscriber.forgot > 3 if kept == FEW else subscriber.forgot == 3


def _check(engine: Engine, tiers: Iterable[AnyTier], subscriber: Subscriber, kept: int) -> None:
    """Check that the subscriber assumes no missing block once everything has settled.

    Tiers report evictions after the put that caused them.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        engine.settle()
        subscriber.catch_up(engine.feed)
        there = _there(engine.it, tiers, subscriber.belief)
        if there == subscriber.belief:
            break
        assert time.monotonic() < deadline, (subscriber.belief, there)
        engine.it.step()
    complete = {(medium.value, owner): blocks for (medium, owner), blocks in engine.heard.items() if blocks}
    if kept == PLENTY:
        assert _blocks(subscriber.belief) == complete
    else:
        for place, blocks in subscriber.belief.items():
            assert blocks <= complete.get(place, set())
