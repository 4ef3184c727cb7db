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
import anyio.lowlevel
import anyio.to_thread

from kvtier.core.messages import Answer, Command, Event, Fetch, Fetched, Put, PutEnded, Reset, TierDown
from kvtier.errors import KVTierError, TierError
from kvtier.identity import Identity
from kvtier.keys import OffloadKey
from kvtier.tiers.base import Batch, Knowledge, Outcome, SecondaryTier, SlotMemory, Status, TierContext
from kvtier.tiers.seal import Verdict, check, seal

logger = logging.getLogger("kvtier.executor")

Post = Callable[[Event], None]
T = TypeVar("T")

_SEAL_THREADS = 4
_CLOSE_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class NamedTier:
    """A tier and the name that logs and metrics give it."""

    name: str
    tier: SecondaryTier[Any]


class Executor:
    """The tiers at work on one event loop. Used as an async context manager.

    Args:
        tiers: the tiers, in the core's order. They are opened, and closed, by the executor.
        identity: the cache that all chunks belong to.
        memory: where the slots are.
        post: called on the loop with each event.
        close_s: seconds that a tier has to close.
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
        self._post = post
        self._close_s = close_s
        self._progress = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Executor:
        self._tasks = await anyio.create_task_group().__aenter__()
        for runner in self._runners:
            self._tasks.start_soon(runner.open)
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
                runner.running += 1
                self._tasks.start_soon(runner.fetch, command, runner.era)
            elif isinstance(command, Put):
                runner.running += 1
                self._tasks.start_soon(runner.put, command, runner.era)
            else:
                previous, runner.era = runner.era, anyio.Event()
                self._tasks.start_soon(runner.reset, command, previous, runner.era)

    async def settled(self) -> None:
        """Wait until every tier is open, and through with the resets submitted so far, or given up."""
        for runner in self._runners:
            await runner.era.wait()

    async def drained(self) -> None:
        """Wait until no put, no fetch and no reset is under way."""
        while any(runner.running for runner in self._runners):
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
        running: puts and fetches that were submitted and have not ended.
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
        self.running = 0
        self.era = anyio.Event()
        self._tier = named.tier
        self._memory = memory
        self._post = post
        self._threads = threads
        self._context = TierContext(named.name, identity, memory.chunk_bytes)
        self._digest = identity.short_digest
        width = named.tier.config.max_concurrency
        self._gets = anyio.Semaphore(width)
        self._puts = anyio.Semaphore(max(1, width // 2))
        self._first_era = self.era
        self._down: str | None = None
        self._is_open = False

    async def open(self) -> None:
        """Open the tier; where it cannot be opened the engine goes on without it, and it is said so."""
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

    async def resets_ended(self) -> None:
        """Wait for the resets submitted so far, but not for the opening where there was none."""
        if self.era is not self._first_era:
            await self.era.wait()

    async def put(self, command: Put, era: anyio.Event) -> None:
        started = time.perf_counter()
        outcome = Outcome.all(Status.FAILED, len(command.keys), "cancelled")
        try:
            await era.wait()
            async with self._puts:
                started = time.perf_counter()
                outcome = await self._put(command, era)
        except BaseException as error:
            outcome = self._failure("put", command.keys, error)
        finally:
            self.running -= 1
            kept = [status == Status.OK for status in outcome.statuses]
            self._post(PutEnded(command.id, kept, outcome.reasons, time.perf_counter() - started))

    async def fetch(self, command: Fetch, era: anyio.Event) -> None:
        started = time.perf_counter()
        answers: Sequence[Answer] = (Answer.MISSING,) * len(command.keys)
        outcome = Outcome((), {"cancelled": len(command.keys)})
        try:
            await era.wait()
            async with self._gets:
                started = time.perf_counter()
                answers, outcome = await self._fetch(command, era)
        except BaseException as error:
            outcome = self._failure("get", command.keys, error)
        finally:
            self.running -= 1
            self._post(Fetched(command.id, answers, outcome.reasons, time.perf_counter() - started))

    async def _put(self, command: Put, era: anyio.Event) -> Outcome:
        self._require_usable(era)
        batch = Batch(command.keys, command.slots, self._memory)
        if not self._tier.verifies:
            await self._in_thread(_seal_all, batch, self._digest)
            self._require_usable(era)  # the tier would take what comes now for a put of the new era
        return _complete(await self._tier.put(batch), len(batch))

    async def _fetch(self, command: Fetch, era: anyio.Event) -> tuple[list[Answer], Outcome]:
        self._require_usable(era)
        count = len(command.keys)
        found = [True] * count if command.located else await self._find(command.keys)
        answers = [Answer.LOCATED if there else Answer.MISSING for there in found]
        run = min(found.index(False) if False in found else count, len(command.slots))
        if not run:
            return answers, Outcome(())
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
        outcome = _complete(await self._tier.get(batch), len(batch))
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
        reasons = dict(outcome.reasons)
        for key, verdict in bad:
            reason = verdict.name.lower()
            reasons[reason] = reasons.get(reason, 0) + 1
            logger.error("tier %s: chunk %s is not what was put: %s", self.name, key.hex(), reason)
        await self._discard([key for key, _ in bad])
        return Outcome(statuses, reasons)

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
        return Outcome.all(Status.FAILED, len(keys), type(error).__name__)

    def _fail(self, reason: str) -> None:
        self._down = reason
        logger.error("tier %s is not used any more: %s", self.name, reason)
        self._post(TierDown(self.index, reason))


class _NotBegunError(Exception):
    """A command was not begun; the text is the reason that is counted."""


async def until_done(future: asyncio.Future[T]) -> T:
    """Wait for the end of what cannot be stopped, however often the task is cancelled meanwhile.

    A shielded scope alone is not enough: it does not hold off ``Task.cancel``, which is what
    ``asyncio.timeout`` does.

    Raises:
        What the future has raised, or the cancellation that came meanwhile.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError as error:
                cancelled = error
    if not future.cancelled():
        future.exception()  # looked at, or asyncio complains where the cancellation is raised instead
    if cancelled is not None:
        raise cancelled
    await anyio.lowlevel.checkpoint_if_cancelled()
    return future.result()


def _require_fault(error: BaseException) -> None:
    """Raise ``error`` unless it is a tier's fault; a cancellation that nobody asked for is one."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
    elif not isinstance(error, Exception | SystemExit):
        raise error


def _complete(outcome: Outcome, count: int) -> Outcome:
    """Check what a tier returned: the core relies on it, in the engine's thread."""
    if len(outcome.statuses) != count:
        raise TierError(f"the outcome has {len(outcome.statuses)} statuses for {count} chunks")
    # Counters take no negative numbers, and would say so where the engine reports its metrics.
    reasons = {str(name): max(0, int(n)) for name, n in outcome.reasons.items()}
    return Outcome(tuple(outcome.statuses), reasons)


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
    """

    def __init__(self, make: Callable[[Post], Executor]) -> None:
        self.events: deque[Event] = deque()
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
