"""The file tier's own threads: a disk that hangs takes these and no others.

They are daemons, so that a hung disk does not keep the process from ending. The interpreter waits at its end
for the threads of a ``ThreadPoolExecutor`` and of anyio.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from kvtier._log import GuardedLogger
from kvtier.errors import StateError
from kvtier.tiers._drain import until_done

T = TypeVar("T")
_log = GuardedLogger("kvtier.tiers.fs")


class Workers:
    """Threads that do one kind of work, in the order in which it comes."""

    def __init__(self, name: str, threads: int) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # a limit on threads: those that run end again
            self.close()
            raise

    def submit(self, job: Callable[[], object]) -> None:
        """Submit a function. What it raises is logged."""
        self._queue.put(job)

    def call(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Submit a function from the event loop, for its result. StateError where the threads are closed."""
        if self._is_closed:
            raise StateError("the file tier is closed")
        result: Future[T] = Future()
        self.submit(partial(_complete, result, job))
        return asyncio.wrap_future(result)

    def close(self) -> None:
        """Let the threads end when all that was submitted is done. In the event loop. Returns at once."""
        self._is_closed = True
        for _ in self._threads:
            self._queue.put(None)

    def join(self) -> None:
        """Wait for the threads' end. Blocks."""
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception:  # the jobs behind it would wait for ever, and puts with them
                _log.exception("a job of the file tier failed")
            del job  # what it holds is given back before the next one is waited for


async def run(workers: Workers, job: Callable[[], T]) -> T:
    """Run one function in a worker thread to its true end, then raise a cancellation that came meanwhile."""
    return await until_done(workers.call(job))


def _complete(result: Future[T], job: Callable[[], T]) -> None:
    try:
        result.set_result(job())
    except BaseException as error:  # shown to the waiter: nothing may be lost in a thread
        result.set_exception(error)
