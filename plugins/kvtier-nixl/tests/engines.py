"""Tiers for the tests: one in this process, and holders in separate processes, which may be killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from kvtier import Identity
from kvtier._settings import validation
from kvtier.tiers import Status
from kvtier_nixl import NixlConfig, NixlTier
from kvtier_nixl._agent import Agent
from kvtier_nixl._peers import Peers
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers._servers import absent, free_port

CHUNK_BYTES = 256 * 1024
GENEROUS_S = 30.0  # a deadline that even a busy machine meets
os.environ.setdefault("UCX_TLS", "tcp,self")  # as between hosts
os.environ.setdefault("UCX_LOG_LEVEL", "error")
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


def require_nixl() -> None:
    """Skip the test if NIXL is not installed."""
    if importlib.util.find_spec("nixl") is None:
        absent("NIXL is not installed: pip install --no-deps 'nixl>=1.5.1' 'nixl-cu12>=1.5.1'")


def identity(name: str = "tests") -> Identity:
    return Identity.make(name, {"dtype": "float16"})


def config(*peers: str, **settings: Any) -> NixlConfig:
    """Return the settings of a tier that reads from peers."""
    given = {
        "listen": "127.0.0.1:0",
        "serve_bytes": "64MiB",
        "receive_bytes": "32MiB",
        "deadline_s": GENEROUS_S,
        "answer_timeout_s": 10.0,  # A busy machine answers late, which is not a fault in these tests.
    }
    return validation.build(NixlConfig, {**given, "peers": peers, **settings})


@asynccontextmanager
async def opened(
    *peers: str, name: str = "tests", chunk_bytes: int = CHUNK_BYTES, **settings: Any
) -> AsyncIterator[TierRig]:
    """Open a tier that reads from peers, and close it at the end."""
    require_nixl()
    async with TierRig(NixlTier(config(*peers, **settings)), identity(name), chunk_bytes).opened() as it:
        yield it


def tier_of(it: TierRig) -> NixlTier:
    assert isinstance(it.tier, NixlTier)
    return it.tier


def agent_of(it: TierRig) -> Agent:
    """Return the NIXL agent of an open tier."""
    return tier_of(it)._opened


def peers_of(it: TierRig) -> Peers:
    """Return the peers of an open tier."""
    peers = tier_of(it)._peers
    assert peers is not None
    return peers


async def until_found(it: TierRig, numbers: range) -> None:
    """Wait until the tier is connected to a peer that holds chunks."""
    with anyio.fail_after(60):
        while not all(await it.contains(numbers)):  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.02)


class Holder:
    """A process that serves chunks. Tests order it to put, read or reset.

    Args:
        log: file for its output.
        settings: settings of its tier.
        options: ``name`` of the identity, ``chunk_bytes``, and the numbers of the ``chunks`` it puts.
    """

    def __init__(self, log: Path, settings: dict[str, Any] | None = None, **options: Any) -> None:
        require_nixl()
        self._log = log
        given = {"listen": f"127.0.0.1:{free_port()}", **(settings or {})}
        self.address = str(given["listen"])
        self._command = [sys.executable, __file__, json.dumps(given), json.dumps(options)]

    def __enter__(self) -> Holder:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self.expect_answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def tell(self, verb: str, *numbers: int) -> None:
        """Send an order, and wait until it is done."""
        assert self.process.stdin is not None
        print(verb, *numbers, file=self.process.stdin, flush=True)
        self.expect_answer()

    def expect_answer(self) -> None:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        assert answer == "done\n", answer + self._log.read_text()[-2000:]

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it with SIGSTOP, which simulates a machine that hangs."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue."""
        self.process.send_signal(signal.SIGCONT)


async def hold(settings: dict[str, Any], name: str = "tests", chunks: int = 8, **options: Any) -> None:
    """Be a holder."""
    async with opened(name=name, **settings, **options) as it:
        assert set(await it.put(range(chunks))) <= {Status.OK}
        print("done", flush=True)
        async with anyio.create_task_group() as tasks:
            await obey(it, tasks)


async def obey(it: TierRig, tasks: TaskGroup) -> None:
    """Run the orders that arrive on standard input, one per line, and answer each with a line."""
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        verb, *numbers = line.split()
        if verb == "reset":
            await it.tier.reset()
        elif verb == "put":
            await it.put(map(int, numbers), version=1)
        elif verb == "read":
            await until_found(it, range(8))
            await begin_read(it, tasks, int(numbers[0]))
        print("done", flush=True)


async def begin_read(it: TierRig, tasks: TaskGroup, process: int) -> None:
    """Start a read from a process, and stop that process after it has leased the chunks."""
    agent = agent_of(it)
    read = agent.read

    async def stopped(peer: str, addresses: Sequence[int], rows: Sequence[int]) -> None:
        os.kill(process, signal.SIGSTOP)
        await read(peer, addresses, rows)

    agent.read = stopped  # type: ignore[method-assign]
    tasks.start_soon(it.get, range(8))
    while not agent.reads:  # noqa: ASYNC110 - nothing tells of it
        await anyio.sleep(0.005)


if __name__ == "__main__":
    anyio.run(lambda: hold(json.loads(sys.argv[1]), **json.loads(sys.argv[2])))
