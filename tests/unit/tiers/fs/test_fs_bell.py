"""The bell: who waits for the helper's threads goes on at once, in its own task, and is never forgotten."""

from __future__ import annotations

import asyncio
import contextvars
import os
from typing import Any

import anyio
import pytest

from kvtier.tiers.fs.bell import Bell, Prompt
from kvtier.tiers.fs.call import Verb

pytestmark = pytest.mark.timeout(60)


async def soon(action):
    """Have the loop call something, in no task."""
    asyncio.get_running_loop().call_soon(action)
    await asyncio.sleep(0)


async def test_who_waits_goes_on_within_the_call_that_ends_it():
    prompt, order = Prompt(), []

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
    prompt = Prompt()

    async def wait():
        said.set("mine")
        await prompt
        return asyncio.current_task(), said.get()

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    await soon(prompt.finish)
    assert await waiting == (waiting, "mine")
    assert said.get() == "nothing"


async def test_what_was_finished_before_is_not_waited_for():
    prompt = Prompt()
    prompt.finish()
    with anyio.fail_after(5):
        await prompt


async def test_what_the_waiter_raises_is_its_own():
    prompt = Prompt()

    async def wait():
        await prompt
        raise ValueError("of the waiter")

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    await soon(prompt.finish)
    with pytest.raises(ValueError, match="of the waiter"):
        await waiting


async def test_a_waiter_that_is_cancelled_hears_of_it_and_the_end_comes_to_nobody():
    prompt = Prompt()

    async def wait():
        await prompt

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert prompt.cancelled()
    await soon(prompt.finish)


class Work:
    """Threads that end what was begun when they are told to."""

    def __init__(self):
        self.begun = []
        self.done = []
        self.reader, self.writer = os.pipe()

    def pool_fd(self, pool):
        return self.reader

    def begin(self, call, verb, token):
        self.begun.append(token)
        return True

    def ended(self, pool):
        os.read(self.reader, 1)
        done, self.done = self.done, []
        return done

    def end_all(self):
        self.done = [(token, 10 * token) for token in self.begun]
        os.write(self.writer, b"x")


class Call:
    stop = None


def test_one_that_ends_the_process_keeps_nobody_from_being_told():
    loop, told = asyncio.new_event_loop(), []
    work: Any = Work()
    call: Any = Call()

    async def wait(begun, name):
        await begun.end()
        told.append((name, begun.total))
        if name == "last":
            raise SystemExit(3)

    async def begin():
        bell = Bell(work, 1)
        waiting = [
            asyncio.ensure_future(wait(bell.begin(call, Verb.GET), name)) for name in ("a", "b", "last")
        ]
        await asyncio.sleep(0)
        return waiting

    waiting = loop.run_until_complete(begin())
    work.end_all()
    with pytest.raises(SystemExit):
        loop.run_until_complete(asyncio.sleep(5))
    loop.run_until_complete(asyncio.wait(waiting[:2]))
    assert sorted(told) == [("a", 10), ("b", 20), ("last", 30)]
    with pytest.raises(SystemExit):
        waiting[2].result()
    loop.close()
    os.close(work.reader)
    os.close(work.writer)
