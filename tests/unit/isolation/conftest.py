"""A tier that harms its process, and an executor process as its owner sees it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier import Identity
from kvtier._core.messages import Event, Get, GetEnded, ProcessEnded, Put, PutEnded, Reset, TierUp
from kvtier._execution.executor import Executor, ExecutorThread
from kvtier._isolation.heartbeat import SupervisorTimes
from kvtier._isolation.process import ExecutorProcess
from kvtier._memory.region import Region
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers import SecondaryTier
from kvtier.tiers import _registry as registry
from tests.common import named_tier

IDENTITY = Identity.make("model", {"dtype": "int8"})
CHUNK_BYTES = 4096
SLOTS = 64
PATIENCE_S = 60.0
CLOSE_S = 9.0  # one third is reserved for the exit of a killed process

SWIFT = SupervisorTimes(heartbeat_s=0.1, silent_timeout_s=60.0, first_pause_s=0.05, longest_pause_s=0.2)
"""Restarts come soon; no process counts as silent, however busy the machine is."""
STRICT = SupervisorTimes(heartbeat_s=0.1, silent_timeout_s=5.0, first_pause_s=0.05, longest_pause_s=0.2)
"""For deliberately silent tiers: a busy machine must not make other tiers look silent."""

RECKLESS = """
import asyncio
import ctypes
import logging
import os
import sys
import time
from pathlib import Path

import anyio
from pydantic import SecretStr

from kvtier.tiers._base import Outcome, Status
from kvtier.tiers._waiting import in_thread
from kvtier_testing.dummy import DummyConfig, DummyTier

IS_CHILD = "kvtier._isolation.child" in getattr(sys.modules["__main__"].__spec__, "name", "")
CRASH = os.environ.get("KVTIER_TEST_CRASH") if IS_CHILD else None
if CRASH == "crash_when_loaded":
    ctypes.string_at(0)


class Config(DummyConfig):
    type: str = "reckless"
    act: str = ""
    folder: Path = Path("/nonexistent")
    seconds: int = 0
    password: SecretStr | None = None


class Reckless(DummyTier):
    Config = Config

    async def open(self, context):
        self.removed = context.removed
        if self.config.act == "log":
            logging.getLogger("kvtier.reckless").warning("a line with %s", "arguments")
            logging.getLogger("other.library").info("too little to be told")
        if self.config.act == "no_text":
            raise ValueError("nothing at /mnt/caf\\udce9")
        if self.config.act == "block_at_once":
            (self.config.folder / "begun").touch()
            time.sleep(1000)
        if self.config.act == "hold_lock_at_start":
            while not (self.config.folder / "go").exists():
                await anyio.sleep(0.01)
            ctypes.PyDLL(None).sleep(self.config.seconds)
        if CRASH == "crash_when_opened":
            ctypes.string_at(0)
        await super().open(context)

    async def get(self, batch):
        if act := getattr(self, f"_{self.config.act}", None):
            await act(batch)
            return Outcome.all(Status.OK, len(batch))
        return await super().get(batch)

    async def _report_junk(self, batch):
        self.removed([object()])  # it is ignored
        from kvtier._isolation import wire

        wire.pack = None

    async def _segfault(self, batch):
        ctypes.string_at(0)

    async def _exit(self, batch):
        os._exit(7)

    async def _block(self, batch):
        time.sleep(1000)

    async def _eat(self, batch):
        self.eaten = [bytearray(1 << 20) for _ in range(4096)]

    async def _late(self, batch):
        await in_thread(self._write_when_told, batch)

    def _write_when_told(self, batch):
        (self.config.folder / "begun").touch()
        while not (self.config.folder / "go").exists():
            time.sleep(0.01)
        batch.views[0][:] = b"x" * len(batch.views[0])
        (self.config.folder / "written").touch()

    async def _fork(self, batch):
        child = os.fork()
        if child == 0:
            try:
                os.close(2)  # what faulthandler would say
                batch.views[0][:] = b"x" * len(batch.views[0])
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        (self.config.folder / "status").write_text(str(status))

    async def _leave_a_child(self, batch):
        import subprocess

        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        (self.config.folder / "child").write_text(str(sleeper.pid))
"""


@pytest.fixture
def reckless(install_distribution: Any) -> None:
    """A third party's tier ``reckless``, whose gets follow its setting ``act``."""
    install_distribution("acme-reckless", RECKLESS, {"reckless": "Reckless"})


def make_tier(type_: str, **settings: object) -> SecondaryTier[Any]:
    """Make an installed tier whose deadlines a busy machine can meet."""
    given = {"type": type_, "deadline_s": PATIENCE_S, **settings}
    tier: SecondaryTier[Any] = registry.load(type_)(registry.validate(given))
    return tier


MUCH = {"min_free_bytes": 0, "max_bytes": 2**50, "deadline_s": PATIENCE_S}
"""For a file tier that may be slow. Without a bound a full disk has no room before the first count."""


