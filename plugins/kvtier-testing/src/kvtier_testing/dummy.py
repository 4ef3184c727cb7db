"""A tier in memory that fails on demand: for tests, and as an example to read before writing your own.

It does everything a tier has to do. kvtier adds deadlines, concurrency limits, checksums and metrics. The
comments are for authors of tiers.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from types import MappingProxyType

import anyio
from pydantic import Field

from kvtier.keys import OffloadKey
from kvtier.tiers import (
    Batch,
    Knowledge,
    Outcome,
    SecondaryTier,
    Size,
    Status,
    TierConfig,
    TierContext,
    Usage,
)


# Settings: a subclass of TierConfig, which rejects unknown settings by name. Make a password or token a
# pydantic SecretStr, so that no message shows it.
class DummyConfig(TierConfig):
    """Settings of the dummy tier."""

    type: str = Field(
        default="dummy", description="Type of the tier: the name of its entry point in `kvtier.tiers`."
    )
    capacity_bytes: Size = Field(
        default=256 * 2**20, description="Maximum bytes held; the least recently used chunks are evicted."
    )
    put_latency_s: float = Field(default=0.0, ge=0, description="Added latency of each put, in seconds.")
    get_latency_s: float = Field(
        default=0.0, ge=0, description="Added latency of each get and lookup, in seconds."
    )
    failure_rate: float = Field(
        default=0.0, ge=0, le=1, description="Share of chunks whose put or get fails."
    )
    corruption_rate: float = Field(
        default=0.0, ge=0, le=1, description="Share of chunks returned with a wrong byte."
    )
    hang_rate: float = Field(default=0.0, ge=0, le=1, description="Share of puts and gets that hang.")
    complete_index: bool = Field(
        default=True, description="Whether `known` answers for every key; `false`: lookups need `contains`."
    )
    seed: int = Field(default=0, description="Seed of the random faults; equal seeds give equal faults.")


# An entry point in the group "kvtier.tiers" of the author's distribution names the class.
class DummyTier(SecondaryTier[DummyConfig]):
    """Keeps chunks in a dict."""

    Config = DummyConfig
    medium = "memory"  # The kind of storage. Requests can select tiers by it, and hit metrics contain it.

    # Reasons become metric labels: list those that are not kvtier's own.
    reasons = MappingProxyType({"injected": "a fault that the settings asked for"})

    # The constructor only keeps the settings. Connect in open(); it raises TierError if the tier cannot work.
    def __init__(self, config: DummyConfig) -> None:
        super().__init__(config)
        self._chunks: OrderedDict[OffloadKey, tuple[bytes, bytes]] = OrderedDict()
        self._held_bytes = 0
        self._resets = 0
        self._random = random.Random(config.seed)
        self._report_removed: Callable[[Sequence[OffloadKey]], None] = lambda keys: None  # noqa: ARG005

    async def open(self, context: TierContext) -> None:
        """Keep the callback that reports evictions."""
        self._report_removed = context.removed

    # For metrics, about once a second: it must not ask a backend.
    def usage(self) -> Usage:
        """Return how full the dict is."""
        return Usage(self._held_bytes, int(self.config.capacity_bytes))

    # Called from any thread for every key of a waiting request: it must not block. A tier that would have to
    # ask its backend omits this method; kvtier then calls contains().
    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return which keys are in the dict."""
        if not self.config.complete_index:
            return super().known(keys)
        return [Knowledge.PRESENT if key in self._chunks else Knowledge.ABSENT for key in keys]

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return which keys are in the dict, after the latency of a get."""
        await anyio.sleep(self.config.get_latency_s)
        return [key in self._chunks for key in keys]

    # The slots belong to the tier only until put() or get() ends, however it ends. Here the wait, which can
    # be cancelled, precedes the copy, which cannot. If a thread or client library moves the bytes, shield the
    # transfer and await its end before the cancellation continues.
    async def put(self, batch: Batch) -> Outcome:
        """Copy the chunks and their trailers."""
        resets = self._resets
        await self._pause(self.config.put_latency_s)
        if resets != self._resets:  # A chunk put before a reset must not appear after it.
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        return _outcome([self._put_one(batch, index) for index in range(len(batch))])

    async def get(self, batch: Batch) -> Outcome:
        """Copy chunks into their slots, and return their trailers."""
        await self._pause(self.config.get_latency_s)
        return _outcome([self._get_one(batch, index) for index in range(len(batch))])

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark the keys as recently used."""
        for key in reversed(keys):
            if key in self._chunks:
                self._chunks.move_to_end(key)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Forget the keys."""
        for key in keys:
            self._forget(key)

    async def reset(self) -> None:
        """Forget all chunks, puts in flight included."""
        self._resets += 1
        self._chunks.clear()
        self._held_bytes = 0

    async def aclose(self) -> None:
        """Release the memory."""
        await self.reset()

    async def _pause(self, latency_s: float) -> None:
        if self._random.random() < self.config.hang_rate:
            await anyio.sleep_forever()
        await anyio.sleep(latency_s)

    # Each chunk has its own status: one failure does not fail the others.
    def _put_one(self, batch: Batch, index: int) -> tuple[Status, str]:
        if self._random.random() < self.config.failure_rate:
            return Status.FAILED, "injected"
        key, view, trailer = batch.keys[index], batch.views[index], batch.trailers[index]
        nbytes = view.nbytes + len(trailer)
        if nbytes > self.config.capacity_bytes:
            return Status.REFUSED, "full"
        self._forget(key)
        self._make_room(nbytes)
        self._chunks[key] = bytes(view), trailer
        self._held_bytes += nbytes
        return Status.OK, ""

    # The bytes go straight into the slot, and the trailer from the put into batch.trailers. kvtier compares
    # the two, so a tier need not check its bytes.
    def _get_one(self, batch: Batch, index: int) -> tuple[Status, str]:
        if self._random.random() < self.config.failure_rate:
            return Status.FAILED, "injected"
        chunk = self._chunks.get(batch.keys[index])
        if chunk is None:
            return Status.ABSENT, ""
        self._chunks.move_to_end(batch.keys[index])
        view = batch.views[index]
        view[:], batch.trailers[index] = chunk
        if self._random.random() < self.config.corruption_rate:
            view[self._random.randrange(view.nbytes)] ^= 0xFF
        return Status.OK, ""

    # Every tier is bounded. It reports evicted chunks, so that routers do not expect them.
    def _make_room(self, nbytes: int) -> None:
        evicted = []
        while self._held_bytes + nbytes > self.config.capacity_bytes:
            evicted.append(next(iter(self._chunks)))
            self._forget(evicted[-1])
        if evicted:
            self._report_removed(evicted)

    def _forget(self, key: OffloadKey) -> None:
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._held_bytes -= len(chunk[0]) + len(chunk[1])


def _outcome(results: Sequence[tuple[Status, str]]) -> Outcome:
    return Outcome([status for status, _ in results], Counter(reason for _, reason in results if reason))
