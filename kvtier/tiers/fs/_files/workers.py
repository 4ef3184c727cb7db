"""The file tier's own threads: a hung disk blocks no others.

They are daemons, because the interpreter waits at its exit for the threads of a ``ThreadPoolExecutor`` and of
anyio: a hung disk would keep the process alive.
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
from kvtier.tiers._waiting import until_done

T = TypeVar("T")
_log = GuardedLogger("kvtier.tiers.fs")


class Workers:
    """Threads that run submitted functions in order."""

    def __init__(self, name: str, threads: int) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # a limit on threads: end those that started
            self.close()
            raise

    def submit(self, job: Callable[[], object]) -> None:
        """Submit a function. Its exceptions are logged."""
        self._queue.put(job)

    def call(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Submit a function from the event loop; return its result's future. StateError after ``close``."""
        if self._is_closed:
            raise StateError("the file tier is closed")
        result: Future[T] = Future()
        self.submit(partial(_complete, result, job))
        return asyncio.wrap_future(result)

    def close(self) -> None:
        """Let the threads end after all submitted functions. In the event loop. Returns at once."""
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
            except Exception:  # Otherwise later jobs would never run, although puts wait for them.
                _log.exception("a job of the file tier failed")
            del job  # Release the job's memory before waiting for the next one.


async def run(workers: Workers, job: Callable[[], T]) -> T:
    """Run a function in a worker thread to its real end; then raise any cancellation."""
    return await until_done(workers.call(job))


def _complete(result: Future[T], job: Callable[[], T]) -> None:
    try:
        result.set_result(job())
    except BaseException as error:  # passed to the waiter
        result.set_exception(error)
