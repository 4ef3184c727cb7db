"""Connections used by worker threads.

Cancelling a call shuts down its connection, which ends the thread's wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

import anyio

from kvtier.tiers import wait_for_end
from kvtier_redis._client import Pool
from kvtier_redis._protocol import RespSocket

T = TypeVar("T")
_Jobs: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class WorkerThreads:
    """The worker threads of a tier. There are as many as calls have run at once.

    Since Python 3.12 a ``ThreadPoolExecutor`` loses count of its idle threads and starts others, up to its
    bound.
    """

    def __init__(self) -> None:
        self._idle: deque[_Jobs] = deque()
        self._running: set[Future[Any]] = set()
        self._is_closed = False

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a blocking call. Cancelling the future does not stop the thread.

        Raises:
            RuntimeError: after ``close``, or if the system has no more threads.
        """
        if self._is_closed:
            raise RuntimeError("the worker threads of this tier have ended")
        jobs = self._idle.pop() if self._idle else self._new_thread()
        future: Future[T] = Future()
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        jobs.put((future, call))
        return asyncio.wrap_future(future)

    async def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for abandoned calls, and end the idle threads."""
        self._is_closed = True
        self._end_idle()
        running = [asyncio.wrap_future(future) for future in self._running.copy()]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), timeout_s)

    def _new_thread(self) -> _Jobs:
        jobs: _Jobs = SimpleQueue()
        threading.Thread(target=self._work, args=(jobs,), name="kvtier-redis", daemon=True).start()
        return jobs

    def _end_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().put(None)

    def _work(self, jobs: _Jobs) -> None:
        while (job := jobs.get()) is not None:
            self._run(jobs, *job)
            del job  # its result may be large
            if self._is_closed:
                self._end_idle()

    def _run(self, jobs: _Jobs, future: Future[Any], call: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            self._idle.append(jobs)
            return
        try:
            result = call()
        except BaseException as error:
            self._idle.append(jobs)  # Before the result is set: its receiver may want a thread again.
            future.set_exception(error)
            del future  # The error refers to this frame, so together they would form a cycle.
        else:
            self._idle.append(jobs)
            future.set_result(result)


class Connections:
    """Uses at most ``size`` connections at once. redis-py's pool keeps them and replaces closed ones.

    Args:
        pool: makes the connections, also for other users; their sockets are used directly.
        threads: threads for the blocking calls.
    """

    def __init__(self, pool: Pool, size: int, threads: WorkerThreads) -> None:
        self.size = size
        self.pool = pool
        self.is_closed = False
        self._threads = threads
        self._free = anyio.Semaphore(size)

    async def run(self, call: Callable[[RespSocket], T]) -> T:
        """Wait for a free connection, and run ``call`` with its socket in a thread.

        A cancellation shuts the socket down and waits for the end of the call. Afterwards nothing touches a
        slot. A thread that is still connecting is abandoned.

        Raises:
            OSError, redis.RedisError: the server could not be reached, or the connection broke.
        """
        async with self._free:
            job = _Job(self, call)
            running = self._threads.start(job.run)
            ended = asyncio.get_running_loop().create_future()

            def end(_: asyncio.Future[T]) -> None:
                if not running.cancelled():
                    running.exception()  # Marks the exception as retrieved, because the caller may be gone.
                if not ended.done():
                    ended.set_result(None)

            running.add_done_callback(end)
            cancelled = await wait_for_end(ended, lambda: job.cut() or ended.cancel())
            if cancelled is not None:
                raise cancelled
            return running.result()

    def close(self) -> None:
        """Close idle connections now, and each other connection when its call has ended."""
        self.is_closed = True
        self.pool.disconnect(inuse_connections=False)


class _Job(Generic[T]):
    """One call on a connection."""

    def __init__(self, connections: Connections, call: Callable[[RespSocket], T]) -> None:
        self._connections = connections
        self._call = call
        self._lock = threading.Lock()
        self._socket: RespSocket | None = None
        self._is_cut = False

    def run(self) -> T:
        """Connect if necessary, and make the call."""
        connection: Any = self._connections.pool.get_connection()
        is_reusable = False
        try:
            sock = self._begin(connection)
            result = self._call(sock)
            is_reusable = not (sock.has_unread or self._is_cut or self._connections.is_closed)
            return result
        finally:
            if not is_reusable:
                connection.disconnect()
            self._connections.pool.release(connection)

    def cut(self) -> bool:
        """Make the call fail soon; return whether it has started. If not, it never will."""
        with self._lock:
            self._is_cut = True
            if self._socket is not None:
                self._socket.cut()
            return self._socket is not None

    def _begin(self, connection: Any) -> RespSocket:
        with self._lock:
            if self._is_cut:
                raise ConnectionAbortedError("the call was cancelled while connecting")
            self._socket = RespSocket(connection.sock)
            return self._socket
