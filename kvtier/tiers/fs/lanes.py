"""Threads of the file tier's own, and work that runs in them to its true end.

The tier shares no pool with anyone: a disk that hangs takes these threads and no others. They are
daemons, so that a hung disk does not keep a process from ending either.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

import anyio

from kvtier.tiers.fs.call import StopFlag

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
    "Lane",
    "Run",
    "join_all",
    "run_alone",
    "split",
    "tell",
    "until_done",
]