def files(root: Path) -> SecondaryTier[Any]:
    return make_tier("fs", root_dir=root, n_threads=2, **MUCH)


def key(number: int) -> OffloadKey:
    return pack_key(number.to_bytes(32, "big"))


def keys(numbers: Sequence[int]) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def content(number: int) -> bytes:
    return random.Random(number).randbytes(CHUNK_BYTES)


class Harness:
    """An executor in a process or a thread, with its owner. Chunk ``n`` has the bytes ``content(n)``."""

    def __init__(
        self,
        *tiers: SecondaryTier[Any],
        where: str = "process",
        times: SupervisorTimes = SWIFT,
        **settings: Any,
    ) -> None:
        self.region = Region.unnamed(SLOTS, CHUNK_BYTES)
        named = [named_tier(f"tier{index}", tier) for index, tier in enumerate(tiers)]
        self.tiers = len(tiers)
        self.process: Any = (
            ExecutorProcess(named, IDENTITY, self.region, times=times, **settings)
            if where == "process"
            else ExecutorThread(partial(Executor, named, IDENTITY, self.region))
        )
        self.received: list[Event] = []
        self.submitted = 0

    def put(self, numbers: Sequence[int], slots: Sequence[int] | None = None, tier: int = 0) -> int:
        """Put chunks; slot ``n`` holds chunk ``n`` unless other slots are named."""
        slots = list(numbers) if slots is None else list(slots)
        for number, slot in zip(numbers, slots, strict=True):
            self.region.view(slot)[:] = content(number)
        self.submitted += 1
        self.process.submit([Put(self.submitted, tier, keys(numbers), slots)])
        return self.submitted

    def fetch(self, numbers: Sequence[int], slots: Sequence[int], tier: int = 0) -> int:
        self.submitted += 1
        self.process.submit([Get(self.submitted, tier, keys(numbers), list(slots), False)])
        return self.submitted

    def reset(self, epoch: int, tier: int = 0) -> None:
        self.process.submit([Reset(tier, epoch)])

    def take(self) -> None:
        while self.process.events:
            self.received.append(self.process.events.popleft())

    def until(self, holds: Callable[[], object], what: str = "") -> None:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            self.take()
            if holds():
                return
            assert time.monotonic() < end_s, (what, self.received[-20:])
            time.sleep(0.002)

    def end_of(self, id_: int) -> PutEnded | GetEnded:
        """Wait for the end of a command, and check that it ends once."""
        self.until(lambda: self.ends_of(id_), f"the end of {id_}")
        (end,) = self.ends_of(id_)
        return end

    def fetched(self, numbers: Sequence[int], slots: Sequence[int], tier: int = 0) -> GetEnded:
        end = self.end_of(self.fetch(numbers, slots, tier))
        assert isinstance(end, GetEnded)
        return end

    def hold(self, numbers: Sequence[int], tier: int = 0) -> None:
        """Put chunks and check that they are stored."""
        assert self.kept(self.put(numbers, tier=tier)) == [True] * len(numbers)

    def kept(self, id_: int) -> list[bool]:
        """Wait for the end of a put; return which of its chunks are stored."""
        end = self.end_of(id_)
        assert isinstance(end, PutEnded)
        return list(end.kept)

    def ends_of(self, id_: int) -> list[PutEnded | GetEnded]:
        return [
            event for event in self.received if isinstance(event, PutEnded | GetEnded) and event.id == id_
        ]

    @property
    def endings(self) -> list[str]:
        """The ends of the tier processes."""
        return [event.reason for event in self.received if isinstance(event, ProcessEnded)]

    def until_up(self) -> None:
        """Wait until every tier is up again, after an end that was or will be reported."""
        self.until(lambda: self.endings, "an end")
        self.until(lambda: self._last_ups() == set(range(self.tiers)), "the tiers")

    def _last_ups(self) -> set[int]:
        last = max(index for index, event in enumerate(self.received) if isinstance(event, ProcessEnded))
        return {event.tier for event in self.received[last:] if isinstance(event, TierUp)}

    def pid(self) -> int:
        """Wait for a process and return its id."""
        self.until(lambda: self.process.pid is not None, "a process")
        return int(self.process.pid)

    def is_another(self, pid: int) -> bool:
        """Return whether a process other than ``pid`` runs."""
        return self.process.pid not in (None, pid)

    def bytes_in(self, slot: int) -> bytes:
        return bytes(self.region.view(slot))

    def close(self, drain_s: float = 0.0) -> None:
        assert self.process.close(drain_s, CLOSE_S)
        self.take()
        self.region.close()


Launch = Callable[..., Harness]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Make processes and start them; the fixture ends them with the test."""
    made: list[Harness] = []

    def make(*tiers: SecondaryTier[Any], **settings: Any) -> Harness:
        made.append(Harness(*tiers, **settings))
        made[-1].process.start()
        return made[-1]

    yield make
    for one in made:
        with suppress(ValueError):
            one.close()
