"""An event loop in virtual time, with an order of tasks drawn from a seed.

When no callback is ready, the clock jumps to the next timer. Tasks that are ready at the same time run in
an order that the seed picks. Worker threads are replaced by callbacks on the only thread, at times that
the seed picks.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple
from unittest import mock

import anyio
import anyio.lowlevel
import anyio.to_thread

if TYPE_CHECKING:
    from kvtier_testing.sim.network import Network

ProcessId = tuple[str, int]
"""A simulated process: the address of its host, and its number on that host."""

OWNER: ContextVar[ProcessId | None] = ContextVar("OWNER", default=None)
"""The owner of tasks, connections and servers created in this context."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_EPOCH_S = 1_700_000_000.0
_MOST_CALLBACKS = 2_000_000
_MOST_AT_ONCE = 100_000
_SWEEPS = 20_000
_CANCEL_EVERY = 100


class Stalled(AssertionError):
    """No callback is ready and no timer runs, so the main task can never finish."""


class Spinning(AssertionError):
    """Callbacks schedule each other endlessly while no time passes."""


class SimLoop(asyncio.BaseEventLoop):
    """An asyncio event loop in virtual time, the same for the same seed.

    Plain callbacks run in the order of ``call_soon``, as asyncio promises. Tasks that are ready together
    are shuffled.

    Args:
        chance: random source for the order of tasks and the duration of thread calls.
        scale: approximate number of simulated processes; the limit on callbacks grows with it.

    Attributes:
        network: the network of its connections and servers.
    """

    network: Network

    _ready: deque[asyncio.Handle]  # the base's
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, chance: Random, scale: int = 1) -> None:
        super().__init__()
        self.chance = chance
        self._scale = scale
        self._now_s = 0.0
        self._clock_resolution = 1e-9  # timers due exactly now fire
        self._selector = self  # the base waits with it when no callback is ready
        self._thread = threading.get_ident()
        self._failure: BaseException | None = None
        self._is_over = False
        self._tasks = 0
        self._called = 0
        self._called_now = 0

    def fail(self, error: BaseException) -> None:
        """End the run with ``error`` after the current callbacks, even if one of them would catch it."""
        if self._failure is None and not self._is_over:
            self._failure = error

    # --- the interface of asyncio's event loops ---------------------------------------------------

    def time(self) -> float:
        """Return the virtual time, in seconds from the start."""
        return self._now_s

    def select(self, timeout: float | None) -> list[object]:
        """Jump to the next timer; there is no I/O to wait for."""
        if timeout is None:
            raise Stalled("nothing is ready and no timer runs: a wake-up was lost")
        if timeout > 0:
            self._now_s, self._called_now = max(self._now_s, self._scheduled[0].when()), 0
        return []

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback before time advances; from this thread only."""
        if threading.get_ident() != self._thread:
            error = RuntimeError("a thread has called the simulated loop: nothing is repeatable with threads")
            self.fail(error)
            raise error
        return self.call_soon(callback, *args, context=context)

    def create_task(self, coro: Coroutine[Any, Any, T], **settings: Any) -> SimTask[T]:  # type: ignore[override]
        """Create a task."""
        task = SimTask(coro, loop=self, **settings)
        self._tasks += 1
        task.number = self._tasks
        context: Context | None = settings.get("context")
        task.owner = OWNER.get() if context is None else context.get(OWNER)
        return task

    def tasks_of(self, owner: ProcessId) -> set[asyncio.Task[Any]]:
        """Return the tasks of a simulated process that have not ended."""
        return {task for task in asyncio.all_tasks(self) if isinstance(task, SimTask) and task.owner == owner}

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen in the simulated network."""
        return self.network.listen(protocol_factory, (host, port))

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Connect in the simulated network."""
        return await self.network.connect(protocol_factory, (host, port))

    def run_in_executor(
        self,
        executor: object,  # noqa: ARG002
        func: Callable[[*Ts], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Run a function in this thread, at a time that the seed picks."""
        return _run_later(self, lambda: func(*args))

    def sweep(self) -> None:
        """Cancel the tasks left over from a failed run, and ignore their results."""
        self._is_over, self._failure = True, None
        self.set_exception_handler(lambda *_: None)
        asyncio._set_running_loop(self)
        try:
            for turn in range(_SWEEPS):
                left = asyncio.all_tasks(self)
                if not left:
                    return
                if turn % _CANCEL_EVERY == 0:
                    cancel_begun(left)
                with suppress(BaseException):  # the run has failed already, for another reason
                    self._run_once()
        finally:
            asyncio._set_running_loop(None)
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    # --- internals that the base class calls -----------------------------------------------------

    def _process_events(self, events: object) -> None:
        pass

    def _run_once(self) -> None:
        """Run the callbacks that are ready now; if there are none, let time jump."""
        self._shuffle()
        self._called += len(self._ready)
        self._called_now += len(self._ready)
        most_now, most = _MOST_AT_ONCE * self._scale, _MOST_CALLBACKS * self._scale
        if self._called_now > most_now or self._called > most:
            raise Spinning(f"{self._called} callbacks by {self._now_s:.3f} s, {self._called_now} at once")
        super()._run_once()  # type: ignore[misc]
        if self._failure is not None:
            raise self._failure

    def _shuffle(self) -> None:
        """Shuffle the ready tasks. Each is queued at most once, so its own steps keep their order.

        They are sorted first, because the order of their wake-ups may come from a set.
        """
        batch = list(self._ready)
        numbers = [_number_of(handle) for handle in batch]
        places = [index for index, number in enumerate(numbers) if number]
        if len(places) > 1:
            chosen = sorted(places, key=numbers.__getitem__)
            self.chance.shuffle(chosen)
            for index, other in zip(places, chosen, strict=True):
                self._ready[index] = batch[other]


