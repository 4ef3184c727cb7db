"""Runs the core's commands against the tiers: awaits them on an event loop and posts back what came of it.

One task a command, never one a chunk. How many commands of a tier run at once is bounded, gets apart
from puts, so that a load never queues behind writes. Whatever a tier does, each command ends with
exactly one event, and only when its slots are no longer touched.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from kvtier.core import reasons
from kvtier.core.messages import (
    Answer,
    Command,
    Event,
    Fetch,
    Fetched,
    Put,
    PutEnded,
    Removed,
    Reset,
    TierDown,
    Touch,
)
from kvtier.errors import KVTierError, TierError
from kvtier.identity import Identity
from kvtier.keys import OffloadKey
from kvtier.tiers.base import (
    Batch,
    Knowledge,
    Outcome,
    SecondaryTier,
    SlotMemory,
    Status,
    TierContext,
    Usage,
)
from kvtier.tiers.drain import until_done
from kvtier.tiers.seal import Verdict, check, seal

logger = logging.getLogger("kvtier.executor")

Post = Callable[[Event], None]
T = TypeVar("T")

_SEAL_THREADS = 4
_CLOSE_GRACE_S = 2.0
_LOOK_EVERY_S = 1.0
_TOUCHED_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True)
class NamedTier:
    """A tier and the name that logs and metrics give it."""

    name: str
    tier: SecondaryTier[Any]


class Turns:
    """Lets so many commands of one kind run at once. Entered by each of them when its turn has come.

    Attributes:
        submitted: commands that have not ended.
        running: those of them whose turn it is.
    """

    def __init__(self, width: int) -> None:
        self.submitted = 0
        self.running = 0
        self._semaphore = anyio.Semaphore(width)

    @property
    def waiting(self) -> int:
        """Commands that wait for their turn. May be asked from any thread."""
        return max(0, self.submitted - self.running)

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        self.running += 1

    async def __aexit__(self, *exc: object) -> None:
        self.running -= 1
        self._semaphore.release()


class TierActivity:
    """What a tier is doing now. The loop alone writes it; any thread may look.

    Attributes:
        puts: its puts.
        gets: its fetches.
        usage: how full it is, about a second ago; None where it does not know.
    """

    def __init__(self, max_concurrency: int) -> None:
        self.puts = Turns(max(1, max_concurrency // 2))
        self.gets = Turns(max_concurrency)
        self.usage: Usage | None = None


class Executor:
    """The tiers at work on one event loop. Used as an async context manager.

    Args:
        tiers: the tiers, in the core's order. They are opened, and closed, by the executor.
        identity: the cache that all chunks belong to.
        memory: where the slots are.
        post: called on the loop with each event.
        close_s: seconds that a tier has to close.

    Attributes:
        activity: what each tier is doing, in the core's order.
    """

    def __init__(
        self,
        tiers: Sequence[NamedTier],
        identity: Identity,
        memory: SlotMemory,
        post: Post,
        *,
        close_s: float = 5.0,
    ) -> None:
        threads = anyio.CapacityLimiter(_SEAL_THREADS)  # not the loop's own: others may use that up
        self._runners = [
            _TierRunner(index, named, identity, memory, self._posted, threads)
            for index, named in enumerate(tiers)
        ]
        self.activity = tuple(runner.activity for runner in self._runners)
        self._post = post
        self._close_s = close_s
        self._progress = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Executor:
        self._tasks = await anyio.create_task_group().__aenter__()
        for runner in self._runners:
            self._tasks.start_soon(runner.open)
            self._tasks.start_soon(runner.watch_usage)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)  # waits for transfers that still touch slots
        finally:
            await until_done(asyncio.ensure_future(self._close_tiers()))

    async def _close_tiers(self) -> None:
        for runner in self._runners:
            await runner.close(self._close_s)

    def submit(self, commands: Iterable[Command]) -> None:
        """Start commands. Called on the loop."""
        assert self._tasks is not None
        for command in commands:
            runner = self._runners[command.tier]
            if isinstance(command, Fetch):
                runner.activity.gets.submitted += 1
                self._tasks.start_soon(runner.fetch, command, runner.era)
            elif isinstance(command, Put):
                runner.activity.puts.submitted += 1
                self._tasks.start_soon(runner.put, command, runner.era)
            elif isinstance(command, Touch):
                if runner.note_touched(command.keys):
                    self._tasks.start_soon(runner.tell_touched)
            else:
                previous, runner.era = runner.era, anyio.Event()
                self._tasks.start_soon(runner.reset, command, previous, runner.era)

    async def settled(self) -> None:
        """Wait until every tier is open, and through with the resets submitted so far, or given up."""
        for runner in self._runners:
            await runner.era.wait()

    async def drained(self) -> None:
        """Wait until no put, no fetch and no reset is under way."""
        while any(tier.puts.submitted or tier.gets.submitted for tier in self.activity):
            await self._progress.wait()
        for runner in self._runners:
            await runner.resets_ended()

    def _posted(self, event: Event) -> None:
        self._post(event)
        progress, self._progress = self._progress, anyio.Event()
        progress.set()


class _TierRunner:
    """One tier: its condition, its limits, and the guard around everything it does.

    Attributes:
        era: set when the tier may be used; another one after each reset. A command belongs to the era
            in which it was submitted, and is not begun in a later one: its bytes would come back.
        activity: what it is doing now.
    """

    def __init__(
        self,
        index: int,
        named: NamedTier,
        identity: Identity,
        memory: SlotMemory,
        post: Post,
        threads: anyio.CapacityLimiter,
    ) -> None:
        self.index = index
        self.name = named.name
        self.activity = TierActivity(named.tier.config.max_concurrency)
        self.era = anyio.Event()
        self._tier = named.tier
        self._memory = memory
        self._post = post
        self._threads = threads
        self._context = TierContext(named.name, identity, memory.chunk_bytes, self._note_removed)
        self._digest = identity.short_digest
        self._reasons = reasons.TRANSFER.keys() | named.tier.reasons.keys()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._removed: deque[OffloadKey] = deque()
        self._is_removing = False
        self._first_era = self.era
        self._down: str | None = None
        self._is_open = False
        self._touched: dict[OffloadKey, None] = {}
        self._is_telling = False

    async def open(self) -> None:
        """Open the tier; where it cannot be opened the engine goes on without it, and it is said so."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._tier.open(self._context)
            self._is_open = True
        except BaseException as error:
            self._down = "not opened"
            _require_fault(error)
            self._fail(f"cannot be opened: {_words(error)}")
        finally:
            self._first_era.set()

    async def close(self, close_s: float) -> None:
        if not self._is_open:
            return
        with anyio.move_on_after(close_s) as scope:
            try:
                await self._tier.aclose()
            except BaseException as error:
                _require_fault(error)
                logger.exception("tier %s: closing failed", self.name)
        if scope.cancelled_caught:
            logger.error("tier %s: closing was given up after %g s", self.name, close_s)

    async def reset(self, command: Reset, previous: anyio.Event, era: anyio.Event) -> None:
        try:
            await previous.wait()
            if self._down is None:
                await self._tier.reset()
        except BaseException as error:
            # What it holds may be stale and can not be told apart: it must not be asked again.
            self._fail(f"cannot be reset to epoch {command.epoch}: {_words(error)}")
            _require_fault(error)
        finally:
            era.set()  # whatever came of it: somebody may be waiting in ``settled``

    def note_touched(self, keys: Sequence[OffloadKey]) -> bool:
        """Note that chunks were used; say whether the tier is to be told and nobody does so yet."""
        if type(self._tier).touch is SecondaryTier.touch:
            return False  # recency is nothing to this tier
        if len(self._touched) < _TOUCHED_AT_ONCE:  # or it is too slow to be told of everything
            self._touched.update(dict.fromkeys(keys))
        start, self._is_telling = not self._is_telling, True
        return start

    async def tell_touched(self) -> None:
        """Tell the tier which chunks were used, all that have gathered meanwhile at once."""
        try:
            await self._first_era.wait()
            while self._touched and self._down is None:
                keys, self._touched = list(self._touched), {}
                await self._tier.touch(keys)
        except BaseException as error:
            _require_fault(error)
            logger.warning("tier %s: touch failed: %s", self.name, _words(error))
        finally:
            self._is_telling = False

    async def resets_ended(self) -> None:
        """Wait for the resets submitted so far, but not for the opening where there was none."""
        if self.era is not self._first_era:
            await self.era.wait()

    async def put(self, command: Put, era: anyio.Event) -> None:
        timing = _Timing()
        outcome = Outcome.all(Status.FAILED, len(command.keys), "cancelled")
        try:
            await era.wait()
            async with self.activity.puts:
                with timing:
                    outcome = await self._put(command, era)
        except BaseException as error:
            outcome = self._failure("put", command.keys, error)
        finally:
            self.activity.puts.submitted -= 1
            kept = [status == Status.OK for status in outcome.statuses]
            self._post(PutEnded(command.id, kept, outcome.reasons, timing.seconds))

    async def fetch(self, command: Fetch, era: anyio.Event) -> None:
        timing = _Timing()
        answers: Sequence[Answer] = (Answer.MISSING,) * len(command.keys)
        outcome = Outcome((), {"cancelled": len(command.keys)})
        try:
            await era.wait()
            async with self.activity.gets:
                answers, outcome = await self._fetch(command, era, timing)
        except BaseException as error:
            outcome = self._failure("get", command.keys, error)
        finally:
            self.activity.gets.submitted -= 1
            self._post(Fetched(command.id, answers, outcome.reasons, timing.seconds))

    async def _put(self, command: Put, era: anyio.Event) -> Outcome:
        self._require_usable(era)
        batch = Batch(command.keys, command.slots, self._memory)
        if not self._tier.verifies:
            await self._in_thread(_seal_all, batch, self._digest)
            self._require_usable(era)  # the tier would take what comes now for a put of the new era
        return self._complete(await self._tier.put(batch), len(batch))

    async def _fetch(self, command: Fetch, era: anyio.Event, timing: _Timing) -> tuple[list[Answer], Outcome]:
        self._require_usable(era)
        count = len(command.keys)
        found = [True] * count if command.located else await self._find(command.keys)
        answers = [Answer.LOCATED if there else Answer.MISSING for there in found]
        run = min(found.index(False) if False in found else count, len(command.slots))
        if not run:
            return answers, Outcome(())
        with timing:
            outcome = await self._get(Batch(command.keys[:run], command.slots[:run], self._memory))
        answers[:run] = [
            Answer.LANDED if status == Status.OK else Answer.MISSING for status in outcome.statuses
        ]
        return answers, outcome

    async def _find(self, keys: Sequence[OffloadKey]) -> list[bool]:
        known = self._tier.known(keys)
        found = [knowledge == Knowledge.PRESENT for knowledge in known]
        unknown = [index for index, knowledge in enumerate(known) if knowledge == Knowledge.UNKNOWN]
        if len(found) != len(keys):
            raise TierError(f"known() answered {len(found)} of {len(keys)} keys")
        if unknown:
            answers = await self._tier.contains([keys[index] for index in unknown])
            if len(answers) != len(unknown):
                raise TierError(f"contains() answered {len(answers)} of {len(unknown)} keys")
            for index, there in zip(unknown, answers, strict=True):
                found[index] = bool(there)
        return found

    async def _get(self, batch: Batch) -> Outcome:
        outcome = self._complete(await self._tier.get(batch), len(batch))
        if self._tier.verifies:
            return outcome
        verdicts = await self._in_thread(_check_all, batch, outcome.statuses, self._digest)
        bad = [(key, verdict) for key, verdict in zip(batch.keys, verdicts, strict=True) if verdict]
        if not bad:
            return outcome
        statuses = [
            Status.CORRUPT if verdict else status
            for status, verdict in zip(outcome.statuses, verdicts, strict=True)
        ]
        counts = dict(outcome.reasons)
        for key, verdict in bad:
            reason = verdict.name.lower()
            counts[reason] = counts.get(reason, 0) + 1
            logger.error("tier %s: chunk %s is not what was put: %s", self.name, key.hex(), reason)
        await self._discard([key for key, _ in bad])
        return Outcome(statuses, counts)

    def _complete(self, outcome: Outcome, count: int) -> Outcome:
        """Check what the tier returned: the core relies on it, in the engine's thread."""
        statuses = tuple(outcome.statuses)
        if len(statuses) != count:
            raise TierError(f"the outcome has {len(statuses)} statuses for {count} chunks")
        failed = sum(status not in (Status.OK, Status.ABSENT) for status in statuses)
        return Outcome(statuses, reasons.bounded(outcome.reasons, self._reasons, failed))

    async def _discard(self, keys: Sequence[OffloadKey]) -> None:
        """Forget chunks that are no good; where that fails they will be found no good again."""
        try:
            await self._tier.discard(keys)
        except Exception as error:
            logger.warning("tier %s: discard of %d chunks failed: %s", self.name, len(keys), _words(error))

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._threads)

    def _require_usable(self, era: anyio.Event) -> None:
        if self._down is not None:
            raise _NotBegunError("down")
        if era is not self.era:
            raise _NotBegunError("reset")

    def _failure(self, verb: str, keys: Sequence[OffloadKey], error: BaseException) -> Outcome:
        _require_fault(error)
        if isinstance(error, _NotBegunError):
            return Outcome.all(Status.FAILED, len(keys), str(error))
        logger.warning("tier %s: %s of %d chunks failed: %s", self.name, verb, len(keys), _words(error))
        return Outcome.all(Status.FAILED, len(keys), reasons.word_for(error))

    async def watch_usage(self) -> None:
        """Look now and then how full the tier is."""
        await self._first_era.wait()
        try:
            while self._is_open:
                self.activity.usage = self._tier.usage()
                await anyio.sleep(_LOOK_EVERY_S)
        except BaseException as error:
            _require_fault(error)
            logger.warning("tier %s: it is not known how full it is: %s", self.name, _words(error))

    def _note_removed(self, keys: Sequence[OffloadKey]) -> None:
        """Take in which chunks have left the tier. Any thread; many calls make one event."""
        self._removed.extend(keys)
        if self._removed and not self._is_removing and self._loop is not None:
            self._is_removing = True
            _call_soon(self._loop, self._post_removed)

    def _post_removed(self) -> None:
        self._is_removing = False
        removed = self._removed
        keys = [removed.popleft() for _ in range(len(removed))]
        if keys:
            self._post(Removed(self.index, keys))

    def _fail(self, reason: str) -> None:
        self._down = reason
        logger.error("tier %s is not used any more: %s", self.name, reason)
        self._post(TierDown(self.index, reason))


