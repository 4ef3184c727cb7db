"""An event loop in its own thread. It serves callers in SGLang's threads, which must not wait for long."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, Generic, TypeVar

from kvtier import StateError

T = TypeVar("T")

_JOIN_S = 5.0
_CANCEL_S = 1.0
_END_S = 0.5


class LoopThread:
    """A daemon thread that runs an event loop until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvtier-sglang", daemon=True)
        self._is_closed = False
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], wait_s: float) -> T:
        """Run a coroutine on the loop and return its result.

        Raises:
            TimeoutError: it did not end within ``wait_s`` seconds, and was cancelled.
            StateError: the loop is closed.
        """
        future = self.start(work)
        try:
            return future.result(wait_s)
        except TimeoutError:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, after those submitted earlier. Does not wait.

        Raises:
            StateError: the loop is closed.
        """
        if self._is_closed:
            work.close()
            raise StateError("the storage is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @contextmanager
    def lend(self, block: AbstractAsyncContextManager[T], wait_s: float) -> Iterator[T]:
        """Enter an async context manager on the loop, and yield its value in the caller's thread.

        The async block ends when the caller's block does, and fails if that fails. Whether the caller is
        still waiting is decided atomically: a late value is never handed over.

        Raises:
            TimeoutError: it was not entered within ``wait_s`` seconds, or did not end shortly after the value
                was returned.
            StateError: the loop is closed, or closed before the block ended.
        """
        loan: _Loan[T] = _Loan(self._loop)
        end_s = time.monotonic() + wait_s
        future = self.start(loan.hold(block))
        try:
            given = loan.receive(wait_s)
        except BaseException:
            future.cancel()
            raise
        try:
            yield given
        except BaseException:
            loan.give_back(is_good=False)
            raise
        loan.give_back(is_good=True)
        try:
            future.result(max(_END_S, end_s - time.monotonic()))
        except CancelledError:
            raise StateError("the storage was closed meanwhile") from None

    def post(self, action: Callable[[], object]) -> None:
        """Schedule ``action`` on the loop; drop it if the loop is closed."""
        if not self._is_closed:
            self._loop.call_soon_threadsafe(action)

    def close(self) -> None:
        """Cancel the tasks on the loop, and stop the loop. Tasks that do not end in time are abandoned."""
        if self._is_closed:
            return
        with suppress(TimeoutError):
            self.call(_cancel_others(), _JOIN_S)
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            for task in asyncio.all_tasks(self._loop):
                _close_new(task.get_coro())
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


def _close_new(work: object) -> None:
    """Close a coroutine that never started, and its coroutine arguments, because Python warns about both."""
    if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        for argument in inspect.getcoroutinelocals(work).values():
            _close_new(argument)
        work.close()


async def _cancel_others() -> None:
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        # One turn of the loop later the task has started. Earlier it would never await its coroutine.
        for task in others:
            asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.wait(others, timeout=_CANCEL_S)


class _AbandonedError(Exception):
    """The borrower is gone or has failed, so the block must not end normally."""


class _Loan(Generic[T]):
    """The value of one async block, lent to another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._given: Future[T] = Future()
        self._returned = asyncio.Event()
        self._is_good = False

    async def hold(self, block: AbstractAsyncContextManager[T]) -> None:
        """Lend the value that the block yields, and leave the block when the value is returned."""
        try:
            async with block as value:
                if not self._given.set_running_or_notify_cancel():
                    raise _AbandonedError
                self._given.set_result(value)
                await self._returned.wait()
                if not self._is_good:
                    raise _AbandonedError
        except _AbandonedError:
            return
        except Exception as error:
            if self._given.done():
                raise
            self._given.set_exception(error)

    def receive(self, wait_s: float) -> T:
        """Return the lent value. Call this from any thread except the loop's."""
        try:
            return self._given.result(wait_s)
        except TimeoutError:
            if self._given.cancel():
                raise
            return self._given.result()  # the value arrived at the same moment

    def give_back(self, *, is_good: bool) -> None:
        """Return the loan. The value must not be used afterwards."""
        self._is_good = is_good
        with suppress(RuntimeError):  # If the loop is closed, the block was cancelled before.
            self._loop.call_soon_threadsafe(self._returned.set)
