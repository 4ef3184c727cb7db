"""Completions: who waits for the helper's threads resumes at once, in its own task, and is not forgotten."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
from typing import Any

import pytest

from kvtier import native
from kvtier.keys import pack_key
from kvtier.tiers.fs.files.call import FileCall, Flag, Place, Verb
from kvtier.tiers.fs.files.completions import ImmediateFuture, NativePool
from kvtier.tiers.fs.files.index import PythonIndex

pytestmark = pytest.mark.timeout(60)


async def soon(action):
    """Have the loop call something, in no task."""
    asyncio.get_running_loop().call_soon(action)
    await asyncio.sleep(0)


async def test_who_waits_goes_on_within_the_call_that_ends_it():
    prompt, order = ImmediateFuture(), []

    async def wait():
        await prompt
        order.append("went on")

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)

    def finish():
        prompt.finish()
        order.append("finished")
        prompt.finish()

    await soon(finish)
    await waiting
    assert order == ["went on", "finished"]


async def test_it_goes_on_in_its_own_task_and_context():
    said = contextvars.ContextVar("said", default="nothing")
    prompt = ImmediateFuture()

    async def wait():
        said.set("mine")
        await prompt
        return asyncio.current_task(), said.get()

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    await soon(prompt.finish)
    assert await waiting == (waiting, "mine")
    assert said.get() == "nothing"


async def test_a_waiter_that_is_cancelled_hears_of_it_and_the_end_comes_to_nobody():
    prompt = ImmediateFuture()

    async def wait():
        await prompt

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert prompt.cancelled()
    await soon(prompt.finish)


class Pool:
    """The native helper's functions of a pool: what was begun ends when it is told to."""

    def __init__(self):
        self.begun = []
        self.done = []
        self.reader, self.writer = os.pipe()
        self.kvt_files_put = self.kvt_files_get = WORK(lambda *_: 0)

    def kvt_pool_open(self, readers, writers):
        return 1

    def kvt_pool_fd(self, pool):
        return self.reader

    def kvt_pool_submit(self, pool, work, call, end, part, reading, token):
        self.begun.append(token)
        return 0

    def kvt_pool_ended(self, pool, tokens, sums, room):
        os.read(self.reader, 1)
        done, self.done = self.done, []
        for i, (token, added) in enumerate(done):
            ctypes.c_uint64.from_address(tokens + 8 * i).value = token
            ctypes.c_int64.from_address(sums + 8 * i).value = added
        return len(done)

    def end_all(self):
        self.done = [(token, 10 * token) for token in self.begun]
        os.write(self.writer, b"x")


WORK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


def test_one_that_ends_the_process_keeps_nobody_from_being_told(monkeypatch):
    loop, told = asyncio.new_event_loop(), []
    library: Any = Pool()
    monkeypatch.setattr(native, "holding", library)
    place = Place(-1, "data", "tmp", bytes(16), 4096, Flag.NONE)
    index: Any = PythonIndex()

    async def wait(pool, call, name):
        added, _ = await pool.transfer(call, Verb.GET, 1, index)
        told.append((name, added))
        if name == "last":
            raise SystemExit(3)

    async def begin():
        pool = NativePool(library, 1, 1)
        calls = {name: FileCall(place, [pack_key(bytes(32))]) for name in ("a", "b", "last")}
        waiting = [asyncio.ensure_future(wait(pool, call, name)) for name, call in calls.items()]
        await asyncio.sleep(0)
        return waiting

    waiting = loop.run_until_complete(begin())
    library.end_all()
    with pytest.raises(SystemExit):
        loop.run_until_complete(asyncio.sleep(5))
    loop.run_until_complete(asyncio.wait(waiting[:2]))
    assert sorted(told) == [("a", 10), ("b", 20), ("last", 30)]
    with pytest.raises(SystemExit):
        waiting[2].result()
    loop.close()
    os.close(library.reader)
    os.close(library.writer)
