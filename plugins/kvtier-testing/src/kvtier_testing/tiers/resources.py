"""The contract of a tier, fourth part: it frees its resources, and never blocks the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

from kvtier_testing.tiers.rig import calls_of, expect, fail
from kvtier_testing.tiers.setup import TierSetup
from kvtier_testing.tiers.steps import Way, run_cancelled

_LOOP_THREADS = ("AnyIO worker thread", "asyncio_")  # they belong to the loop and outlive a tier
_OPEN_FILES = next((path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.exists()), None)
_SCHEDULED = Path("/proc/thread-self/schedstat")  # run time and time waiting to run, in nanoseconds
_GRACE = 50  # times settle_s
_ATTEMPTS = 5
_REPEATED_CALLS = 40
_ROUNDS = 9
_MANY_CHUNKS = 64
_IDLE_S = (0.2, 0.4, 0.8, 1.6)
_IDLE_SHARE = 0.1


def _scheduled_s(but: Collection[int] = ()) -> dict[int, tuple[float, float]]:
    """Return the seconds that each thread of this process has run and has waited for a processor.

    Threads of C libraries are included.
    """
    found: dict[int, tuple[float, float]] = {}
    for folder in Path("/proc/self/task").glob("*"):  # exists only on Linux
        with suppress(OSError):  # it has ended meanwhile
            ran, queued = (folder / "schedstat").read_text().split()[:2]
            found[int(folder.name)] = int(ran) / 1e9, int(queued) / 1e9
    return {thread: seconds for thread, seconds in found.items() if thread not in but}


def _share(passed_s: float, before: tuple[float, float], now: tuple[float, float]) -> float:
    """Return the fraction of a core that a thread uses when it need not wait for one."""
    ran_s, queued_s = now[0] - before[0], now[1] - before[1]
    # A thread that ran for a moment and waited the rest does not count as always running.
    return ran_s / max(passed_s - queued_s, passed_s * _IDLE_SHARE)


class ResourceTests(TierSetup):
    """Tasks, threads, open files, memory, and the event loop's time."""

    async def test_nothing_is_left_running_or_open_after_closing(self, place: Path) -> None:
        # One place for each round, so that leaks per place add up.
        first, *others = (place.with_name(f"{place.name}-{number}") for number in range(3))
        await self._open_use_and_close(first)  # creates everything that exists once per process
        before = _Resources()
        for other in others:
            await self._open_use_and_close(other)
        left = await before.added(_GRACE * self.settle_s)
        expect(not left, f"aclose() gives everything back, but two openings have left: {left}")

    async def test_a_cancelled_open_leaves_nothing_running_or_open(self, place: Path) -> None:
        await self._open_use_and_close(place)
        waits = (await self._cancel_an_opening(place, None))[1]
        before = _Resources()
        # Their tiers stay referenced, so that the garbage collector cannot close their files.
        tiers = [(await self._cancel_an_opening(place, at_wait))[0] for at_wait in range(1, 1 + waits)]
        left = await before.added(_GRACE * self.settle_s)
        expect(
            not left,
            f"open() gives back what it began when it is cancelled, since aclose() is not called then; "
            f"{len(tiers)} cancelled openings have left: {left}",
        )
        async with self.opened(place) as it:
            it.expect_kept(await it.put([1]), "a put after openings that were cancelled")
            it.expect_kept(await it.get([1]), "what was put after openings that were cancelled")

    async def test_repeated_calls_add_up_to_nothing(self, place: Path) -> None:
        async with self.opened(place, chunk_bytes=4096) as it:
            for verb, call in calls_of(it, 2).items():
                if verb == "reset":
                    continue  # a tier may remember its epochs
                objects = files = 0
                for _ in range(_ROUNDS):  # the first ones fill caches, and a client may clean up periodically
                    objects, files = await _added_by(call)
                    if max(objects, files) < _REPEATED_CALLS // 2:
                        break
                else:
                    fail(
                        f"each {verb}() holds something that it never gives back: {_REPEATED_CALLS} calls "
                        f"with the same chunks left {objects} objects and {files} open files more"
                    )

    async def test_no_call_blocks_the_event_loop(self, place: Path) -> None:
        pauses: dict[str, float] = {}
        for _ in range(_ATTEMPTS):  # other processes may keep the machine busy: the best attempt counts
            tier = self.make_tier(place)
            it = self.rig(tier, place)

            async def at_once(call: Callable[[], object]) -> None:
                call()

            calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
                "open": lambda: tier.open(it.context()),  # noqa: B023
                **calls_of(it, _MANY_CHUNKS),
                "usage": lambda: at_once(tier.usage),  # noqa: B023
                "aclose": tier.aclose,
            }
            for verb, call in calls.items():
                pauses[verb] = min(pauses.get(verb, 1e9), await _longest_pause(call))
            if max(pauses.values()) <= self.pause_s:
                return
        verb = max(pauses, key=lambda verb: pauses[verb])
        fail(
            f"{verb}() of {_MANY_CHUNKS} chunks blocks the event loop for {pauses[verb]:.2f} s: a call that "
            "blocks belongs in a thread (kvtier.tiers.in_thread)",
        )

    async def test_an_idle_tier_leaves_the_processor_alone(self, place: Path) -> None:
        others = _scheduled_s().keys() - {threading.get_native_id()}
        shares: list[float] = []
        async with self.opened(place) as it:
            await it.put(range(4))
            # Background work of a put may still run. On a busy machine the first windows show little but
            # the cost of reading these figures, which is the same for a long window.
            for window_s in _IDLE_S:
                began_s, began = time.monotonic(), _scheduled_s()
                await anyio.sleep(window_s)
                passed_s, now = time.monotonic() - began_s, _scheduled_s(but=others)
                shares.append(sum(_share(passed_s, began.get(one, (0.0, 0.0)), now[one]) for one in now))
                if shares[-1] <= _IDLE_SHARE:
                    return
        fail(
            f"an idle open tier takes {min(shares):.0%} of a core: it, or a thread of its "
            "client, looks for work all the time; have it wait for events"
        )

    async def _open_use_and_close(self, place: Path) -> None:
        async with self.opened(place) as it:
            for call in calls_of(it, 8).values():
                await call()
            for verb in ("put", "get"):
                await run_cancelled(calls_of(it, 8)[verb], Way.CANCEL, at_wait=1)

    async def _cancel_an_opening(self, place: Path, at_wait: int | None) -> tuple[object, int]:
        """Open a tier, cancelled at one of its waits; return the tier and its number of waits."""
        tier = self.make_tier(place)
        context = self.rig(tier, place).context()
        ended = await run_cancelled(
            lambda: tier.open(context), Way.CANCEL if at_wait else None, at_wait=at_wait
        )
        if not ended.raised_cancellation and ended.error is None:
            await tier.aclose()
        return tier, ended.waits


