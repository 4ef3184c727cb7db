"""Calls that are cancelled at a chosen moment, in each way that a task can be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import anyio

Call = Callable[[], Coroutine[Any, Any, object]]

_TIMES = 3


class Way(Enum):
    """The way in which a call is cancelled."""

    CANCEL = "Task.cancel"
    AGAIN = "Task.cancel, three times"
    SCOPE = "anyio.CancelScope"


class Stepped:
    """Runs a coroutine as ``await`` does, and reports each of its waits.

    Args:
        coroutine: coroutine to run.
        on_wait: callback before each wait for the loop, called with 1, 2, ...
        on_resume: callback after each wait, called with the same number; its result is awaited before
            the coroutine continues.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, object],
        on_wait: Callable[[int], object] = lambda _: None,
        on_resume: Callable[[int], Awaitable[object] | None] = lambda _: None,
    ) -> None:
        self.waits = 0
        self._coroutine = coroutine
        self._on_wait = on_wait
        self._on_resume = on_resume

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[Any], Any] = self._coroutine.send
        answer: Any = None
        while True:
            try:
                future = step(answer)
            except StopIteration:
                return
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
class Ended:
    """The end of a call.

    Attributes:
        waits: number of its waits.
        was_cancelled: whether it was cancelled before it ended.
        raised_cancellation: whether it raised the cancellation, as it must.
        error: any other exception that it raised, or None.
    """

    waits: int
    was_cancelled: bool
    raised_cancellation: bool
    error: BaseException | None = None


async def run_cancelled(
    call: Call,
    way: Way | None,
    *,
    at_wait: int | None = None,
    after_s: float | None = None,
    then: Callable[[], object] = lambda: None,
) -> Ended:
    """Make a call in a new task and cancel it.

    Args:
        way: way to cancel it; None to let it run.
        at_wait: number of the wait to cancel it at, counted from 1.
        after_s: seconds until it is cancelled, instead of ``at_wait``.
        then: callback as soon as the call has ended, before the loop runs anything else.
    """
    fired = 0
    cancel: list[Callable[[], object]] = []  # set once it runs

    def fire() -> None:
        nonlocal fired
        fired += 1
        cancel[0]()

    def on_wait(number: int) -> None:
        times = _TIMES if way is Way.AGAIN else 1
        if way is not None and at_wait is not None and at_wait <= number < at_wait + times:
            fire()

    stepped = Stepped(call(), on_wait)

    async def run() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        timer = loop.call_later(after_s, fire) if way is not None and after_s is not None else None
        with anyio.CancelScope() as scope:
            cancel.append(scope.cancel if way is Way.SCOPE else task.cancel)
            try:
                await stepped
                return
            finally:
                if timer is not None:
                    timer.cancel()
                then()
        raise asyncio.CancelledError  # the scope caught it: raise it as the owner would see it

    task = asyncio.ensure_future(run())
    await asyncio.wait((task,))
    error = None if task.cancelled() else task.exception()
    return Ended(stepped.waits, fired > 0, task.cancelled(), error)


async def held(call: Call, at_wait: int, meanwhile: Call, patience_s: float) -> bool:
    """Make a call, and make another one between one of its waits and its next step.

    Args:
        at_wait: number of the wait after which it is held.
        meanwhile: the other call. After ``patience_s`` the held call continues anyway, because the
            other one may have to wait for its end.

    Returns:
        Whether the call reached that wait.
    """
    others: list[asyncio.Future[object]] = []

    def resume(number: int) -> Awaitable[object] | None:
        if number != at_wait:
            return None
        others.append(asyncio.ensure_future(meanwhile()))
        return asyncio.wait(others, timeout=patience_s)

    try:
        await Stepped(call(), on_resume=resume)
    finally:
        if others:
            await asyncio.wait(others)
    for other in others:
        other.result()
    return bool(others)
