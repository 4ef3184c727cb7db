"""Calls that are cancelled at a chosen moment, in every way in which a task can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import anyio

T = TypeVar("T")
Call = Callable[[], Coroutine[Any, Any, T]]

_TIMES = 3


class Way(Enum):
    """How a call is cancelled."""

    CANCEL = "Task.cancel"
    AGAIN = "Task.cancel, three times"
    SCOPE = "anyio.CancelScope"


class Stepped(Generic[T]):
    """Runs a coroutine as ``await`` does, and knows each time that it waits.

    Args:
        coroutine: what is run.
        on_wait: called with 1, 2, ... when the coroutine is about to wait for the loop.
        on_resume: called with the same number when the wait has ended; what it returns is awaited before
            the coroutine goes on.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        on_wait: Callable[[int], object] = lambda _: None,
        on_resume: Callable[[int], Awaitable[object] | None] = lambda _: None,
    ) -> None:
        self.waits = 0
        self._coroutine = coroutine
        self._on_wait = on_wait
        self._on_resume = on_resume

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[Any], Any] = self._coroutine.send
        answer: Any = None
        while True:
            try:
                future = step(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            self.waits += 1
            number = self.waits
            self._on_wait(number)
            try:
                answer, step = (yield future), self._coroutine.send
                meanwhile = self._on_resume(number)
                if meanwhile is not None:
                    yield from meanwhile.__await__()
            except BaseException as error:
                answer, step = error, self._coroutine.throw


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """How a call ended.

    Attributes:
        waits: how often it waited.
        was_cancelled: whether it was cancelled before it ended.
        raised_cancellation: whether it raised the cancellation, as it has to.
        result: what it returned, or None.
        error: what else it raised, or None.
    """

    waits: int
    was_cancelled: bool
    raised_cancellation: bool
    result: T | None = None
    error: BaseException | None = None


async def run_cancelled(
    call: Call[T],
    way: Way | None,
    *,
    at_wait: int | None = None,
    after_s: float | None = None,
    then: Callable[[], object] = lambda: None,
) -> Ended[T]:
    """Make a call in a task of its own and cancel it.

    Args:
        call: what is called.
        way: how it is cancelled; None: not at all.
        at_wait: at which of its waits, counted from 1.
        after_s: after how many seconds, in place of ``at_wait``.
        then: called the moment the call has returned or raised, before anything else runs in the loop.
    """
    cancellation = _Cancellation(call, way, at_wait, after_s, then)
    task = asyncio.ensure_future(cancellation.run())
    await asyncio.wait((task,))
    return cancellation.ended(task)


async def held(call: Call[T], at_wait: int, meanwhile: Call[object], patience_s: float) -> tuple[T, bool]:
    """Make a call, and do something else between one of its waits and what it does next.

    Args:
        call: what is called.
        at_wait: after which of its waits it is held.
        meanwhile: what is done then. If it has not ended after ``patience_s`` the call goes on all the
            same: it may have to wait for the call's end.
        patience_s: see there.

    Returns:
        What the call returned, and whether it came to that wait.
    """
    others: list[asyncio.Future[object]] = []

    def resume(number: int) -> Awaitable[object] | None:
        if number != at_wait:
            return None
        others.append(asyncio.ensure_future(meanwhile()))
        return asyncio.wait(others, timeout=patience_s)

    try:
        result = await Stepped(call(), on_resume=resume)
    finally:
        if others:
            await asyncio.wait(others)
    for other in others:
        other.result()
    return result, bool(others)


class _Cancellation(Generic[T]):
    """One call and its end."""

    def __init__(
        self,
        call: Call[T],
        way: Way | None,
        at_wait: int | None,
        after_s: float | None,
        then: Callable[[], object],
    ) -> None:
        self.fired = 0
        self._way = way
        self._at_wait = at_wait
        self._after_s = after_s
        self._then = then
        self._stepped = Stepped(call(), on_wait=self._waits)
        self._cancel: Callable[[], object] = lambda: None

    async def run(self) -> T:
        if self._way is Way.SCOPE:
            return await self._in_scope()
        task = asyncio.current_task()
        assert task is not None
        return await self._run(task.cancel)

    def ended(self, task: asyncio.Future[T]) -> Ended[T]:
        waits, fired = self._stepped.waits, self.fired > 0
        if task.cancelled():
            return Ended(waits, fired, raised_cancellation=True)
        error = task.exception()
        if error is not None:
            return Ended(waits, fired, raised_cancellation=False, error=error)
        return Ended(waits, fired, raised_cancellation=False, result=task.result())

    async def _in_scope(self) -> T:
        with anyio.CancelScope() as scope:
            return await self._run(scope.cancel)
        raise asyncio.CancelledError  # the scope has caught it, as its owner would see it

    async def _run(self, cancel: Callable[[], object]) -> T:
        self._cancel = cancel
        timer = None
        if self._way is not None and self._after_s is not None:
            timer = asyncio.get_running_loop().call_later(self._after_s, self._fire)
        try:
            return await self._stepped
        finally:
            if timer is not None:
                timer.cancel()
            self._then()

    def _waits(self, number: int) -> None:
        if self._way is None or self._at_wait is None:
            return
        times = _TIMES if self._way is Way.AGAIN else 1
        if self._at_wait <= number < self._at_wait + times:
            self._fire()

    def _fire(self) -> None:
        self.fired += 1
        self._cancel()


__all__ = ["Call", "Ended", "Stepped", "Way", "held", "run_cancelled"]