class _Resources:
    """The tasks, threads and open files of one moment."""

    def __init__(self) -> None:
        self._tasks = asyncio.all_tasks()
        self._threads = set(threading.enumerate())
        gc.collect()
        self._files = _open_files()

    async def added(self, patience_s: float) -> list[str]:
        """Wait a while for newer resources to go; return those left."""
        deadline = time.monotonic() + patience_s
        while (left := self._added()) and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.05)
        return left

    def _added(self) -> list[str]:
        gc.collect()  # frees tracebacks of cancelled calls in cycles, but nothing that a live tier holds
        threads = set(threading.enumerate()) - self._threads
        files = _open_files()
        added = [repr(task) for task in asyncio.all_tasks() - self._tasks]
        added += [repr(thread) for thread in threads if not thread.name.startswith(_LOOP_THREADS)]
        if len(files) > len(self._files):
            names = sorted(files[number] for number in files.keys() - self._files.keys())
            added.append(f"{len(files) - len(self._files)} more open files ({', '.join(names)})")
        return added


async def _added_by(call: Callable[[], Coroutine[Any, Any, object]]) -> tuple[int, int]:
    """Make many calls; return the numbers of objects and open files added."""
    objects, files = sys.getallocatedblocks(), len(_open_files())
    for _ in range(_REPEATED_CALLS):
        await call()
    if sys.getallocatedblocks() - objects >= _REPEATED_CALLS // 2:
        gc.collect()
    return sys.getallocatedblocks() - objects, len(_open_files()) - files


async def _longest_pause(call: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """Make a call and return the longest time that it kept the loop busy, in seconds."""
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
    """Return the time, less the time that this thread waited for a processor."""
    while True:
        queued_s, now_s = _queued_s(), time.perf_counter()
        if _queued_s() == queued_s:
            return now_s - queued_s


def _queued_s() -> float:
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except OSError:  # not on Linux
        return 0.0


def _open_files() -> dict[str, str]:
    """Return the open file descriptors and their targets."""
    if _OPEN_FILES is None:
        return {}
    found = {}
    for number in os.listdir(_OPEN_FILES):
        try:
            found[number] = os.readlink(_OPEN_FILES / number)
        except FileNotFoundError:  # the listing's own descriptor
            continue
        except OSError:  # no links, as on macOS
            found[number] = number
    return found
