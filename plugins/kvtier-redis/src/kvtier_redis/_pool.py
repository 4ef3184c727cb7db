"""Connections used by worker threads. Cancelling a call cuts its connection, which ends the thread's wait."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio
import redis

from kvtier.tiers import wait_for_end
from kvtier_redis._protocol import RespSocket

T = TypeVar("T")


class WorkerThreads:
    """The worker threads of a tier, as many as calls run. The event loop's limit may be reached by others."""

    def __init__(self) -> None:
        self._no_limit = anyio.CapacityLimiter(math.inf)
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a blocking call. Cancelling the future does not stop the thread."""
        thread = anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._no_limit)
        task: asyncio.Task[T] = asyncio.ensure_future(thread)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return asyncio.shield(task)

    async def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for calls that nobody awaits any more."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)


class Connections:
    """At most ``size`` connections to one server. redis-py's pool keeps them, and replaces closed ones.

    Args:
        pool: makes the connections; their sockets are used directly.
        threads: where blocking calls run.
    """

    def __init__(self, pool: redis.ConnectionPool, size: int, threads: WorkerThreads) -> None:
        self.size = size
        self.pool = pool
        self.is_closed = False
        self._threads = threads
        self._free = anyio.Semaphore(size)

    async def run(self, call: Callable[[RespSocket], T]) -> T:
        """Wait for a free connection, and run ``call`` with its socket in a thread.

        When this is cancelled the socket is shut down and the end of the call is awaited: afterwards nothing
        touches a slot. A thread that is still connecting is left to itself.

        Raises:
            OSError, redis.RedisError: the server could not be reached, or the connection broke.
        """
        async with self._free:
            job = _Job(self, call)
            running = self._threads.start(job.run)
            ended = asyncio.get_running_loop().create_future()

            def end(_: asyncio.Future[T]) -> None:
                if not running.cancelled():
                    running.exception()  # looked at, should nobody wait for it any more
                if not ended.done():
                    ended.set_result(None)

            running.add_done_callback(end)
            cancelled = await wait_for_end(ended, lambda: job.cut() or ended.cancel())
            if cancelled is not None:
                raise cancelled
            return running.result()

    def close(self) -> None:
        """Close idle connections now, and each of the others when its call has ended."""
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
        """Connect if need be, and make the call."""
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
        """Have the call fail soon; return whether it has begun. One that has not will not begin."""
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
