"""The tier process for an owner on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread

from kvtier._core.messages import Command
from kvtier._execution.executor import CLOSE_S, Post, TierActivity
from kvtier._isolation.process import ExecutorProcess
from kvtier.tiers._waiting import call_soon, until_done


class RemoteExecutor:
    """An ``ExecutorProcess`` with the interface of an ``Executor``, an async context manager too.

    ``make`` returns the process for a ``notify``; ``post`` is called on the loop with each event.
    """

    def __init__(self, make: Callable[..., ExecutorProcess], post: Post) -> None:
        self._process = make(notify=self._wake)
        self.end_by_s: float | None = None
        self._post = post
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False
        self.activity: Sequence[TierActivity] = self._process.activity

    async def __aenter__(self) -> RemoteExecutor:
        self._loop = asyncio.get_running_loop()
        await anyio.to_thread.run_sync(self._process.start)
        return self

    async def __aexit__(self, *exc: object) -> None:
        left_s = CLOSE_S if self.end_by_s is None else max(0.0, self.end_by_s - time.monotonic())
        await until_done(anyio.to_thread.run_sync(self._process.close, 0.0, left_s))
        self._take()

    def submit(self, commands: Sequence[Command]) -> None:
        """Start commands. Called on the loop."""
        self._process.submit(commands)

    def _wake(self) -> None:
        if self._loop is not None and not self._is_woken:
            self._is_woken = True
            call_soon(self._loop, self._take)

    def _take(self) -> None:
        self._is_woken = False  # First, because later events must wake the loop again.
        events = self._process.events
        try:
            while events:
                self._post(events.popleft())
        finally:
            if events:  # If posting one failed, no other wake-up would come for the rest.
                self._wake()