class _Timing:
    """Measures how long a tier took, however that ended. A context manager."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.perf_counter() - self._started


class _NotBegunError(Exception):
    """A command was not begun; the text is the reason that is counted."""


def _require_fault(error: BaseException) -> None:
    """Raise ``error`` unless it is a tier's fault; a cancellation that nobody asked for is one."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
    elif not isinstance(error, Exception | SystemExit):
        raise error


def _seal_all(batch: Batch, digest: bytes) -> None:
    for index, (key, view) in enumerate(zip(batch.keys, batch.views, strict=True)):
        batch.trailers[index] = seal(key, view, digest)


def _check_all(batch: Batch, statuses: Sequence[Status], digest: bytes) -> list[Verdict]:
    return [
        check(trailer, key, view, digest) if status == Status.OK else Verdict.GOOD
        for key, view, trailer, status in zip(batch.keys, batch.views, batch.trailers, statuses, strict=True)
    ]


def _words(error: BaseException) -> str:
    """Say an error in words: kvtier's own need no class name in front."""
    return str(error) if isinstance(error, KVTierError) else f"{type(error).__name__}: {error}"


class ExecutorThread:
    """An executor on an event loop in a thread of its own, for an owner that can not wait.

    The owner submits and takes from one thread. Commands go over in a deque with one wake-up for all
    that are submitted before the loop runs; events come back in another deque. No lock is held.

    Whatever becomes of the thread, a command that it does not take any more is answered all the same.

    Args:
        make: makes the executor, given the function that it posts events with. Called in the thread.

    Attributes:
        events: what has happened, to be taken from the left.
        activity: what each tier is doing, in the core's order; empty before the start.
    """

    def __init__(self, make: Callable[[Post], Executor]) -> None:
        self.events: deque[Event] = deque()
        self.activity: Sequence[TierActivity] = ()
        self._make = make
        self._inbox: deque[Sequence[Command]] = deque()
        self._woken = False
        self._closing = False
        self._ended = False
        self._drain_s = 0.0
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

    def close(self, drain_s: float) -> bool:
        """Let what runs end, for at most ``drain_s`` seconds, close the tiers, end the thread.

        Returns:
            Whether all has ended. Where it is false a tier hangs and may still touch slots: the
            memory must stay where it is.
        """
        if not self._thread.is_alive():
            return True
        self._drain_s = drain_s
        self._closing = True
        self._wake()
        self._thread.join(drain_s + _CLOSE_GRACE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:
            self._error = error
            logger.exception("the executor has ended: the tiers are not used any more")
        finally:
            self._ended = True
            self._refuse_inbox()
            self._started.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        wakeup = asyncio.Event()
        wakeup.set()  # for what was submitted before
        self._wake = lambda: _call_soon(loop, wakeup.set)
        async with self._make(self.events.append) as executor:
            self.activity = executor.activity
            self._started.set()
            while not self._closing or self._inbox:
                await wakeup.wait()
                wakeup.clear()
                self._woken = False
                while self._inbox:
                    executor.submit(self._inbox.popleft())
            with anyio.move_on_after(self._drain_s):
                await executor.drained()

    def _refuse_inbox(self) -> None:
        """Answer what nobody takes any more. The two threads may both do this: a command is popped once."""
        while True:
            try:
                commands = self._inbox.popleft()
            except IndexError:
                return
            for command in commands:
                self.events.append(TierDown(command.tier, "the executor has ended"))
                if isinstance(command, Put):
                    kept = (False,) * len(command.keys)
                    self.events.append(PutEnded(command.id, kept, {"down": len(kept)}))
                elif isinstance(command, Fetch):
                    answers = (Answer.MISSING,) * len(command.keys)
                    self.events.append(Fetched(command.id, answers, {"down": len(answers)}))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        logger.debug("the executor's loop is closed: nobody is to be woken")
