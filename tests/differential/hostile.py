"""A tier and an eviction policy that break their contracts; the test draws how."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar

from kvtier.keys import MAX_KEY_BYTES, OffloadKey
from kvtier.policies import LRU, Run
from kvtier.tiers import Batch, Outcome, Status, TierContext, Usage, until_done
from kvtier_testing.dummy import DummyConfig, DummyTier

T = TypeVar("T")

TIER_FAULTS = (
    *("raises", "stalls", "tells", "lies", "miscounts", "reorders", "writes", "swaps", "claims", "garbles"),
    *("foreign", "statuses"),
)
POLICY_FAULTS = (
    *("clings", "foreign", "twice", "too many", "nothing", "no list", "no keys", "unpins", "raises"),
    *("mutates", "counts"),
)

_RECENT = 200
_put: deque[tuple[bytes, OffloadKey, bytes, bytes]] = deque(maxlen=_RECENT)
"""Identity, key, bytes and trailer of the chunks that tiers received last."""


class Panic(BaseException):
    """An exception as extensions in Rust raise it. Its text is unavailable."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileConfig(DummyConfig):
    """Settings of the hostile tier: its faults, and the rate of each."""

    type: str = "hostile"
    faults: tuple[str, ...] = ()
    rate: float = 0.2


class HostileTier(DummyTier):
    """Keeps the two rules that kvtier cannot check: no write to a slot after a get, and a reset hides every
    chunk."""

    Config = HostileConfig
    config: HostileConfig
    context: TierContext

    def _does(self, fault: str) -> bool:
        return fault in self.config.faults and self._random.random() < self.config.rate

    def _act(self, work: Callable[[], T], *given: Any) -> T:
        """Return the result of a call, unless a fault comes first."""
        choose = self._random.choice
        if self._does("stalls"):
            time.sleep(0.003)
        if self._does("tells"):
            junk: list[Any] = [[b"x"], [7], [bytes(MAX_KEY_BYTES + 1)], b"key", [key for _, key, *_ in _put]]
            self.context.removed(choose(junk))
            if choose((False,) * 9 + (True,)):
                why: Any = choose((Panic(), 7, "unplugged"))
                self.context.lost(why)
        for argument in given if self._does("reorders") else ():
            with suppress(AttributeError):  # a tuple
                argument.reverse()
        if self._does("raises"):
            errors = OSError, TimeoutError, ConnectionResetError, asyncio.CancelledError, SystemExit, Panic
            raise choose(errors)
        return work()

    async def _wait(self, work: Callable[[], Awaitable[T]], *given: Any) -> T:
        """Return the result of a call, which may continue after its cancellation."""
        awaited = self._act(work, *given)
        return await until_done(awaited) if self._does("stalls") else await awaited

    def _answers(self, answers: Sequence[Any]) -> Sequence[Any]:
        if self._does("lies"):
            return [self._random.choice((False, True, 2, "yes")) for _ in answers]
        if self._does("miscounts"):
            odd: list[Any] = [answers[:-1], [*answers, answers[0]], [], 7, None]
            return self._random.choice(odd)
        return answers

    def _outcome(self, outcome: Outcome) -> Outcome:
        count, choose = len(outcome.statuses), self._random.choice
        if self._does("claims"):
            outcome = Outcome.all(Status.OK, count)
        if self._does("statuses"):
            odd: list[Any] = [(False,) * count, (Status.OK,) * (count + 1), (), ["OK"] * count, None,
                              (Status.ABSENT,) * count, (Status.REFUSED,) * count]  # fmt: skip
            outcome = Outcome(choose(odd), outcome.reasons)
        if self._does("statuses"):
            strange: list[Any] = [None, {"x" * 99: 1}, {"error": 2**70}, {"error": -1}, {7: "many"}]
            outcome = Outcome(outcome.statuses, choose(strange))
        return outcome

    async def open(self, context: TierContext) -> None:
        self.context = context
        await self._wait(partial(super().open, context))

    def usage(self) -> Usage:
        if self._does("tells"):
            odd: list[Any] = [Usage(2**70, -1), Usage(None, 2**70), Usage("much", None), 7]  # type: ignore[arg-type]
            return self._random.choice(odd)
        return super().usage()

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Any]:
        return self._answers(self._act(partial(super().known, keys), keys))

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[Any]:
        return self._answers(await self._wait(partial(super().contains, keys), keys))

    async def put(self, batch: Batch) -> Outcome:
        if self._does("writes"):
            with suppress(TypeError):  # they are read-only
                batch.views[0][0] ^= 1
        outcome = await self._wait(partial(super().put, batch), batch.keys, batch.slots)
        first, last = batch.keys[0], batch.keys[-1]
        for key in batch.keys:
            if (chunk := self._chunks.get(key)) is not None:
                _put.append((self.context.identity.short_digest, key, *chunk))
                if self._does("claims"):
                    await self.discard([key])
                elif self._does("writes"):  # read when the slot may already hold another chunk
                    self._chunks[key] = batch.views[batch.keys.index(key)], chunk[1]  # type: ignore[assignment]
        if self._does("swaps") and {first, last} <= self._chunks.keys():
            self._chunks[first], self._chunks[last] = self._chunks[last], self._chunks[first]
        return self._outcome(outcome)

    async def get(self, batch: Batch) -> Outcome:
        if self._does("reorders"):
            with suppress(AttributeError):  # it rejects assignment
                batch.slots = batch.slots[::-1]
        if self._does("garbles"):
            for view in batch.views:
                view[:] = bytes(len(view))
            raise OSError("half a chunk")
        outcome = await self._wait(partial(super().get, batch), batch.keys, batch.slots)
        for index, key in enumerate(batch.keys):
            if _put and self._does("foreign"):
                digest, other, payload, trailer = self._random.choice(_put)
                view = batch.views[index]
                if (digest, other) != (self.context.identity.short_digest, key) and len(view) == len(payload):
                    view[:], batch.trailers[index] = payload, trailer
        if self._does("foreign"):
            self._random.choice((batch.trailers.clear, batch.trailers.reverse))()
        return self._outcome(outcome)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        await self._wait(partial(super().touch, keys), keys)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        await self._wait(partial(super().discard, keys), keys)

    async def reset(self) -> None:
        await self._wait(super().reset)


