"""Threads of the file tier's own, and jobs that run in them to their true end.

The tier shares no threads with anyone: a disk that hangs takes these threads and no others. They are
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

from kvtier.tiers.fs.files.base import ChunkFiles
from kvtier.tiers.fs.files.call import FileCall, StopFlag, Verb
from kvtier.tiers.fs.files.index import Index

MIN_JOB_BYTES: Final = 256 * 1024
"""Jobs are at least this long: below, their way through the interpreter costs more than the I/O."""

MAX_JOB_BYTES: Final = 32 * 1024 * 1024
"""Jobs are at most this long, so that one that is cancelled ends soon."""

_log = logging.getLogger("kvtier.tiers.fs")
T = TypeVar("T")


class Workers:
    """Threads that do one kind of work, in the order in which it comes.

    Args:
        name: prefix of the threads' names.
        threads: how many.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.threads = threads
        self.jobs = 0  # submitted and not known to have ended; the event loop alone writes it
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Submit a job. It must not raise."""
        self._queue.put(job)

    def close(self) -> None:
        """Let the threads end when all that was submitted is done. Returns at once."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        """Wait for the threads' end. Blocks."""
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # what it holds is given back before the next one is waited for


class Jobs(Generic[T]):
    """Functions that are called in worker threads, and awaited together. Made in the event loop.

    Args:
        workers: the threads.
        jobs: the functions.
        stop: set when the waiter is cancelled.
    """

    def __init__(
        self, workers: Workers, jobs: Sequence[Callable[[], T]], stop: StopFlag | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = workers
        self._stop = stop
        self._results: dict[int, T] = {}
        self._count = self._left = len(jobs)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        workers.jobs += len(jobs)
        for number, job in enumerate(jobs):
            workers.submit(partial(self._do, number, job))

    async def end(self) -> asyncio.CancelledError | None:
        """Wait until no job runs any more, whatever happens.

        Returns:
            The cancellation that came meanwhile, to be raised when the caller has tidied up; it has
            set ``stop``. None where there was none.
        """
        return await until_done(self._ended, self._stop)

    def results(self) -> list[T]:
        """Return what the jobs returned, in their order; raise what one of them raised. After ``end``."""
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(self._count)]

    @property
    def added(self) -> int:
        """The sum of what the jobs returned. Raises what one of them raised. After ``end``."""
        return sum(result for result in self.results() if isinstance(result, int))

    def _do(self, number: int, job: Callable[[], T]) -> None:
        try:
            self._results[number] = job()
        except BaseException as error:  # shown to the waiter: nothing may be lost in a thread
            self._error = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            post(self._loop, self._finish)

    def _finish(self) -> None:
        self._workers.jobs -= self._count
        if not self._ended.done():
            self._ended.set_result(None)


class ThreadPool:
    """``TransferPool`` of Python's threads: for files without the native helper.

    Args:
        files: what puts and gets.
        name: prefix of the threads' names.
        readers: threads for gets.
        writers: threads for puts.
    """

    def __init__(self, files: ChunkFiles, name: str, readers: int, writers: int) -> None:
        self._files = files
        self._readers = Workers(f"{name}-read", readers)
        self._writers = Workers(f"{name}-write", writers)

    def begin(self, call: FileCall, verb: Verb, end: int, index: Index) -> Jobs[int | None]:
        """See ``TransferPool.begin``: the chunks are cut into one job for each idle thread."""
        del index
        workers = self._writers if verb is Verb.PUT else self._readers
        work = self._files.put if verb is Verb.PUT else self._files.get
        parts = split(end, call.place.chunk_bytes, workers.threads - workers.jobs)
        return Jobs[int | None](workers, [partial(work, call, *part) for part in parts], call.stop)

    async def drain(self) -> asyncio.CancelledError | None:
        """See ``TransferPool.drain``: ``close`` waits for all that was begun."""
        return None

    def close(self) -> None:
        """See ``TransferPool.close``."""
        join_all((self._readers, self._writers))


def post(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Have the loop call ``callback``, from any thread."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop was closed before: nobody waits any more
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


async def run_alone(workers: Workers, job: Callable[[], T]) -> tuple[T, asyncio.CancelledError | None]:
    """Run one function in a worker thread to its end. Returns its result and the cancellation to be raised.

    Raises:
        What the function raised, or the cancellation where it raised too.
    """
    jobs = Jobs[T](workers, (job,))
    cancelled = await jobs.end()
    try:
        (result,) = jobs.results()
    except Exception as error:
        if cancelled is not None:
            raise cancelled from error
        raise
    return result, cancelled


async def run(workers: Workers, job: Callable[[], T]) -> T:
    """Run one function in a worker thread to its end, then raise a cancellation that came meanwhile."""
    result, cancelled = await run_alone(workers, job)
    if cancelled is not None:
        raise cancelled
    return result


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


def join_all(groups: Sequence[Workers]) -> None:
    """Close groups of workers and wait for their threads. Blocks."""
    for workers in groups:
        workers.close()
    for workers in groups:
        workers.join()
