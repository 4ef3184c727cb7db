"""The contract of a tier, second part: calls that run at once, are cut short, or cross a reset.

The slots of a put or a get are given to other chunks the moment it has ended, however it ended. So
each of these tests lets others move in at that very moment, and looks afterwards at two things: what is
stored is a whole chunk or none, and what moved in is untouched.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.tiers.base import Outcome, Status
from kvtier_testing.tiers.interrupts import Ended, Way, interrupted, paused
from kvtier_testing.tiers.rig import Slots, TierRig, check_whole, expect, keys, names_of
from kvtier_testing.tiers.setup import FOREVER, TierSetup, context_of

_MOST_WAITS = 24
_TRIES = 3
_CHUNKS = 4
_CHUNK_BYTES = 256 * 1024
_BOTH = (0, 1)

every_way = pytest.mark.parametrize("way", list(Way), ids=lambda way: way.name.lower())


class IsInterrupted(TierSetup):
    """Calls that are cut short at each of their waits, at any moment, and while others run."""

    @every_way
    async def test_a_put_that_is_cut_short_leaves_whole_chunks_or_none(self, place: Path, way: Way) -> None:
        async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
            trials = _Trials(it)
            for at_wait in await trials.waits_of_a_put() * _TRIES:
                await trials.put(way, at_wait=at_wait)
            await self._check_stored(it, trials)
        await self._check_stored_later(place, trials)

    @every_way
    async def test_a_get_that_is_cut_short_never_writes_into_the_slots_next_content(
        self, place: Path, way: Way
    ) -> None:
        async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
            trials = _Trials(it)
            for at_wait in await trials.waits_of_a_get() * _TRIES:
                await trials.get(way, at_wait=at_wait)
            await anyio.sleep(self.settle_s)
            trials.check_next_owners()
        trials.check_next_owners()

    @every_way
    async def test_calls_may_be_cut_short_at_any_moment(self, place: Path, way: Way) -> None:
        dice = random.Random(way.name)
        async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
            trials = _Trials(it)
            put_s, get_s = await _time_of(trials.put), await _time_of(trials.get)
            for _ in range(8):
                await trials.put(way, after_s=dice.uniform(0, 1.2) * put_s)
                await trials.get(way, after_s=dice.uniform(0, 1.2) * get_s)
            await self._check_stored(it, trials)
            trials.check_next_owners()
        trials.check_next_owners()
        await self._check_stored_later(place, trials)

    @every_way
    async def test_a_put_that_is_cut_short_while_the_backend_is_slow(self, place: Path, way: Way) -> None:
        self.require("slowed", "the backend cannot be made slow")
        async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
            trials = _Trials(it)
            for share in (0.1, 0.5, 0.9):
                with self.slowed(it.tier, self.settle_s):
                    await trials.put(way, after_s=share * self.settle_s)
            await self._check_stored(it, trials)
        await self._check_stored_later(place, trials)

    @every_way
    async def test_a_get_that_is_cut_short_while_the_backend_is_slow(self, place: Path, way: Way) -> None:
        self.require("slowed", "the backend cannot be made slow")
        async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
            trials = _Trials(it)
            await trials.waits_of_a_get()
            for share in (0.1, 0.5, 0.9):
                with self.slowed(it.tier, self.settle_s):
                    await trials.get(way, after_s=share * self.settle_s)
            await anyio.sleep(self.settle_s)
            trials.check_next_owners()
        trials.check_next_owners()

    @every_way
    async def test_who_cancels_a_call_learns_of_it(self, place: Path, way: Way) -> None:
        async with self.opened(place) as it:
            await it.put(range(4))
            for verb, call in _calls(it).items():
                whole = await interrupted(call, None)
                for at_wait in _some(whole.waits) * _TRIES:
                    _check_heard(verb, await interrupted(call, way, at_wait=at_wait), way)

    @every_way
    async def test_a_question_that_is_cut_short_harms_nothing(self, place: Path, way: Way) -> None:
        async with self.opened(place) as it:
            calls = _calls(it)
            for verb in ("contains", "touch", "discard", "reset"):
                whole = await interrupted(calls[verb], None)
                for at_wait in _some(whole.waits):
                    it.expect_kept(await it.put(range(4)), f"a put before a {verb}")
                    await interrupted(calls[verb], way, at_wait=at_wait)
                    await it.get(range(4))  # whatever is there yet is whole
                    it.expect_kept(await it.put([1, 5]), f"a put after a {verb} that was cut short")
                    it.expect_kept(await it.get([1, 5]), f"what was put after a {verb} that was cut short")
            await it.tier.reset()
            statuses = await it.get(range(6))
            expect(set(statuses) == {Status.ABSENT}, f"a reset after one cut short: {names_of(statuses)}")

    @every_way
    async def test_an_opening_that_is_cut_short_can_be_repeated(self, place: Path, way: Way) -> None:
        async with self.opened(place) as it:
            await it.put([1])

        async def open_and_close() -> None:
            rig = self.rig(self.make_tier(place), place)
            await rig.tier.open(context_of(rig))
            with anyio.CancelScope(shield=True):
                await rig.tier.aclose()

        whole = await interrupted(open_and_close, None)
        for at_wait in _some(whole.waits):
            await interrupted(open_and_close, way, at_wait=at_wait)
        async with self.opened(place) as it:
            if self.is_persistent:
                it.expect_kept(await it.get([1]), "a chunk after openings that were cut short")
            it.expect_kept(await it.put([2]), "a put after openings that were cut short")
            it.expect_kept(await it.get([2]), "what was put after openings that were cut short")

    async def test_a_put_under_way_at_a_reset_does_not_appear_after_it(self, place: Path) -> None:
        async with self.opened(place) as it:
            waits = (await interrupted(lambda: it.put([0]), None)).waits
            for number, at_wait in enumerate(_some(waits), start=1):
                status, was_reset = await self._put_across_a_reset(it, number, at_wait)
                expect(
                    status is Status.ABSENT or not was_reset,  # this put may have waited less often
                    f"a put that was at its wait {at_wait} of {waits} at a reset has appeared after it",
                )

    async def test_puts_gets_and_discards_of_one_key_at_once_never_show_other_bytes(
        self, place: Path
    ) -> None:
        async with self.opened(place) as it:
            async with anyio.create_task_group() as tasks:
                for version in _BOTH:
                    tasks.start_soon(_repeat, 15, lambda version=version: it.put([1, 2], version))
                    tasks.start_soon(_repeat, 30, lambda: it.get([2, 1], versions=_BOTH))
                tasks.start_soon(_repeat, 15, lambda: it.tier.discard(keys([1])))
                tasks.start_soon(_repeat, 15, lambda: it.tier.contains(keys([1, 2])))
            it.expect_kept(await it.get([2], versions=_BOTH), "a chunk that was put and never discarded")

    async def test_many_batches_at_once_all_end(self, place: Path) -> None:
        batches = [range(first, first + 16) for first in range(0, 256, 16)]

        async def put_and_get(it: TierRig, numbers: Sequence[int]) -> None:
            it.expect_kept(await it.put(numbers), "a put beside others")
            it.expect_kept(await it.get(numbers), "a get beside others")

        async with self.opened(place) as it:
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
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
                # The executor waits for what still touches slots: the hang ends while it closes.
                asyncio.get_running_loop().call_later(self.settle_s, hanging.close)
        ended = driver.ends_of(started)
        expect(ended == [1, 1], f"transfers that hung ended {ended} times")
        await anyio.sleep(self.settle_s)
        driver.check_next_owner(range(8, 16), "a transfer that hung")

    async def _put_across_a_reset(self, it: TierRig, number: int, at_wait: int) -> tuple[Status, bool]:
        batch, slots = it.filled([number])
        _, was_reset = await paused(lambda: it.tier.put(batch), at_wait, it.tier.reset, self.settle_s)
        slots.move_in()
        (status,) = await it.get([number])
        return status, was_reset

    async def _check_stored(self, it: TierRig, trials: _Trials) -> None:
        await anyio.sleep(self.settle_s)
        for numbers in trials.stored:
            await check_whole(it, numbers, versions=_BOTH)

    async def _check_stored_later(self, place: Path, trials: _Trials) -> None:
        if self.is_persistent:
            async with self.opened(place, chunk_bytes=_CHUNK_BYTES) as it:
                for numbers in trials.stored:
                    await check_whole(it, numbers, versions=_BOTH)


class _Trials:
    """Puts and gets that are cut short, each of chunks and slots of its own.

    Attributes:
        stored: the chunks of each put. Of the first two of each version 0 was there before it.
    """

    def __init__(self, rig: TierRig) -> None:
        self._rig = rig
        self._fresh = 100
        self._got: list[Slots] = []
        self.stored: list[Sequence[int]] = []

    async def waits_of_a_put(self) -> list[int]:
        """Put without being cut short, and say at which waits one can be."""
        return _some((await self.put(None)).waits)

    async def waits_of_a_get(self) -> list[int]:
        """Get without being cut short, and say at which waits one can be."""
        return _some((await self.get(None)).waits)

    async def put(
        self, way: Way | None, *, at_wait: int | None = None, after_s: float | None = None
    ) -> Ended[Outcome]:
        numbers = range(self._fresh, self._fresh + _CHUNKS)
        self._fresh += _CHUNKS
        await self._rig.put(numbers[:2])
        batch, slots = self._rig.filled(numbers, version=1)
        self.stored.append(numbers)
        return await interrupted(
            lambda: self._rig.tier.put(batch), way, at_wait=at_wait, after_s=after_s, then=slots.move_in
        )

    async def get(
        self, way: Way | None, *, at_wait: int | None = None, after_s: float | None = None
    ) -> Ended[Outcome]:
        if not self._got:
            await self._rig.put(range(_CHUNKS))
        batch, slots = self._rig.empty(range(_CHUNKS))
        self._got.append(slots)
        return await interrupted(
            lambda: self._rig.tier.get(batch), way, at_wait=at_wait, after_s=after_s, then=slots.move_in
        )

    def check_next_owners(self) -> None:
        """Check that nothing was written into slots after their get had ended."""
        for slots in self._got:
            slots.check_next_owner("a get that was cut short")


def _calls(it: TierRig) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    """Every call of a tier."""
    return {
        "put": lambda: it.tier.put(it.filled(range(4, 12))[0]),
        "get": lambda: it.tier.get(it.empty(range(8))[0]),
        "contains": lambda: it.tier.contains(keys(range(8))),
        "touch": lambda: it.tier.touch(keys(range(8))),
        "discard": lambda: it.tier.discard(keys(range(2, 6))),
        "reset": it.tier.reset,
    }


def _check_heard(verb: str, ended: Ended[object], way: Way) -> None:
    if not ended.interrupted or ended.cancelled:
        return
    expect(
        ended.error is None,
        f"a {verb} that was cancelled ({way.value}) has raised {ended.error!r} in place of the cancellation",
    )
    # A scope is level-triggered: what its owner awaits next is cancelled, too.
    expect(way is Way.SCOPE, f"a {verb} that was cancelled ({way.value}) has swallowed the cancellation")


async def _time_of(trial: Callable[[None], Coroutine[Any, Any, object]]) -> float:
    started = time.perf_counter()
    await trial(None)
    return time.perf_counter() - started


async def _repeat(times: int, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
    for _ in range(times):
        await call()


def _some(waits: int) -> list[int]:
    """Choose waits from 1 on; of many some, evenly spread, the first and the last among them."""
    if waits <= _MOST_WAITS:
        return list(range(1, waits + 1))
    return sorted({1 + round(index * (waits - 1) / (_MOST_WAITS - 1)) for index in range(_MOST_WAITS)})
