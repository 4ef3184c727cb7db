"""The contract of a tier, second part: calls that run at once, are cancelled, or cross a reset.

As soon as a put or get ends in any way, its slots are given to other chunks. So each of these tests fills
the slots with other bytes at that very moment, and checks two things afterwards: the tier stores a whole
chunk or none, and the slots were not written since.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.tiers import Batch, Status
from kvtier_testing.tiers.rig import BatchSlots, TierRig, calls_of, check_whole, expect, keys, names_of
from kvtier_testing.tiers.setup import FOREVER, TierSetup
from kvtier_testing.tiers.steps import Ended, Way, held, run_cancelled

_MOST_WAITS = 24
_MOST_RESETS = 8
_MOST_CANCELLED = 4
_MOST_PASSES = 8
_TRIES = 3
_CHUNKS = 4
_CHUNK_BYTES = 256 * 1024
_BOTH = (0, 1)

every_way = pytest.mark.parametrize("way", list(Way), ids=lambda way: way.name.lower())


class CancellationTests(TierSetup):
    """Calls that are cancelled at each of their waits, at any moment, and while others run."""

    @every_way
    async def test_transfers_may_be_cancelled_at_each_of_their_waits(self, place: Path, way: Way) -> None:
        async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
            trials = _Trials(it)
            for transfer in (trials.put, trials.get):
                for at_wait in _some((await transfer(None)).waits) * _TRIES:
                    await transfer(way, at_wait=at_wait)
            await self._check(it, trials)
        await self._check_later(place, trials)

    @every_way
    async def test_calls_may_be_cancelled_at_any_moment(self, place: Path, way: Way) -> None:
        rng = random.Random(way.name)
        async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
            trials = _Trials(it)
            put_s, get_s = await _time_of(trials.put), await _time_of(trials.get)
            for _ in range(8):
                await trials.put(way, after_s=rng.uniform(0, 1.2) * put_s)
                await trials.get(way, after_s=rng.uniform(0, 1.2) * get_s)
            await self._check(it, trials)
        await self._check_later(place, trials)

    @every_way
    async def test_transfers_cancelled_while_the_backend_is_slow(self, place: Path, way: Way) -> None:
        self.require("slowed", "the backend cannot be made slow")
        async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
            trials = _Trials(it)
            await trials.get(None)
            for transfer in (trials.put, trials.get):
                for share in (0.1, 0.5, 0.9):
                    with self.slowed(it.tier, self.settle_s):
                        await transfer(way, after_s=share * self.settle_s)
            await self._check(it, trials)
        await self._check_later(place, trials)

    @every_way
    async def test_a_cancelled_call_raises_the_cancellation(self, place: Path, way: Way) -> None:
        async with self.opened(place) as it:
            await it.put(range(4))
            for verb, call in calls_of(it, 8).items():
                whole = await run_cancelled(call, None)
                for at_wait in _some(whole.waits) * _TRIES:
                    _check_cancellation(verb, await run_cancelled(call, way, at_wait=at_wait), way)

    @every_way
    async def test_a_cancelled_lookup_or_removal_leaves_a_usable_tier(self, place: Path, way: Way) -> None:
        async with self.opened(place) as it:
            calls = calls_of(it, 8)
            for verb in ("contains", "touch", "discard", "reset"):
                whole = await run_cancelled(calls[verb], None)
                for at_wait in _some(whole.waits):
                    it.expect_kept(await it.put(range(4)), f"a put before a {verb}")
                    await run_cancelled(calls[verb], way, at_wait=at_wait)
                    await it.get(range(4))  # checks that remaining chunks are whole
                    it.expect_kept(await it.put([1, 5]), f"a put after a {verb} that was cancelled")
                    it.expect_kept(await it.get([1, 5]), f"what was put after a {verb} that was cancelled")
            await it.tier.reset()
            statuses = await it.get(range(6))
            expect(set(statuses) == {Status.ABSENT}, f"a reset after one cancelled: {names_of(statuses)}")

    async def test_a_put_in_flight_at_a_reset_does_not_appear_after_it(self, place: Path) -> None:
        async with self.opened(place) as it:
            waits = (await run_cancelled(lambda: it.put([0]), None)).waits
        moments: list[Callable[[TierRig, Batch], Coroutine[Any, Any, None]]] = [
            *(partial(self._reset_at_wait, at_wait) for at_wait in _some(waits, _MOST_RESETS)),
            *(partial(self._reset_after_passes, passes) for passes in range(1, _MOST_PASSES)),
            *(partial(self._reset_after_cancellation, at_wait) for at_wait in _some(waits, _MOST_CANCELLED)),
        ]
        if self.defines("slowed"):
            moments.append(self._reset_while_slow)
        for first, moment in zip(count(100, _CHUNKS), moments, strict=False):
            numbers = range(first, first + _CHUNKS)
            async with self.opened(place) as it:
                batch, slots = it.filled(numbers)
                await moment(it, batch)
                slots.reuse()
                await _expect_hidden(it, numbers, "the tier that was reset gives them")
            if self.is_persistent:
                async with self.opened(place) as it:
                    await _expect_hidden(it, numbers, "a tier that is opened later gives them")

    async def test_puts_gets_and_discards_of_one_key_at_once_never_show_other_bytes(
        self, place: Path
    ) -> None:
        async with self.opened(place) as it:

            async def get() -> None:
                await it.get([2, 1], versions=_BOTH, may_mix=self.may_mix_versions)

            async with anyio.create_task_group() as tasks:
                for version in _BOTH:
                    tasks.start_soon(_repeat, 15, lambda version=version: it.put([1, 2], version))
                    tasks.start_soon(_repeat, 30, get)
                tasks.start_soon(_repeat, 15, lambda: it.tier.discard(keys([1])))
                tasks.start_soon(_repeat, 15, lambda: it.tier.contains(keys([1, 2])))
            it.expect_kept(await it.get([2], versions=_BOTH), "a chunk that was put and never discarded")

    async def test_many_batches_at_once_all_end(self, place: Path) -> None:
        batches = [range(first, first + 16) for first in range(0, 256, 16)]

        async def put_and_get(it: TierRig, numbers: Sequence[int]) -> None:
            it.expect_kept(await it.put(numbers), "a put beside others")
            it.expect_kept(await it.get(numbers), "a get beside others")

        async with self.opened(place) as it, anyio.create_task_group() as tasks:
            for numbers in batches:
                tasks.start_soon(put_and_get, it, numbers)

    async def test_transfers_that_hang_end_when_the_executor_does_and_leave_their_slots_alone(
        self, place: Path
    ) -> None:
        self.require("slowed", "the backend cannot be made to hang")
        with ExitStack() as hanging:
            async with self.driven(place) as driver:
                await driver.put(range(4))
                hanging.enter_context(self.slowed(driver.rig.tier, FOREVER))
                started = [
                    driver.start_put(range(10, 14), range(8, 12)),
                    driver.start_fetch(range(4), range(12, 16)),
                ]
                await anyio.sleep(2 * self.settle_s)
                ended = driver.ends_of(started)
                expect(not any(ended), f"slowed() has not made transfers hang: they ended {ended} times")
                # The executor waits for calls that still touch slots, so the hang ends during its close.
                asyncio.get_running_loop().call_later(self.settle_s, hanging.close)
        ended = driver.ends_of(started)
        expect(ended == [1, 1], f"transfers that hung ended {ended} times")
        await anyio.sleep(self.settle_s)
        driver.check_reused(range(8, 16), "a transfer that hung")

    async def _reset_at_wait(self, at_wait: int, it: TierRig, batch: Batch) -> None:
        """Put, and let a reset run while the put is held at one of its waits."""
        was_reset = await held(lambda: it.tier.put(batch), at_wait, it.tier.reset, self.settle_s)
        if not was_reset:  # this put had fewer waits
            await it.tier.reset()

    async def _reset_after_passes(self, passes: int, it: TierRig, batch: Batch) -> None:
        """Start puts that contend for shared resources, and reset after a few passes of the loop."""
        async with anyio.create_task_group() as tasks:
            for index in range(len(batch)):
                tasks.start_soon(it.tier.put, batch.part([index]))
            for _ in range(passes):
                await asyncio.sleep(0)
            await it.tier.reset()

    async def _reset_after_cancellation(self, at_wait: int, it: TierRig, batch: Batch) -> None:
        """Cancel a put at one of its waits, and reset: leftovers of the put must not arrive later."""
        await run_cancelled(lambda: it.tier.put(batch), Way.CANCEL, at_wait=at_wait)
        await it.tier.reset()
        await anyio.sleep(self.settle_s)

    async def _reset_while_slow(self, it: TierRig, batch: Batch) -> None:
        """Reset while the backend is slow with a put."""
        with self.slowed(it.tier, self.settle_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(it.tier.put, batch)
                await anyio.sleep(self.settle_s / 2)
                await it.tier.reset()

    async def _check(self, it: TierRig, trials: _Trials) -> None:
        """Check that each chunk is stored whole or not at all, and that slots are left alone."""
        await anyio.sleep(self.settle_s)
        for numbers in trials.stored:
            await check_whole(it, numbers, versions=_BOTH)
        trials.check_reused()

    async def _check_later(self, place: Path, trials: _Trials) -> None:
        """Check the same after closing the tier and, if its chunks outlive it, reopening it."""
        trials.check_reused()
        if self.is_persistent:
            async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
                for numbers in trials.stored:
                    await check_whole(it, numbers, versions=_BOTH)


class _Trials:
    """Cancelled puts and gets, each with separate chunks and slots.

    Attributes:
        stored: the chunks of each put. Version 0 of the first two was stored before it.
    """

    def __init__(self, rig: TierRig) -> None:
        self._rig = rig
        self._fresh = 100
        self._got: list[BatchSlots] = []
        self.stored: list[Sequence[int]] = []

    async def put(
        self, way: Way | None, *, at_wait: int | None = None, after_s: float | None = None
    ) -> Ended:
        numbers = range(self._fresh, self._fresh + _CHUNKS)
        self._fresh += _CHUNKS
        await self._rig.put(numbers[:2])
        batch, slots = self._rig.filled(numbers, version=1)
        self.stored.append(numbers)
        return await run_cancelled(
            lambda: self._rig.tier.put(batch), way, at_wait=at_wait, after_s=after_s, then=slots.reuse
        )

    async def get(
        self, way: Way | None, *, at_wait: int | None = None, after_s: float | None = None
    ) -> Ended:
        if not self._got:
            await self._rig.put(range(_CHUNKS))
        batch, slots = self._rig.empty(range(_CHUNKS))
        self._got.append(slots)
        return await run_cancelled(
            lambda: self._rig.tier.get(batch), way, at_wait=at_wait, after_s=after_s, then=slots.reuse
        )

    def check_reused(self) -> None:
        """Check that nothing was written into slots after their get had ended."""
        for slots in self._got:
            slots.check_reused("a get that was cancelled")


async def _expect_hidden(it: TierRig, numbers: Sequence[int], what: str) -> None:
    statuses, found = await it.get(numbers), await it.contains(numbers)
    expect(
        set(statuses) == {Status.ABSENT} and not any(found),
        f"chunks of a put() that was in flight at a reset() appear after it: {what} (get(): "
        f"{names_of(statuses)}; contains(): {found}). A reset hides for ever what a put began before it",
    )


def _check_cancellation(verb: str, ended: Ended, way: Way) -> None:
    if not ended.was_cancelled or ended.raised_cancellation:
        return
    expect(
        ended.error is None,
        f"a {verb} that was cancelled ({way.value}) has raised {ended.error!r} in place of the cancellation",
    )
    # A scope is level-triggered: the owner's next await is cancelled, too.
    expect(way is Way.SCOPE, f"a {verb} that was cancelled ({way.value}) has swallowed the cancellation")


async def _time_of(trial: Callable[[None], Coroutine[Any, Any, object]]) -> float:
    started = time.perf_counter()
    await trial(None)
    return time.perf_counter() - started


async def _repeat(times: int, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
    for _ in range(times):
        await call()


def _some(waits: int, most: int = _MOST_WAITS) -> list[int]:
    """Return waits from 1 on; if there are many, an even selection with the first and the last."""
    if waits <= most:
        return list(range(1, waits + 1))
    return sorted({1 + round(index * (waits - 1) / (most - 1)) for index in range(most)})
