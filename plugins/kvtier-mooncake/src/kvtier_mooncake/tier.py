"""The Mooncake tier: chunks in memory that several hosts pool, moved directly to and from the slots."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Final, TypeVar

import anyio

from kvtier.errors import StateError
from kvtier.keys import OffloadKey
from kvtier.tiers import (
    Batch,
    GuardedLogger,
    LogLimit,
    Outcome,
    SecondaryTier,
    Status,
    TierConfig,
    TierContext,
    in_thread,
    require_answers,
    until_done,
)
from kvtier_mooncake._store import REASONS, TRANSIENT, Store, Trailers, result_of
from kvtier_mooncake.config import MooncakeConfig

_LOOKUP_THREADS: Final = 4
_LOG_INTERVAL_S: Final = 60.0
T = TypeVar("T")

_log = GuardedLogger("kvtier.tiers.mooncake")


class MooncakeTier(SecondaryTier[MooncakeConfig]):
    """Stores chunks in Mooncake Store, which engines on many hosts may share.

    The pool evicts the least recently used chunks without a notification. A call of the client cannot be
    interrupted: cancelling a put or a get waits for its end, and a master that does not answer holds the
    slots until it does.
    """

    Config: ClassVar[type[TierConfig]] = MooncakeConfig
    reasons: ClassVar[Mapping[str, str]] = REASONS
    transient: ClassVar[Collection[str]] = TRANSIENT

    def __init__(self, config: MooncakeConfig) -> None:
        super().__init__(config)
        transfers = config.max_concurrency + (config.max_concurrency + 1) // 2
        self._transfers = anyio.CapacityLimiter(transfers)
        self._lookups = anyio.CapacityLimiter(_LOOKUP_THREADS)
        self._trailers: asyncio.Queue[Trailers] = asyncio.Queue()
        for _ in range(transfers):
            self._trailers.put_nowait(Trailers())
        self._store: Store | None = None
        self._epoch: str | None = None
        self._reset_lock = anyio.Lock()
        self._log_limit = LogLimit(_LOG_INTERVAL_S)

    async def open(self, context: TierContext) -> None:
        """Connect to the master, and join the cache's epoch. See ``SecondaryTier.open``."""
        self._name = context.name
        try:
            await self._call(self._connect, context)
        except BaseException:
            await self.aclose()
            raise

    def _connect(self, context: TierContext) -> None:
        self._store = store = Store(self.config, context)
        for _ in range(self._trailers.qsize()):
            trailers = self._trailers.get_nowait()
            store.register(trailers)
            self._trailers.put_nowait(trailers)
        self._epoch = store.join()

    async def aclose(self) -> None:
        """Disconnect, which also withdraws this engine's contribution to the pool."""
        store, self._store, self._epoch = self._store, None, None
        if store is not None:
            with anyio.CancelScope(shield=True):
                await self._call(store.close)

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return which keys the pool has. See ``SecondaryTier.contains``.

        Raises:
            TierError: the pool could not answer for most of the keys.
        """
        names = self._names(keys)
        if not names:
            return [False] * len(keys)
        codes = await self._call(self._opened.contains, names)
        failed = [code for code in codes if result_of(code, 1)[0] is Status.FAILED]
        self._warn_of(failed)
        require_answers(Counter(result_of(code)[1] for code in failed), len(codes))
        return [code == 1 for code in codes]

    async def put(self, batch: Batch) -> Outcome:
        """Store the chunks that the pool lacks. See ``SecondaryTier.put``."""
        names = self._names(batch.keys)
        if not names and len(batch):
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        return await self._transfer(self._opened.put, names, batch)

    async def get(self, batch: Batch) -> Outcome:
        """Fetch chunks into their slots. See ``SecondaryTier.get``."""
        names = self._names(batch.keys)
        if not names:
            return Outcome.all(Status.ABSENT, len(batch))
        return await self._transfer(self._opened.get, names, batch)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Renew the keys' leases, which determine eviction. See ``SecondaryTier.touch``."""
        await self.contains(keys)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the keys. See ``SecondaryTier.discard``."""
        if names := self._names(keys):
            codes = await self._call(self._opened.remove, names)
            self._warn_of(code for code in codes if result_of(code)[0] is Status.FAILED)

    async def reset(self) -> None:
        """Start a private epoch. See ``SecondaryTier.reset``.

        Raises:
            TierError: the new epoch could not be stored, so tiers that open later would find chunks put
                before. This tier finds and accepts no chunks until a reset succeeds.
        """
        async with self._reset_lock:
            self._epoch = None
            await until_done(self._advance())

    async def _advance(self) -> None:
        self._epoch = await self._call(self._opened.advance)

    @property
    def _opened(self) -> Store:
        if self._store is None:
            raise StateError("the Mooncake tier is not open")
        return self._store

    def _names(self, keys: Sequence[OffloadKey]) -> list[str]:
        """Return the names of chunks in the pool; none during a reset."""
        return self._opened.keys(self._epoch, keys) if self._epoch is not None else []

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        return await in_thread(function, *arguments, limiter=self._lookups)

    async def _transfer(
        self,
        function: Callable[[Sequence[str], Batch, Trailers], list[tuple[Status, str]]],
        names: Sequence[str],
        batch: Batch,
    ) -> Outcome:
        trailers = await self._trailers.get()
        try:
            results = await in_thread(function, names, batch, trailers, limiter=self._transfers)
        finally:
            self._trailers.put_nowait(trailers)
        reasons = Counter(reason for _, reason in results if reason)
        for reason, count in reasons.items():
            self._warn(reason, f"{count} of {len(results)} chunks")
        return Outcome([status for status, _ in results], reasons)

    def _warn_of(self, codes: Iterable[int]) -> None:
        for code in codes:
            self._warn(result_of(code)[1], f"code {code}")

    def _warn(self, reason: str, text: str) -> None:
        repeats = self._log_limit.allow(reason, time.monotonic())
        if repeats is not None:
            _log.warning("tier %s: %s: %s%s", self._name, reason, text, repeats)
