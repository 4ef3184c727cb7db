"""Runs the core's commands against the tiers on an event loop, and posts the results back.

There is one task per command, not per chunk. Concurrent commands of a tier are limited, gets apart from
puts, so that a load never queues behind writes. Whatever a tier does, each command ends with exactly one
event, and only when the tier no longer touches its slots.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import anyio
import anyio.abc

from kvtier._core.kv_events import EventQueue
from kvtier._core.messages import Answer, Command, Event, Get, GetEnded, Put, PutEnded, TierDown, Touch
from kvtier._core.tiers.backoff import RandomSource
from kvtier._identity import Identity
from kvtier._log import GuardedLogger
from kvtier.tiers._activity import TierActivity as TierActivity
from kvtier.tiers._adopted import ADOPTED, verify_adopted
from kvtier.tiers._base import SlotAuditor, SlotMemory
from kvtier.tiers._loop_clock import LoopClock
from kvtier.tiers._runner import Post as Post
from kvtier.tiers._runner import TierRunner
from kvtier.tiers._supervisor import NamedTier as NamedTier
from kvtier.tiers._waiting import call_soon, until_done

logger = GuardedLogger("kvtier.executor")

_SEAL_THREADS = 4
CLOSE_S = 1.5
"""Seconds from the drain to the end of a shutdown, even if a tier hangs: vLLM kills an engine after 5."""

LAST_STEP_S = 0.2
"""Seconds of a shutdown that remain after the tiers are closed."""

_LEAST_CLOSE_S = 0.5


def time_left(drain_s: float, passed_s: float) -> tuple[float, float]:
    """Return the seconds left to drain and to close in a shutdown that began ``passed_s`` seconds ago."""
    left_s = drain_s - passed_s
    return max(0.0, left_s), min(CLOSE_S, max(_LEAST_CLOSE_S, CLOSE_S + left_s))


class Executor:
    """The tiers at work on one event loop. Used as an async context manager, which opens and closes them.

    ``tiers`` are in the core's order. ``post`` is called on the loop with each event. The caller clears the
    slots of a get in ``slot_checksums`` before it submits. The tiers have ``close_s`` seconds to close, all
    at once. Deadlines are on ``clock``.
    """

    def __init__(
        self,
        tiers: Sequence[NamedTier],
        identity: Identity,
        memory: SlotMemory,
        post: Post,
        *,
        close_s: float = CLOSE_S,
        chance: RandomSource = random.random,
        slot_checksums: SlotAuditor | None = None,
        clock: LoopClock | None = None,
    ) -> None:
        clock = clock or LoopClock()
        threads = anyio.CapacityLimiter(_SEAL_THREADS)  # not the loop's own: others may use that up
        self._runners = [
            TierRunner(index, named, identity, memory, self._posted, threads, chance, clock, slot_checksums)
            for index, named in enumerate(tiers)
        ]
        self.activity = tuple(runner.activity for runner in self._runners)
        has_adopted = any(named.tier.config.type == ADOPTED for named in tiers)
        self._verify = partial(verify_adopted, memory, identity.short_digest) if has_adopted else None
        self._post = post
        self.end_by_s: float | None = None  # by when the tiers have to be closed, in place of ``close_s``
        self._close_s = close_s
        self._progress = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Executor:
        self._tasks = await anyio.create_task_group().__aenter__()
        for runner in self._runners:
            self._tasks.start_soon(runner.supervise)
            self._tasks.start_soon(runner.watch_usage)
        if self._verify is not None:
            self._tasks.start_soon(self._verify, self._is_busy)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)  # waits for transfers that still touch slots
        finally:
            await until_done(asyncio.ensure_future(self._close_tiers()))

    async def _close_tiers(self) -> None:
        left_s = 0.0 if self.end_by_s is None else self.end_by_s - anyio.current_time()
        if left_s <= 0:  # no caller waits any longer
            left_s = self._close_s
        async with anyio.create_task_group() as tasks:
            for runner in self._runners:
                tasks.start_soon(runner.supervisor.close, left_s)

    def submit(self, commands: Iterable[Command]) -> None:
        """Start commands. Called on the loop."""
        assert self._tasks is not None
        for command in commands:
            runner = self._runners[command.tier]
            if isinstance(command, Put | Get):
                turns = runner.activity.puts if isinstance(command, Put) else runner.activity.gets
                turns.submitted += 1
                self._tasks.start_soon(runner.run, command, turns, runner.supervisor.epoch)
            elif isinstance(command, Touch):
                if runner.note_touched(command.keys):
                    self._tasks.start_soon(runner.send_touched)
            else:
                runner.supervisor.request_reset(command.epoch)

    def _is_busy(self) -> bool:
        return any(tier.puts.submitted or tier.gets.submitted for tier in self.activity)

    async def settled(self) -> None:
        """Wait until every tier is open, and through with the resets submitted so far, or given up."""
        for runner in self._runners:
            await runner.supervisor.epoch.settled.wait()

    async def drained(self) -> None:
        """Wait until no put, get or reset is in flight."""
        while self._is_busy():
            await self._progress.wait()
        for runner in self._runners:
            if runner.supervisor.epoch.number:  # else it may still be opening, which no caller awaits
                await runner.supervisor.epoch.settled.wait()

    async def finish(self, drain_by_s: float, end_by_s: float) -> None:
        """Wait until ``drain_by_s`` for commands in flight, before the executor is left.

        Everything ends by ``end_by_s``, the tiers' closing included. Both are times of ``time.monotonic``.
        """
        with anyio.move_on_after(max(0.0, drain_by_s - time.monotonic())):
            await self.drained()
        self.end_by_s = end_by_s - LAST_STEP_S

    def _posted(self, event: Event) -> None:
        self._post(event)
        progress, self._progress = self._progress, anyio.Event()
        progress.set()


class ExecutorThread:
    """An executor on an event loop in its own thread, for an owner that cannot wait.

    The owner submits commands and takes events from one thread. Two deques carry them, without a lock. One
    wake-up serves all commands that are submitted before the loop runs.

    Commands that the thread no longer takes are answered as failed, even if the thread died.
    """

    def __init__(self, make: Callable[[Post], Executor]) -> None:
        self.events = EventQueue()  # to be taken from the left
        self.activity: Sequence[
            TierActivity
        ] = ()  # one for each tier, in the core's order, from the start on
        self._make = make
        self._inbox: deque[Sequence[Command]] = deque()
        self._woken = False
        self._closing = False
        self._ended = False
        self._drain_by_s = self._end_by_s = 0.0
        self._wake: Callable[[], object] = lambda: None
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-executor", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until its loop runs. The tiers are opened there, meanwhile."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def submit(self, commands: Sequence[Command]) -> None:
        """Hand commands over. Raises nothing: where the thread has ended they fail at once."""
        self._inbox.append(commands)
        if self._ended:
            self._refuse_inbox()
        elif not self._woken:
            self._woken = True
            self._wake()

    def close(self, drain_s: float, close_s: float = CLOSE_S) -> bool:
        """Drain for at most ``drain_s`` seconds, close the tiers in ``close_s`` more, and end the thread.

        Returns whether all has ended. If not, a tier hangs and may still touch slots: the memory must stay
        where it is.
        """
        if not self._thread.is_alive():
            return True
        self._drain_by_s = time.monotonic() + drain_s
        self._end_by_s = self._drain_by_s + close_s
        self._closing = True
        self._wake()
        self._thread.join(drain_s + close_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:
            self._error = error
            logger.exception("the executor thread failed: no tier is used until the engine restarts")
        finally:
            self._ended = True
            self._refuse_inbox()
            self._started.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        wakeup = asyncio.Event()
        wakeup.set()  # for commands submitted before
        self._wake = lambda: call_soon(loop, wakeup.set)
        async with self._make(self.events.append) as executor:
            self.activity = executor.activity
            self._started.set()
            while not self._closing or self._inbox:
                await wakeup.wait()
                wakeup.clear()
                self._woken = False
                while self._inbox:
                    executor.submit(self._inbox.popleft())
            await executor.finish(self._drain_by_s, self._end_by_s)

    def _refuse_inbox(self) -> None:
        """Fail the commands left in the inbox. Both threads may do this: a command is popped once."""
        while True:
            try:
                commands = self._inbox.popleft()
            except IndexError:
                return
            for command in commands:
                self.events.append(TierDown(command.tier, "the executor has ended"))
                self.events.extend(failure_of(command, "down"))


def failure_of(command: Command, reason: str) -> Sequence[Event]:
    """Return the event that answers a command which is not carried out; none if none is awaited."""
    if isinstance(command, Put):
        kept = (False,) * len(command.keys)
        return (PutEnded(command.id, kept, {reason: len(kept)}),)
    if isinstance(command, Get):
        answers = (Answer.MISSING,) * len(command.keys)
        return (GetEnded(command.id, answers, {reason: len(answers)}),)
    return ()
