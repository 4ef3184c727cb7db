"""Values that a call borrows from the loop are lent in time or never, and always returned."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvtier import StateError
from kvtier_sglang import _loop
from kvtier_sglang._loop import LoopThread

WAIT_S = 60.0


class Block:
    """An async block that records how it ended."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_in = threading.Event()
        self.let_in.set()
        self.ended = threading.Event()
        self.is_good = False

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[str]:
        self.entered.set()
        self.let_in.wait(WAIT_S)  # Blocks the loop, like a tier that violates its contract.
        try:
            yield "given"
            self.is_good = True
        finally:
            self.ended.set()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


def test_block_ends_with_caller(loop: LoopThread) -> None:
    block = Block()
    with loop.lend(block.enter(), WAIT_S) as given:
        assert given == "given"
        assert not block.ended.is_set()
    assert block.ended.is_set()
    assert block.is_good


def test_failing_caller_fails_block(loop: LoopThread) -> None:
    block = Block()
    with pytest.raises(ZeroDivisionError), loop.lend(block.enter(), WAIT_S):
        raise ZeroDivisionError
    assert block.ended.wait(WAIT_S)
    assert not block.is_good


def test_late_values_are_never_given(loop: LoopThread) -> None:
    block = Block()
    block.let_in.clear()
    with pytest.raises(TimeoutError), loop.lend(block.enter(), 0.05):
        pytest.fail("it was given")
    assert block.entered.wait(WAIT_S)
    block.let_in.set()
    assert block.ended.wait(WAIT_S)
    assert not block.is_good


def test_unenterable_block(loop: LoopThread) -> None:
    @asynccontextmanager
    async def refuse() -> AsyncIterator[None]:
        raise OSError("no")
        yield

    with pytest.raises(OSError, match="no"), loop.lend(refuse(), WAIT_S):
        pytest.fail("it was entered")


def test_ended_loop_refuses_calls(loop: LoopThread) -> None:
    loop.close()
    with pytest.raises(StateError), loop.lend(Block().enter(), WAIT_S):
        pytest.fail("it was given")
    loop.post(lambda: pytest.fail("it was called"))


def test_unstarted_work_warns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loop, "_CANCEL_S", 0.05)
    begun: list[asyncio.Task[None]] = []

    async def nothing() -> None:
        pass

    async def wrapped(work: Coroutine[Any, Any, None]) -> None:  # as anyio's task groups do
        await work

    async def keep_on() -> None:
        while True:
            begun[:] = [asyncio.ensure_future(wrapped(nothing()))]
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    loop = LoopThread()
    loop.start(keep_on())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loop.close()
        del loop
        begun.clear()
        gc.collect()
    assert [str(one.message) for one in warned if "never awaited" in str(one.message)] == []