class SimTask(asyncio.Task[T]):
    """A task with a number, starting at 1, and its owning process."""

    number: int
    owner: ProcessId | None


def cancel_begun(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that have started: anyio never awaits the coroutine of a task cancelled earlier."""
    for task in tasks:
        coroutine: Any = task.get_coro()
        if getcoroutinestate(coroutine) != CORO_CREATED:
            task.cancel()


def _number_of(handle: asyncio.Handle) -> int:
    """Return the number of the task that a handle resumes; 0 for other callbacks."""
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return task.number if isinstance(task, SimTask) else 0


def _run_later(loop: SimLoop, call: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function as a thread would: it runs even if its waiter was cancelled."""
    future: asyncio.Future[T] = loop.create_future()
    begins_s, ends_s = (loop.chance.choice((0.0, 0.0, 1e-4, 3e-3)) for _ in range(2))

    def run() -> None:
        try:
            end = partial(_end, future, future.set_result, call())
        except BaseException as error:
            end = partial(_end, future, future.set_exception, error)
        loop.call_later(ends_s, end)

    loop.call_later(begins_s, run)
    return future


def _end(future: asyncio.Future[Any], settle: Callable[[Any], None], value: object) -> None:
    if not future.done():  # the waiter may have been cancelled
        settle(value)


async def _in_simulated_thread(
    func: Callable[[*Ts], T],
    *args: *Ts,
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> T:
    """Stand in for ``anyio.to_thread.run_sync``: the same cancellation, no thread."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    await anyio.lowlevel.checkpoint()
    async with limiter or anyio.CapacityLimiter(1):
        with anyio.CancelScope(shield=not abandon_on_cancel):
            return await _run_later(loop, lambda: func(*args))
    raise AssertionError("this scope must not be cancelled")


def _no_sleep(seconds: float) -> None:
    raise RuntimeError(f"time.sleep({seconds}) blocks the event loop")


@contextmanager
def _one_thread(loop: SimLoop) -> Iterator[None]:
    """Replace clocks by virtual time, and worker threads by callbacks."""
    with (
        mock.patch.multiple(
            time,
            monotonic=loop.time,
            perf_counter=loop.time,
            time=lambda: _EPOCH_S + loop.time(),
            sleep=_no_sleep,
        ),
        mock.patch.object(anyio.to_thread, "run_sync", _in_simulated_thread),
    ):
        yield


@contextmanager
def _seeded(seed: object) -> Iterator[None]:
    """Seed the global random generator and ``secrets``."""
    state = random.getstate()
    random.seed(f"{seed}/shared")
    secret = Random(f"{seed}/secrets")
    try:
        with mock.patch.multiple(
            secrets,
            token_bytes=secret.randbytes,
            token_hex=lambda count: secret.randbytes(count).hex(),
            randbits=secret.getrandbits,
        ):
            yield
    finally:
        random.setstate(state)


def simulate(main: Callable[[], Coroutine[Any, Any, T]], seed: object = 0, scale: int = 1) -> T:
    """Run a coroutine to its end in virtual time; the same seed gives the same run.

    ``time.monotonic``, ``time.perf_counter`` and ``time.time`` return the virtual time meanwhile, if they
    are called by these names, and ``random`` is seeded. ``anyio.to_thread.run_sync`` and
    ``loop.run_in_executor`` start no thread.

    Args:
        seed: name of the run; any object with a ``str``.
        scale: approximate number of simulated processes; the limit for ``Spinning`` grows with it.

    Returns:
        The coroutine's result.

    Raises:
        Stalled, Spinning: see there. Errors of the coroutine pass through.
    """
    loop = SimLoop(Random(f"{seed}/loop"), scale)
    with _one_thread(loop), _seeded(seed):
        try:
            return loop.run_until_complete(main())
        finally:
            loop.sweep()
            loop.close()
