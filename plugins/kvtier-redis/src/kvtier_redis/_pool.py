"""Connections used by worker threads. Cancelling a call cuts its connection, which ends the thread's wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio

from kvtier.tiers import wait_for_end
from kvtier_redis._protocol import RespSocket

T = TypeVar("T")
MakeConnection = Callable[[], Any]

_MAX_THREADS = 4096  # never reached: the number of connections bounds the threads


class WorkerThreads:
    """The worker threads of a tier. The event loop's own may all be in use by others."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_MAX_THREADS, "kvtier-redis")
        self._running: set[Future[Any]] = set()

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a blocking call. Cancelling the future does not stop the thread."""
        future = self._executor.submit(call)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return asyncio.wrap_future(future)

    async def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for calls that nobody awaits any more, and end the idle threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        running = [asyncio.wrap_future(future) for future in self._running.copy()]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), timeout_s)


class Connection:
    """One connection to a server, connected at its first use.

    Args:
        make: returns a redis-py connection that is not connected yet; called in a thread.
        threads: where blocking calls run.
    """

    def __init__(self, make: MakeConnection, threads: WorkerThreads) -> None:
        self._make = make
        self._threads = threads
        self._connection: Any = None
        self._socket: RespSocket | None = None
        self._is_broken = False

    @property
    def is_reusable(self) -> bool:
        """Whether the connection is open and every reply was read."""
        return self._socket is not None and not self._is_broken

    async def run(self, call: Callable[[RespSocket], T]) -> T:
        """Run ``call`` with the socket in a thread.

        When this is cancelled the socket is shut down and the end of the thread is awaited: afterwards
        nothing touches a slot.

        Raises:
            OSError, redis.RedisError: the server could not be reached, or the connection broke.
        """
        for _ in range(2):
            sock = self._socket or await self._connected()

            def run_if_idle(sock: RespSocket = sock) -> T:
                if not sock.is_idle():
                    raise _StaleError
                return call(sock)

            try:
                return await self._drained(self._threads.start(run_if_idle))
            except _StaleError:
                self._disconnect()  # nothing was sent yet
        raise ConnectionResetError("the server closes each connection at once")

    def close(self) -> None:
        """Disconnect."""
        self._is_broken = True
        self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket = None
            self._connection.disconnect()

    async def _drained(self, running: asyncio.Future[T]) -> T:
        cancelled = await wait_for_end(running, self._cut)
        if cancelled is not None:
            raise cancelled
        error = running.exception()
        if error is not None and not isinstance(error, _StaleError):
            self._is_broken = True  # replies may be unread
        return running.result()

    def _cut(self) -> None:
        """Have a call in flight fail at once."""
        self._is_broken = True
        if self._socket is not None:
            self._socket.cut()

    async def _connected(self) -> RespSocket:
        """Connect. No slot is involved: when this is cancelled the thread is left to itself."""
        try:
            self._socket = await self._threads.start(self._connect)
        except BaseException:
            # Set the flag, then look at the connection: the thread does both in the opposite order.
            self._is_broken = True
            if self._connection is not None:
                self._connection.disconnect()
            raise
        return self._socket

    def _connect(self) -> RespSocket:
        connection = self._make()
        connection.connect()
        self._connection = connection
        if self._is_broken:
            connection.disconnect()
            raise ConnectionAbortedError("the call was cancelled while connecting")
        return RespSocket(connection.sock)


class _StaleError(Exception):
    """The server closed the connection while it was idle."""


class ConnectionPool:
    """At most ``size`` connections to one server.

    Args:
        make: returns a redis-py connection that is not connected yet.
        size: number of connections.
        threads: where blocking calls run.
    """

    def __init__(self, make: MakeConnection, size: int, threads: WorkerThreads) -> None:
        self.size = size
        self._make = make
        self._threads = threads
        self._free = anyio.Semaphore(size)
        self._idle: list[Connection] = []
        self._is_closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Wait for a free connection and yield it."""
        async with self._free:
            connection = self._idle.pop() if self._idle else Connection(self._make, self._threads)
            try:
                yield connection
            finally:
                if connection.is_reusable and not self._is_closed:
                    self._idle.append(connection)
                else:
                    connection.close()

    def close(self) -> None:
        """Close idle connections now, and each of the others when it is returned."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()
