"""Connections that threads work on, and that are cut when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from kvtier.tiers.drain import until_done
from kvtier_redis.wire import Wire

P = ParamSpec("P")
T = TypeVar("T")
MakeConnection = Callable[[], Any]


class Threads:
    """Where a tier's blocking calls run. Their number is that of its connections, which is bounded."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(math.inf)  # the loop's own may be used up by others
        self._left_behind: set[asyncio.Future[Any]] = set()

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call; what is returned is done when the thread has come back."""
        return asyncio.ensure_future(self._run(call))

    async def aside(self, call: Callable[[], T]) -> T:
        """Make a call that touches no slot: when this is cancelled its thread is left behind."""
        working = self.start(call)
        try:
            await asyncio.wait((working,))
        except asyncio.CancelledError:
            self._left_behind.add(working)
            working.add_done_callback(self._came_back)
            raise
        return working.result()

    async def join(self, patience_s: float) -> None:
        """Wait a while for threads that were left behind."""
        if self._left_behind:
            await asyncio.wait(self._left_behind, timeout=patience_s)
        for working in self._left_behind:
            working.cancel()

    async def _run(self, call: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(call, limiter=self._limiter, abandon_on_cancel=True)

    def _came_back(self, working: asyncio.Future[Any]) -> None:
        self._left_behind.discard(working)
        if not working.cancelled():
            working.exception()  # looked at, or asyncio complains: nobody waits for it


class Line:
    """One connection to a server, made when it is first used.

    Args:
        make: makes a connection of redis-py that is not connected yet; called in a thread.
        threads: where it is used.
    """

    def __init__(self, make: MakeConnection, threads: Threads) -> None:
        self._make = make
        self._connection: Any = None
        self._threads = threads
        self._wire: Wire | None = None
        self._is_cut = False

    @property
    def is_usable(self) -> bool:
        """Whether it may be used again: its last call has read all its answers."""
        return self._wire is not None and not self._is_cut

    async def run(self, function: Callable[Concatenate[Wire, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` with the wire in a thread.

        When this is cancelled the connection is cut, which ends whatever the thread waits for, and the
        thread's end is awaited: nothing touches a slot afterwards.

        Raises:
            OSError, redis.RedisError: the server could not be reached, or the connection broke.
        """
        for _ in range(2):
            wire = self._wire or await self._connected()
            call: Callable[[], T] = partial(_if_idle, wire, function, *args, **kwargs)
            try:
                return await self._finish(self._threads.start(call))
            except _HungUpError:
                self._hang_up()  # while it was idle: nothing was said yet
        raise ConnectionResetError("the server closes each connection at once")

    def close(self) -> None:
        """Hang up."""
        self._is_cut = True
        self._hang_up()

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire = None
            self._connection.disconnect()

    async def _finish(self, working: asyncio.Future[T]) -> T:
        try:
            await asyncio.wait((working,))
        except asyncio.CancelledError:
            self._cut()
            with suppress(Exception):
                await until_done(working)
            raise
        error = working.exception()
        if error is not None and not isinstance(error, _HungUpError):
            self._is_cut = True  # answers may be left unread
        return working.result()

    def _cut(self) -> None:
        self._is_cut = True
        if self._wire is not None:
            self._wire.cut()

    async def _connected(self) -> Wire:
        """Connect. No slot is at stake: a thread that hangs in it is left behind."""
        try:
            self._wire = await self._threads.aside(self._connect)
        except BaseException:
            self._is_cut = True  # before the look at the connection: the thread does both the other way round
            if self._connection is not None:
                self._connection.disconnect()
            raise
        return self._wire

    def _connect(self) -> Wire:
        connection = self._make()
        connection.connect()
        self._connection = connection
        if self._is_cut:
            connection.disconnect()
            raise ConnectionAbortedError("connected when nobody waited for it any more")
        return Wire(connection.sock)


class _HungUpError(Exception):
    """The server has closed the connection while it was idle."""


def _if_idle(wire: Wire, function: Callable[Concatenate[Wire, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    if not wire.is_idle():
        raise _HungUpError
    return function(wire, *args, **kwargs)


class Lines:
    """So many connections to one server, for one kind of work.

    Args:
        make: makes a connection that is not connected yet.
        count: how many there are at most.
        threads: where they are used.
    """

    def __init__(self, make: MakeConnection, count: int, threads: Threads) -> None:
        self.count = count
        self._make = make
        self._threads = threads
        self._turns = anyio.Semaphore(count)
        self._idle: list[Line] = []
        self._is_closed = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Line]:
        """Wait for a connection that nobody uses, and use it."""
        async with self._turns:
            line = self._idle.pop() if self._idle else Line(self._make, self._threads)
            try:
                yield line
            finally:
                if line.is_usable and not self._is_closed:
                    self._idle.append(line)
                else:
                    line.close()

    def close(self) -> None:
        """Hang up all that are idle; the others follow when they are given back."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()
