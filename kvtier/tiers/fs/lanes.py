"""Threads of the file tier's own, and work that runs in them to its true end.

The tier shares no pool with anyone: a disk that hangs takes these threads and no others. They are
daemons, so that a hung disk does not keep a process from ending either.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

import anyio

from kvtier.tiers.fs.call import FileCall, FileWork, StopFlag, Verb

MIN_JOB_BYTES: Final = 256 * 1024
"""Jobs are at least this long: below, their way through the interpreter costs more than the I/O."""

MAX_JOB_BYTES: Final = 32 * 1024 * 1024
"""Jobs are at most this long, so that one that is cancelled ends soon."""

_log = logging.getLogger("kvtier.tiers.fs")
T = TypeVar("T")


class Lane:
    """Threads that do one kind of work, in the order in which it comes.

    Args:
        name: what the threads are called.
        threads: how many.
        pool: threads of the helper's that do the work of these, or 0. See ``FileWork.open_pool``.
    """

    def __init__(self, name: str, threads: int, pool: int = 0) -> None:
        self.threads = threads
        self.pool = pool
        self.jobs = 0  # handed in and not known to have ended; the event loop alone writes it
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._workers = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Hand in a job. It must not raise."""
        self._queue.put(job)

    def close(self) -> None:
        """Let the threads end when all that was handed in is done. Returns at once."""
        for _ in self._workers:
            self._queue.put(None)

    def join(self) -> None:
        """Wait for the threads' end. Blocks."""
        for worker in self._workers:
            worker.join()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # what it holds is given back before the next one is waited for


class Run(Generic[T]):
    """Work under way in a lane: one or more jobs, each a call of one function. Made in the loop."""

    def __init__(self, lane: Lane, jobs: Sequence[Callable[[], T]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lane = lane
        self._results: dict[int, T] = {}
        self._count = self._left = len(jobs)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        lane.jobs += len(jobs)
        for number, job in enumerate(jobs):
            lane.submit(partial(self._do, number, job))

    async def end(self, stop: StopFlag | None = None) -> asyncio.CancelledError | None:
        """Wait until no job runs any more, whatever happens.

        Returns:
            The cancellation that came meanwhile, to be raised when the caller has tidied up; it has
            set ``stop``. None where there was none.
        """
        return await until_done(self._ended, stop)

    def results(self) -> list[T]:
        """Return what the jobs returned, in their order; raise what one of them raised. After ``end``."""
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(self._count)]

    def _do(self, number: int, job: Callable[[], T]) -> None:
        try:
            self._results[number] = job()
        except BaseException as error:  # shown to the waiter: nothing may be lost in a thread
            self._error = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            tell(self._loop, self._finish)

    def _finish(self) -> None:
        self._lane.jobs -= self._count
        if not self._ended.done():
            self._ended.set_result(None)


class Begun:
    """Work that the helper's pool does, from ``Bell.begin`` to its end.

    Attributes:
        call: what is done; its memory stays until the pool has done with it.
        total: what the work has returned; None until it has ended.
    """

    def __init__(self, call: FileCall) -> None:
        self.call = call
        self.total: int | None = None
        self._waiters: list[asyncio.Future[None]] = []

    async def end(self) -> asyncio.CancelledError | None:
        """Wait for its end, whatever happens. Returns the cancellation that came meanwhile; it stops it."""
        try:
            await self._wait()
            return None
        except asyncio.CancelledError as cancelled:
            self.call.stop.set()
            # The scope keeps anyio from cancelling again and again, the loop bears Task.cancel().
            with anyio.CancelScope(shield=True):
                while self.total is None:
                    with suppress(asyncio.CancelledError):
                        await self._wait()
            return cancelled

    def tell(self, total: int) -> None:
        """Say that it has ended. Who waits goes on at the loop's next turn: a turn more costs a lock."""
        self.total = total
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self) -> None:
        if self.total is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter


class Bell:
    """Begins work in the helper's pool, and learns of its end in the event loop, without a thread.

    Each thread of Python's on the way costs a turn for the interpreter lock, and beside an engine that
    computes a turn takes up to a switch interval.

    Args:
        work: what does the work.
        pool: what ``work.open_pool`` gave, not 0.

    Raises:
        NotImplementedError: the event loop cannot watch a descriptor.
    """

    def __init__(self, work: FileWork, pool: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._pool = pool
        self._tokens = count(1)
        self._begun: dict[int, Begun] = {}
        self._loop.add_reader(work.pool_fd(pool), self._ring)

    def begin(self, call: FileCall, verb: Verb) -> Begun | None:
        """Begin a put or a get of all chunks. None: it cannot be begun here."""
        token, begun = next(self._tokens), Begun(call)
        self._begun[token] = begun
        if self._work.begin(call, verb, token):
            return begun
        del self._begun[token]
        return None

    async def silence(self) -> asyncio.CancelledError | None:
        """Wait for the end of all that was begun, and listen no more. Returns a cancellation meanwhile."""
        cancelled = None
        for begun in tuple(self._begun.values()):
            cancelled = await begun.end() or cancelled
        self._loop.remove_reader(self._work.pool_fd(self._pool))
        return cancelled

    def _ring(self) -> None:
        for token, total in self._work.ended(self._pool):
            self._begun.pop(token).tell(total)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Let the loop call ``callback``, from any thread."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop was closed over our head: nobody waits any more
        _log.warning("file work ended after its event loop was closed")


async def until_done(
    future: asyncio.Future[Any], stop: StopFlag | None = None
) -> asyncio.CancelledError | None:
    """Wait until ``future`` is done, whatever happens. Returns the cancellation that came meanwhile."""
    try:
        await asyncio.wait((future,))
        return None
    except asyncio.CancelledError as cancelled:
        if stop is not None:
            stop.set()
        # The scope keeps anyio from cancelling again and again, the loop bears Task.cancel().
        with anyio.CancelScope(shield=True):
            while not future.done():
                try:
                    await asyncio.wait((future,))
                except asyncio.CancelledError:
                    continue
        return cancelled


async def run_alone(lane: Lane, job: Callable[[], T]) -> tuple[T, asyncio.CancelledError | None]:
    """Run one function in a lane to its end. Returns its result and the cancellation to be raised.

    Raises:
        What the function raised, or the cancellation where it raised too.
    """
    run = Run[T](lane, (job,))
    cancelled = await run.end()
    try:
        (result,) = run.results()
    except Exception as error:
        if cancelled is not None:
            raise cancelled from error
        raise
    return result, cancelled


def split(chunks: int, chunk_bytes: int, idle_threads: int) -> list[tuple[int, int]]:
    """Cut so many chunks into runs for jobs: one for each idle thread, within bounds.

    Args:
        chunks: how many.
        chunk_bytes: bytes of one.
        idle_threads: threads that have nothing to do. Where there are none, jobs queue anyway, and
            few long ones cost the interpreter less than many short ones.
    """
    each = -(-chunks // max(1, idle_threads))
    each = max(each, MIN_JOB_BYTES // chunk_bytes)
    each = max(1, min(each, MAX_JOB_BYTES // chunk_bytes))
    return [(first, min(first + each, chunks)) for first in range(0, chunks, each)]


def join_all(lanes: Sequence[Lane]) -> None:
    """Close lanes and wait for their threads. Blocks."""
    for lane in lanes:
        lane.close()
    for lane in lanes:
        lane.join()


__all__ = [
    "MAX_JOB_BYTES",
    "MIN_JOB_BYTES",
    "Begun",
    "Bell",
    "Lane",
    "Run",
    "join_all",
    "run_alone",
    "split",
    "tell",
    "until_done",
]
