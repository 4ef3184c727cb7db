"""Fault injection for any tier, and checks of the calls that the tier receives.

Any tier whose transport runs only on the event loop can be wrapped, including one of a plug-in's author.
The injected faults stay within the contract: each call ends as a tier's call may end, and slots are not
touched after it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio

from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import (
    Batch,
    Knowledge,
    Outcome,
    SecondaryTier,
    Status,
    TierConfig,
    TierContext,
    Usage,
    until_done,
)
from kvtier.tiers._seal import check
from kvtier_testing.sim.backend import Backend, FaultProfile, corrupt
from kvtier_testing.sim.model import SimMemory, show

_CUT_OFF = ("contains", "discard", "get", "put", "touch")
_MOMENT_S = 1e-6


class FaultyTier(SecondaryTier[TierConfig]):
    """A wrapper that injects the backend's current faults and checks the calls to the tier.

    Args:
        inner: wrapped tier, which must need neither threads nor sockets.
        backend: source of the faults; an author's own tier does not use it otherwise.
        drains: whether a cancelled call still runs to its end.

    Attributes:
        running: calls in flight, by verb.
        gets: number of gets started.
    """

    Config = TierConfig

    def __init__(
        self, inner: SecondaryTier[Any], backend: Backend, memory: SimMemory, *, drains: bool
    ) -> None:
        super().__init__(inner.config)
        for name in ("verifies", "medium", "reasons", "transient"):
            vars(self)[name] = getattr(inner, name)
        self.inner = inner
        self.running: Counter[str] = Counter()
        self.gets = 0
        self._drains = drains
        self._backend = backend
        self._world = backend.world
        self._memory = memory
        self._oldest_weights, self._had = self._world.weights, self._world.had
        self._is_opened = False
        self._is_reset_failed = False
        self._resets = 0
        self._damaged: set[OffloadKey] = set()  # damaged in the backend when they were read
        self._wrong: dict[OffloadKey, tuple[bytes, bytes]] = {}  # the last damage in transit

    @property
    def _faults(self) -> FaultProfile:
        return self._backend.faults

    async def open(self, context: TierContext) -> None:
        """Open the tier, or fail if the backend is closed."""
        await self._do("open", lambda: self._open(context))
        self._is_opened = True

    async def _open(self, context: TierContext) -> None:
        if self._faults.closed:
            raise TierError("the backend is unreachable")
        self._digest = context.identity.short_digest
        await self.inner.open(context)

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return the tier's knowledge, which is often stale and sometimes fails."""
        self._require_usable("known")
        chance, faults = self._backend.chance, self._faults
        if chance.random() < faults.error:
            raise OSError("the index cannot be read")
        known = list(self.inner.known(keys))
        if chance.random() < faults.chunks:
            index = chance.randrange(len(known))
            known[index] = chance.choice(list(Knowledge))
            self._backend.unreported.add(keys[index])
        return known

    def usage(self) -> Usage | None:
        """Return how full the tier is."""
        if self._backend.chance.random() < self._faults.error / 10:
            raise OSError("usage is unknown")
        usage = self.inner.usage()
        if usage is not None and usage.used_bytes is not None and usage.capacity_bytes is not None:
            self._world.require(
                usage.used_bytes <= usage.capacity_bytes, f"{self._backend.name} is beyond its bound: {usage}"
            )
        return usage

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Ask the tier; the answer may be stale."""
        return await self.contains_at(keys, ())

    async def contains_at(self, keys: Sequence[OffloadKey], addresses: Sequence[str]) -> Sequence[bool]:
        """Ask the tier at these addresses; the answer may be stale."""
        self._require_usable("contains")
        there = list(await self._do("contains", lambda: self.inner.contains_at(keys, addresses)))
        chance = self._backend.chance
        if chance.random() < self._faults.chunks:
            index = chance.randrange(len(there))
            there[index] = chance.random() < 0.5
            self._backend.unreported.add(keys[index])
        return there

    async def put(self, batch: Batch) -> Outcome:
        """Put; the slots must hold the bytes of their keys throughout."""
        self._require_usable("put")
        self._require_whole(batch, self._oldest_weights)
        async with self._at_work("put", batch, self.config.max_concurrency // 2, writes=False):
            oldest = self._oldest_weights
            try:
                outcome = await self._do("put", partial(self._put, batch, self._resets))
            finally:
                self._require_whole(batch, min(oldest, self._oldest_weights))
        outcome = self._with_failures(outcome)
        self._world.seen["chunks put"] += outcome.statuses.count(Status.OK)
        return outcome

    async def _put(self, batch: Batch, resets: int) -> Outcome:
        if resets != self._resets:  # puts started before a reset must not appear after it
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        outcome: Outcome = await self.inner.put(batch)
        return outcome

    async def get(self, batch: Batch) -> Outcome:
        """Get into slots with arbitrary contents."""
        self.gets += 1
        self._require_usable("get")
        async with self._at_work("get", batch, self.config.max_concurrency, writes=True):
            self._memory.scribble(batch.slots)
            outcome = self._with_failures(await self._do("get", lambda: self.inner.get(batch)))
            self._note_damaged(batch, outcome)
            self._corrupt(batch, outcome)
        self._world.seen["chunks got"] += outcome.statuses.count(Status.OK)
        return outcome

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Touch chunks."""
        self._require_usable("touch")
        await self._do("touch", lambda: self.inner.touch(keys))

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Discard chunks, which must be damaged in the backend, not only in transit."""
        self._require_usable("discard")
        sound = [show(key) for key in keys if key not in self._damaged]
        self._world.require(not sound, f"{self._backend.name} is to discard {sound}, which it has sound")
        await self._do("discard", lambda: self.inner.discard(keys))

    async def reset(self) -> None:
        """Reset. Later puts must be of the current weights."""
        self._oldest_weights = self._world.weights
        self._resets += 1
        self._is_reset_failed = True
        await self._do("reset", self.inner.reset)
        self._is_reset_failed = False

    async def aclose(self) -> None:
        """Close; no other call may be in flight."""
        busy = dict(+self.running)
        self._world.require(not busy, f"{self._backend.name} is closed while {busy} are under way")
        self._is_opened = False
        await self._do("aclose", self.inner.aclose)

    # --- faults ----------------------------------------------------------------------------------

    async def _do(self, verb: str, call: Callable[[], Any]) -> Any:
        self._note(verb, "begins")
        self.running[verb] += 1
        began_s = self._world.now_s
        try:
            work = self._with_faults(verb, call)
            result = await (until_done(work) if self._drains else work)
        except BaseException as error:
            self._note(verb, f"raises {error!r}")
            raise
        finally:
            self.running[verb] -= 1
            self._require_in_time(verb, began_s)
        self._note(verb, f"ends: {result}")
        return result

    async def _with_faults(self, verb: str, call: Callable[[], Any]) -> Any:
        faults, chance, seen = self._faults, self._backend.chance, self._world.seen
        hangs = chance.random() < self._share(faults.hang, verb)
        hangs_first = chance.random() < 0.5
        await anyio.sleep(self._latency_s(verb))
        if hangs and hangs_first:
            await self._hang(verb)
        if chance.random() < self._share(faults.error, verb):
            seen[f"{verb} failed"] += 1
            raise self._error()
        result = await call()
        if hangs and not hangs_first:
            await self._hang(verb)
        if chance.random() < self._share(faults.lost, verb):
            seen["answer lost"] += 1
            raise self._error()
        if chance.random() < self._share(faults.cancelled, verb):
            seen["cancelled by nobody"] += 1
            raise asyncio.CancelledError
        return result

    def _share(self, fault: float, verb: str) -> float:
        """Return the fraction of a verb's calls that a fault hits now."""
        only = self._faults.only
        return fault if only is None or verb in only else 0.0

    def _latency_s(self, verb: str) -> float:
        faults, chance = self._faults, self._backend.chance
        seconds = faults.latency_s * chance.choice((0.0, 0.5, 1.0, 3.0))
        if chance.random() < self._share(faults.late, verb):
            self._world.seen[f"{verb} late"] += 1
            seconds = faults.latency_s * 100
        return seconds

    async def _hang(self, verb: str) -> None:
        self._world.seen[f"{verb} hung"] += 1
        await self._backend.resumed.wait()

    def _error(self) -> BaseException:
        passing: list[type[BaseException]] = [ConnectionError, TimeoutError]  # kvtier retries these
        kinds: list[type[BaseException]] = [*passing, *passing, *passing, OSError, TierError, ValueError]
        if not self._drains:  # in a separate task it would end the loop
            kinds.append(SystemExit)
        return self._backend.chance.choice(kinds)("injected")

    def _with_failures(self, outcome: Outcome) -> Outcome:
        """Report failures of single chunks that succeeded."""
        chance, share = self._backend.chance, self._faults.chunks
        if not share:
            return outcome
        statuses = [
            Status.FAILED if status is Status.OK and chance.random() < share else status
            for status in outcome.statuses
        ]
        return Outcome(statuses, {**outcome.reasons, "error": statuses.count(Status.FAILED)})

    def _note_damaged(self, batch: Batch, outcome: Outcome) -> None:
        """Note the chunks that are damaged in the backend itself."""
        chunks = zip(batch.keys, batch.views, batch.trailers, outcome.statuses, strict=True)
        for key, view, trailer, status in chunks:
            if status is Status.OK and check(trailer, key, view, self._digest).is_corrupt:
                self._damaged.add(key)

    def _corrupt(self, batch: Batch, outcome: Outcome) -> None:
        """Damage chunks in transit, unless the tier verifies them.

        No two reads of a chunk get the same damage: they would prove that the backend's copy is damaged.
        """
        chance, share = self._backend.chance, self._faults.damage
        if self.verifies or not share:
            return
        for index, status in enumerate(outcome.statuses):
            if status is Status.OK and chance.random() < share:
                key, view = batch.keys[index], batch.views[index]
                while (wrong := corrupt(chance, bytes(view), batch.trailers[index])) == self._wrong.get(key):
                    pass
                view[:], batch.trailers[index] = self._wrong[key] = wrong
                self._world.seen["chunks damaged"] += 1

    # --- checks of the calls ---------------------------------------------------------------------

    def _note(self, verb: str, what: str) -> None:
        if self._world.traces:
            self._world.note(f"{self._backend.name}: {verb} {what}")

    def _require_in_time(self, verb: str, began_s: float) -> None:
        """Fail if a command's call outlives its deadline. Opens, resets and closes have none."""
        took_s = self._world.now_s - began_s
        if verb in _CUT_OFF and not self._drains and took_s > self.config.deadline_s + _MOMENT_S:
            self._world.fail(
                f"{self._backend.name}: a {verb} has gone on for {took_s:.4f} s, beyond its deadline"
            )

    def _require_usable(self, verb: str) -> None:
        require, name = self._world.require, self._backend.name
        require(self._is_opened, f"{name}: {verb} before it is open, or after it was closed")
        if verb in ("put", "known"):  # the first calls of a command; later ones may overlap a reset
            require(not self.running["reset"], f"{name}: {verb} while a reset is under way")
            require(not self._is_reset_failed, f"{name}: {verb} after a reset that has failed")

    @asynccontextmanager
    async def _at_work(self, verb: str, batch: Batch, most: int, *, writes: bool) -> AsyncIterator[None]:
        """Check the number of concurrent calls, and register the use of the slots."""
        name = self._backend.name
        self._world.require(
            self.running[verb] < max(1, most), f"{name}: more than {most} calls of {verb} at once"
        )
        with self._memory.using(batch.slots, f"a {verb} of {name}", writes=writes):
            yield

    def _require_whole(self, batch: Batch, oldest: int) -> None:
        """Fail unless put bytes match their keys, for weights that the tier may hold."""
        for key, slot in zip(batch.keys, batch.slots, strict=True):
            view = self._memory.view(slot)
            if not self._world.is_of(key, view, oldest, self._had):
                held = self._world.name_of(bytes(view), batch.keys)
                self._world.fail(
                    f"{self._backend.name} is to put {show(key)} of weights {oldest} or newer, "
                    f"but slot {slot} has {held}"
                )
