"""Conformance tests that always end, each in a separate thread, watched from outside.

A call that never returns, or that blocks the event loop, cannot be interrupted from within the loop. So the
test runs in a thread. pytest's thread waits for it; at the limit it fails the test, names the call in
flight, and shows the stacks of all threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from typing import Any, ClassVar

_LOOK_S = 0.05
_STOP_S = 1.0
_FRAMES = 5
_EXITS = (SystemExit, KeyboardInterrupt)


class Calls:
    """The calls in flight of a suite's subject, with their ages. Any thread may ask."""

    def __init__(self) -> None:
        self._started: dict[int, tuple[str, float]] = {}
        self._ids = itertools.count()

    @contextmanager
    def in_flight(self, name: str) -> Iterator[None]:
        """Count a call as in flight while the context is entered."""
        number = next(self._ids)
        self._started[number] = (name, time.monotonic())
        try:
            yield
        finally:
            del self._started[number]

    def watch(self, subject: object, verbs: Sequence[str], contract: type) -> None:
        """Wrap methods of ``subject`` so that they count as in flight while they run.

        Args:
            subject: a tier or a policy.
            verbs: names of its methods.
            contract: the abstract class; its docstrings become notes on exceptions of the methods.
        """
        for verb in verbs:
            summary = (inspect.getdoc(getattr(contract, verb)) or "").partition("\n")[0]
            note = f"{verb}() raised this. Its contract: {summary}"
            setattr(subject, verb, self._watched(f"{verb}()", getattr(subject, verb), note))

    def older_than(self, seconds: float) -> list[str]:
        """Return the names of calls in flight for longer than ``seconds``."""
        since_s = time.monotonic() - seconds
        return [name for name, started_s in list(self._started.values()) if started_s < since_s]

    def names(self) -> str:
        """Return the names of all calls in flight."""
        return ", ".join(name for name, _ in list(self._started.values())) or "no call"

    def _watched(self, name: str, call: Callable[..., Any], note: str) -> Callable[..., Any]:
        @contextmanager
        def watched() -> Iterator[None]:
            with self.in_flight(name):
                try:
                    yield
                except _EXITS as error:
                    raise ended_process(name, error) from error
                except Exception as error:
                    error.add_note(note)
                    raise

        @functools.wraps(call)
        def plain(*arguments: Any, **options: Any) -> Any:
            with watched():
                return call(*arguments, **options)

        @functools.wraps(call)
        async def awaited(*arguments: Any, **options: Any) -> Any:
            with watched():
                return await call(*arguments, **options)

        return awaited if inspect.iscoroutinefunction(call) else plain


class LimitedSuite:
    """A conformance suite whose tests cannot hang, including tests added by a subclass.

    Attributes:
        patience_s: time limit of a single call, in seconds.
        limit_s: time limit of a test, in seconds.
    """

    patience_s: ClassVar[float] = 30.0
    limit_s: ClassVar[float] = 100.0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, test in list(vars(cls).items()):
            if name.startswith("test_"):
                setattr(cls, name, _limited(test))

    @functools.cached_property
    def calls(self) -> Calls:
        """The calls of this test that are in flight."""
        return Calls()

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of one test, such as ``uvloop.new_event_loop()``. Optional."""
        return asyncio.new_event_loop()

    def around_test(self) -> AbstractContextManager[None]:
        """Return a context for a coroutine test, entered in the thread of its event loop."""
        return nullcontext()


def ended_process(names: str, error: BaseException) -> AssertionError:
    """Return the failure of a call that would have ended the process."""
    return AssertionError(
        f"{names} raised {error!r}: a tier or a policy must not end the process, whatever thread it raises "
        "in; it raises TierError or another Exception"
    )


def _limited(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(self: LimitedSuite, *arguments: Any, **options: Any) -> None:
        _Run(self, functools.partial(test, self, *arguments, **options)).run()

    return run


class _Run:
    """One test in its thread."""

    def __init__(self, suite: LimitedSuite, test: Callable[[], Any]) -> None:
        self._suite = suite
        self._test = test
        self._error: BaseException | None = None
        self._cancel: Callable[[], object] = lambda: None
        self._ended = threading.Event()
        context = copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._body,), name="conformance test", daemon=True
        )

    def run(self) -> None:
        """Run the test and raise what it raised.

        Raises:
            AssertionError: the test, or a call in it, has not ended in time.
        """
        self._thread.start()
        late = self._wait()
        if late is not None:
            where = _stacks(self._thread)
            late += self._stop()
            if self._error is None or isinstance(self._error, asyncio.CancelledError | SystemExit):
                raise AssertionError(f"{late}\n{where}")
            self._error.add_note(f"{late}\n{where}")
        if self._error is not None:
            raise self._error

    def _body(self) -> None:
        try:
            if not inspect.iscoroutinefunction(self._test):
                self._test()
                return
            with self._suite.around_test():
                self._run_loop()
        except _EXITS as error:
            self._error = self._error or ended_process(self._suite.calls.names(), error)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._ended.set()

    def _run_loop(self) -> None:
        runner = asyncio.Runner(loop_factory=self._suite.event_loop)
        try:
            runner.run(self._cancellable())
        except _EXITS as error:  # Raised in one of the tier's tasks or threads, which has stopped the loop.
            self._error = ended_process(self._suite.calls.names(), error)
        except BaseException as error:
            self._error = error
        with self._suite.calls.in_flight("a task or thread that is left when the test ends"):
            runner.close()

    async def _cancellable(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        await self._test()

    def _wait(self) -> str | None:
        calls, until_s = self._suite.calls, time.monotonic() + self._suite.limit_s
        while not self._ended.wait(_LOOK_S):
            if late := calls.older_than(self._suite.patience_s):
                return f"{late[0]} has not ended within {self._suite.patience_s:g} s"
            if time.monotonic() > until_s:
                return f"the test has not ended within {self._suite.limit_s:g} s; in flight: {calls.names()}"
        return None

    def _stop(self) -> str:
        """End the thread if possible; return a message if it continues."""
        with suppress(RuntimeError):  # the loop is closed
            self._cancel()
        if self._ended.wait(_STOP_S):
            return ""
        assert self._thread.ident is not None
        thread, error = ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit)
        # stops loops in Python, but not calls into C
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
        _exit_after_main_thread()
        self._ended.wait(_STOP_S)
        if not inspect.iscoroutinefunction(self._test):
            return ""
        return (
            ", and cancelling it has no effect: it blocks the event loop or swallows the cancellation. A "
            "call that blocks belongs in a thread (kvtier.tiers.in_thread)"
        )


@functools.cache
def _exit_after_main_thread() -> None:
    """Exit when the main thread has ended, because the interpreter would wait for hanging threads."""

    def wait_and_exit() -> None:
        threading.main_thread().join()
        time.sleep(_STOP_S)
        os._exit(1)

    threading.Thread(target=wait_and_exit, name="exit", daemon=True).start()


def _stacks(first: threading.Thread) -> str:
    """Return the stacks of all threads except the calling one, ``first`` in front."""
    frames = sys._current_frames()
    others = [thread for thread in threading.enumerate() if thread not in (first, threading.current_thread())]
    parts = []
    for thread in (first, *others):
        if frame := frames.get(thread.ident or 0):
            stack = "".join(traceback.format_stack(frame)[-_FRAMES:])
            parts.append(f"thread {thread.name!r} is at\n{stack}")
    return "".join(parts)
