"""The contract of a tier, third part: opening, closing, other caches, damage, and the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.core.messages import Answer
from kvtier.identity import Identity
from kvtier.tiers.base import Status
from kvtier_testing.tiers.interrupts import Way, interrupted
from kvtier_testing.tiers.rig import TierRig, aside, check_whole, expect, key, keys, names_of
from kvtier_testing.tiers.setup import Damage, TierSetup, context_of

_OTHERS_THREADS = ("AnyIO worker thread", "asyncio_")  # they are the loop's, and stay for the next one
_OPEN_FILES = Path("/proc/self/fd")
_SCHEDULED = Path("/proc/thread-self/schedstat")  # nanoseconds that it ran, that it wanted to run
_GRACE = 50  # times settle_s
_ATTEMPTS = 5


class ComesAndGoes(TierSetup):
    """Tiers that are opened, closed, damaged, and watched meanwhile."""

    async def test_chunks_are_there_after_closing_and_opening_again(self, place: Path) -> None:
        self.require_persistence()
        async with self.opened(place) as it:
            await it.put(range(8))
            await it.tier.discard(keys([3]))
        async with self.opened(place) as it:
            statuses = await it.get(range(8))
            expect(statuses.pop(3) is Status.ABSENT, "a discarded chunk is back after opening again")
            it.expect_kept(statuses, "after opening again")

    async def test_a_reset_holds_after_opening_again(self, place: Path) -> None:
        self.require_persistence()
        async with self.opened(place) as it:
            await it.put(range(4))
            await it.tier.reset()
            await it.put([2], version=1)
        async with self.opened(place) as it:
            statuses = (await it.tier.get(it.empty(range(4))[0])).statuses
            gone = [statuses[number] for number in (0, 1, 3)]
            expect(set(gone) == {Status.ABSENT}, f"after a reset and opening again: {names_of(gone)}")
            expect(
                statuses[2] is Status.ABSENT, "what was put after a reset is given to one who opened later"
            )
            expect(
                not any(await it.contains(range(4))), "contains() says yes after a reset and opening again"
            )
            it.expect_kept(await it.put(range(4)), "a put after a reset and opening again")
        async with self.opened(place) as it:
            it.expect_kept(await it.get(range(4)), "what was put after a reset and opening again")

    async def test_chunks_of_another_cache_are_not_given(self, place: Path) -> None:
        other = Identity.make("kvtier/conformance", {"place": place.name, "dtype": "another"})
        async with self.opened(place) as it:
            await it.put(range(4))
        async with self.opened(place, identity=other) as it:
            statuses = (await it.tier.get(it.empty(range(4))[0])).statuses
            expect(set(statuses) == {Status.ABSENT}, f"chunks of another identity: {names_of(statuses)}")
            expect(not any(await it.contains(range(4))), "contains() says yes to chunks of another identity")
            await it.put(range(2), version=1)
            await it.tier.discard(keys([2]))
        if self.is_persistent:
            async with self.opened(place) as it:
                it.expect_kept(await it.get(range(4)), "chunks of one identity after another one was there")

    async def test_a_reset_of_one_cache_leaves_another_as_it_is(self, place: Path) -> None:
        self.require_persistence()
        other = Identity.make("kvtier/conformance", {"place": place.name, "dtype": "another"})
        async with self.opened(place) as it:
            await it.put(range(4))
        async with self.opened(place, identity=other) as it:
            await it.put(range(2), version=1)
            await it.tier.reset()
        async with self.opened(place) as it:
            it.expect_kept(await it.get(range(4)), "chunks of one identity after another one was reset")

    async def test_several_tiers_share_a_place(self, place: Path) -> None:
        if not self.is_shared:
            pytest.skip(f"{type(self).__name__}.is_shared is False: one tier has a place to itself")
        async with self.opened(place) as one, self.opened(place) as two:
            await one.put(range(4))
            two.expect_kept(await two.get(range(4)), "what another tier has put")
            async with anyio.create_task_group() as tasks:
                for rig in (one, two):
                    tasks.start_soon(rig.put, range(4, 40))
                    tasks.start_soon(rig.get, range(40))
            one.expect_kept(await one.get(range(40)), "what two tiers have put at once")
        async with self.opened(place) as it:
            it.expect_kept(await it.get(range(40)), "what two tiers have put")

    @pytest.mark.parametrize("damage", list(Damage), ids=lambda damage: damage.name.lower())
    async def test_a_damaged_chunk_is_not_given_and_can_be_put_again(
        self, place: Path, damage: Damage
    ) -> None:
        self.require("damage", "what is stored cannot be damaged")
        async with self.driven(place) as driver:
            tier = driver.rig.tier
            await driver.put(range(4))
            await aside(self.damage, tier, place, key(2), damage)
            fetched = await driver.fetch(range(4))
            expected = [Answer.LANDED, Answer.LANDED, Answer.MISSING, Answer.LANDED]
            answers = [Answer(answer) for answer in fetched.answers]
            # The run of chunks that are got ends where the tier knows already that one is no good.
            expect(
                answers[:3] == expected[:3] and answers[3] in (Answer.LANDED, Answer.LOCATED),
                f"with a damaged third chunk ({damage.value}) a fetch answered {[a.name for a in answers]}",
            )
            driver.check_landed(range(4), fetched)
            put = await driver.put(range(4))
            expect(all(put.kept), f"after it was damaged ({damage.value}): {dict(put.reasons)}")
            fetched = await driver.fetch(range(4))
            driver.check_landed(range(4), fetched)
            names = [Answer(answer).name for answer in fetched.answers]
            expect(set(names) == {"LANDED"}, f"a chunk that was damaged and put again: {names}")

    @pytest.mark.parametrize("after_s", [0.0, 0.001, 0.005, 0.02])
    async def test_closing_under_load_leaves_whole_chunks_or_none(self, place: Path, after_s: float) -> None:
        started = []
        async with self.driven(place, slots=64) as driver:
            await driver.put(range(8))
            for first in range(0, 32, 4):
                for slot in range(first, first + 4):
                    driver.memory.view(slot)[:] = driver.rig.content(100 + slot)
                started.append(driver.start_put(range(100 + first, 104 + first), range(first, first + 4)))
                started.append(driver.start_fetch(range(4), range(32 + first, 36 + first)))
            await anyio.sleep(after_s)
        ended = driver.ends_of(started)
        expect(set(ended) == {1}, f"transfers under way when the tier was closed ended {ended} times")
        await anyio.sleep(self.settle_s)
        driver.check_next_owner(range(64), "a transfer that was under way when the tier was closed")
        if self.is_persistent:
            async with self.opened(place) as it:
                it.expect_kept(await it.get(range(8)), "chunks that were put before")
                await check_whole(it, range(100, 132), versions=(0,))

    async def test_nobody_else_may_read_what_it_keeps_in_files(self, place: Path) -> None:
        """Of files at its place, and beside it under names that begin alike; it has to see to others."""
        usual = os.umask(0)  # so that nothing but the modes that the tier asks for protects them
        try:
            async with self.opened(place) as it:
                await it.put(range(4))
                readable = await aside(_readable_by_others, place)
        finally:
            os.umask(usual)
        expect(
            not readable, f"others may read or write what it keeps; make it 0600, folders 0700: {readable}"
        )

    async def test_nothing_is_left_running_or_open_after_closing(self, place: Path) -> None:
        await self._open_use_and_close(place)  # what is made once for the process is there now
        gc.collect()
        await anyio.sleep(self.settle_s)
        files = _open_files()
        tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
        for _ in range(2):
            await self._open_use_and_close(place)
        left = await _left(tasks, threads, _GRACE * self.settle_s)
        expect(not left, f"after the tier was closed there are left: {left}")
        opened = await _opened(files, _GRACE * self.settle_s)
        expect(opened <= 0, f"after the tier was opened and closed twice {opened} more files are open")

    async def test_an_opening_that_is_cut_short_leaves_nothing_running(self, place: Path) -> None:
        await self._open_use_and_close(place)
        tasks, threads = asyncio.all_tasks(), set(threading.enumerate())

        async def open_and_close() -> None:
            async with self.opened(place):
                pass

        for at_wait in range(1, 1 + (await interrupted(open_and_close, None)).waits):
            await interrupted(open_and_close, Way.CANCEL, at_wait=at_wait)
        left = await _left(tasks, threads, _GRACE * self.settle_s)
        expect(not left, f"after openings that were cancelled there are left: {left}")

    async def test_no_call_holds_up_the_event_loop(self, place: Path) -> None:
        pauses: dict[str, list[float]] = {}
        for _ in range(_ATTEMPTS):  # the machine may be busy with something else: the best of some counts
            tier = self.make_tier(place)
            it = self.rig(tier, place)
            calls = {"open": lambda: tier.open(context_of(it)), **_calls(it), "aclose": tier.aclose}  # noqa: B023
            for verb, call in calls.items():
                pauses.setdefault(verb, []).append(await _longest_pause(call))
        for verb, found in pauses.items():
            expect(
                min(found) <= self.pause_s,
                f"a call of {verb}() holds up the event loop for {min(found):.2f} s at least: what blocks "
                "belongs into a thread (kvtier.tiers.drain.in_thread)",
            )

    async def _open_use_and_close(self, place: Path) -> None:
        async with self.opened(place) as it:
            for call in _calls(it).values():
                await call()
            await interrupted(_calls(it)["put"], Way.CANCEL, at_wait=1)
            await interrupted(_calls(it)["get"], Way.CANCEL, at_wait=1)


def _calls(it: TierRig) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    chosen = keys(range(16))
    batches = it.filled(range(16))[0], it.empty(range(16))[0]
    return {
        "put": lambda: it.tier.put(batches[0]),
        "get": lambda: it.tier.get(batches[1]),
        "contains": lambda: it.tier.contains(chosen),
        "touch": lambda: it.tier.touch(chosen),
        "discard": lambda: it.tier.discard(chosen),
        "reset": it.tier.reset,
    }


async def _longest_pause(call: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """Make a call and return for how long the loop did nothing else at most, in seconds."""
    longest, running = 0.0, True

    async def tick() -> None:
        nonlocal longest
        before = _undisturbed_s()
        while running:
            await asyncio.sleep(0.001)
            now = _undisturbed_s()
            longest, before = max(longest, now - before), now

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(0.005)
    longest = 0.0
    try:
        await call()
        await asyncio.sleep(0.002)
    finally:
        running = False
        await ticking
    return longest


def _undisturbed_s() -> float:
    """The time less that in which this thread wanted to run, but others had the processors."""
    while True:
        queued_s, now_s = _queued_s(), time.perf_counter()
        if _queued_s() == queued_s:
            return now_s - queued_s


def _queued_s() -> float:
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except OSError:  # no Linux
        return 0.0


async def _left(
    tasks: set[asyncio.Task[Any]], threads: set[threading.Thread], patience_s: float
) -> list[str]:
    """Wait a while for the end of what was not there before; name what is left."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [repr(task) for task in asyncio.all_tasks() - tasks]
        left += [
            repr(thread)
            for thread in set(threading.enumerate()) - threads
            if not thread.name.startswith(_OTHERS_THREADS)
        ]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.01)


async def _opened(files: int, patience_s: float) -> int:
    """Wait a while for what a client closes in threads of its own; return how many more files are open."""
    deadline = time.monotonic() + patience_s
    while True:
        opened = _open_files() - files
        if opened <= 0 or time.monotonic() > deadline:
            return opened
        await asyncio.sleep(0.01)


def _readable_by_others(place: Path) -> list[str]:
    found = [path for beside in place.parent.glob(f"{place.name}*") for path in (beside, *beside.rglob("*"))]
    modes = {path: path.lstat().st_mode for path in found if not path.is_symlink()}
    return sorted(f"{path.name} {stat.S_IMODE(mode):o}" for path, mode in modes.items() if mode & 0o077)


def _open_files() -> int:
    return len(os.listdir(_OPEN_FILES)) if _OPEN_FILES.exists() else 0