class UnsendableTier(DummyTier):
    """Has a reason that cannot be serialized, so kvtier refuses it."""

    reasons = MappingProxyType({"x" * 65: "too long"})


class HostilePolicy(LRU):
    """LRU with one fault that begins at some call. ``chance`` draws both."""

    chance = Random()

    def __init__(self) -> None:
        super().__init__()
        self._fault, self._calls_left = self.chance.choice(POLICY_FAULTS), self.chance.randrange(60)

    def _does(self, fault: str) -> bool:
        self._calls_left -= 1
        return self._fault == fault and self._calls_left < 0

    def _act(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        if self._does("raises"):
            raise RuntimeError
        if not self._does("mutates") or not isinstance(keys, list):
            return keys
        mine = [*keys]
        keys.clear()
        return mine

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:
        super().add_run(run, self._act(keys), used=used)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        if not self._does("unpins"):
            super().pin(self._act(keys))

    def clear(self) -> None:
        self._act(())
        super().clear()

    def evict(self, count: int) -> Any:
        self._act(())
        chosen = super().evict(count)
        odd: Mapping[str, Any] = {
            "foreign": [OffloadKey(b"nowhere")] * count,
            "twice": chosen[:1] * count,
            "too many": [*chosen, *super().evict(3)] if self._fault == "too many" else chosen,
            "nothing": [],
            "no list": None,
            "no keys": [[]] * count,
        }
        if self._does("clings"):
            self.add(chosen, used=False)
        return odd[self._fault] if self._fault in odd and self._does(self._fault) else chosen

    def __len__(self) -> int:
        return super().__len__() + 5 * (self._fault == "counts")


_PLUGINS = f"""
[kvtier.tiers]
hostile = {__name__}:HostileTier
unsendable = {__name__}:UnsendableTier

[kvtier.policies]
hostile = {__name__}:HostilePolicy
"""


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Install both plug-ins from a distribution in a folder, so that the tier process finds them too."""
    metadata = folder / "hostile-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(_PLUGINS)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
