"""NIXL's agent, in its own thread. It serves memory to peers and reads the memory of peers.

**A read cannot be stopped**, neither by releasing its handle nor by removing the peer: if a stopped peer
resumes, its bytes still arrive. So bytes go to rows of receiving memory first, never directly to slots. An
abandoned read keeps its rows until it has ended, however long that takes. The slots are free at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import anyio

from kvtier.tiers import GuardedLogger

_LEAST_PAUSE_S: Final = 0.00005
_POLL_SHARE: Final = 0.25
"""Share of a read's age after which it is polled again, from ``_LEAST_PAUSE_S`` to ``_LONGEST_PAUSE_S``."""

_LONGEST_PAUSE_S: Final = 0.0005
_GIVEN_UP_PAUSE_S: Final = 0.05
_PROGRESS_WAIT_US: Final = 10_000
"""Microseconds for which NIXL's progress thread waits for events. With 0, NIXL's default for Python, it never
waits and takes all of a core; UCX may miss an event, and finds it when the time is over."""

_CLOSE_S: Final = 5.0
_DONE: Final = "DONE"
_IN_FLIGHT: Final = "PROC"
T = TypeVar("T")

_log = GuardedLogger("kvtier.tiers.nixl")


class Memory:
    """Memory of this process, divided into rows of one chunk each. It is freed with the object."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows = rows
        self.row_bytes = row_bytes
        self._bytes = mmap.mmap(-1, rows * row_bytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def address(self, row: int) -> int:
        """Return the address of a row."""
        return self.base + row * self.row_bytes


class ReadError(Exception):
    """A read failed. The text comes from NIXL."""


@dataclass(eq=False)
class _Read:
    handle: Any
    peer: str
    rows: Sequence[int]
    future: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_given_up: bool = False
    begun_s: float = field(default_factory=time.monotonic)


class Agent:
    """An agent of NIXL with its UCX backend.

    Args:
        serving: memory that peers may read.
        receiving: memory that reads write into.
        is_local: whether only processes of this host may connect to it.

    Attributes:
        name: the agent's unique name.
        metadata: data that agents of peers need to read from ``serving``.
        thread: NIXL's thread.
        reads: reads in flight, including abandoned ones.
        given_up_rows: number of rows that abandoned reads may still write to.
    """

    def __init__(self, serving: Memory, receiving: Memory, *, is_local: bool) -> None:
        self.name = f"kvtier-{secrets.token_hex(8)}"
        self.metadata = b""
        self._serving = serving
        self._receiving = receiving
        self._is_local = is_local
        # Not a SimpleQueue: its get may compute a negative timeout (CPython 3.11) and then waits for ever.
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._run, name="kvtier-nixl", daemon=True)
        self._agent: Any = None
        self.reads: list[_Read] = []
        self._peers: set[str] = set()
        self._unwanted: set[str] = set()  # peers to be removed once no read of them is in flight
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._free = list(range(receiving.rows))
        self.given_up_rows = 0
        self._row_freed = asyncio.Event()

    # --- on the event loop -----------------------------------------------------------------------

    async def open(self) -> None:
        """Start the thread, and NIXL in it.

        Raises:
            ImportError: NIXL is not installed.
            Exception: an error of NIXL.
        """
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self.thread.start()
        await self._call(self._start)

    async def aclose(self) -> None:
        """End the thread, NIXL and the reads in flight. Afterwards nothing writes into its memory.

        A stuck thread is abandoned after a while. It keeps the memory, so late writes are harmless.
        """
        if self._ended is None:
            return
        self._jobs.put(None)
        end_s = time.monotonic() + _CLOSE_S
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not self._ended.done() and (left_s := end_s - time.monotonic()) > 0:
                try:
                    await asyncio.wait((self._ended,), timeout=left_s)
                except asyncio.CancelledError as error:
                    cancelled = error
        if not self._ended.done():
            _log.error("NIXL did not close within %g s; its thread and memory are abandoned", _CLOSE_S)
        if cancelled is not None:
            raise cancelled

    async def connect(self, peer: str, metadata: bytes) -> None:
        """Make the memory of a peer readable."""
        try:
            await self._call(lambda: self._add(peer, metadata))
        except BaseException:  # On a cancellation, NIXL may still add the peer.
            self.forget(peer)
            raise

    def forget(self, peer: str) -> None:
        """Remove a peer, once no read of it is in flight."""
        self._jobs.put(lambda: self._unwanted.add(peer))

    async def take_rows(self, count: int) -> list[int]:
        """Return at least one row of the receiving memory and at most ``count``; wait for the first one."""
        while not self._free:
            self._row_freed.clear()
            await self._row_freed.wait()
        taken = self._free[-count:]  # Rows freed last are still in the processor's cache.
        del self._free[-count:]
        return taken

    def free_rows(self, rows: Sequence[int]) -> None:
        """Give rows back."""
        self._free.extend(rows)
        self._row_freed.set()

    @property
    def is_stuck(self) -> bool:
        """Whether abandoned reads occupy all of the receiving memory."""
        return self.given_up_rows == self._receiving.rows

    async def read(self, peer: str, addresses: Sequence[int], rows: Sequence[int]) -> None:
        """Read chunks of a peer into rows. The caller owns the rows again only if this returns.

        Raises:
            ReadError: the read failed.
        """
        read = _Read(None, peer, rows)
        self._jobs.put(lambda: self._begin(read, addresses))
        try:
            state = await read.future
        except BaseException:  # On a cancellation, the thread frees the rows after the transfer has ended.
            read.is_given_up = True
            self.given_up_rows += len(rows)
            if read.future.done() and not read.future.cancelled():
                self._free_given_up(read)
            raise
        if state != _DONE:
            self.free_rows(rows)
            raise ReadError(state)

    def _free_given_up(self, read: _Read) -> None:
        self.given_up_rows -= len(read.rows)
        self.free_rows(read.rows)

    def _read_ended(self, read: _Read, state: str) -> None:
        if read.is_given_up:
            self._free_given_up(read)
        elif read.future.cancelled():  # The waiter's cancellation has not been delivered yet.
            read.future = asyncio.get_running_loop().create_future()
            read.future.set_result(state)
        else:
            read.future.set_result(state)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread and return its result. A cancelled caller does not wait for it."""
        assert self._loop is not None
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                settle = partial(future.set_result, function())
            except BaseException as error:
                settle = partial(future.set_exception, error)
            self._post(lambda: None if future.done() else settle())

        self._jobs.put(job)
        return await asyncio.shield(future)

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._pause_s() if self.reads else None)
            except queue.Empty:
                self._poll()
                continue
            if job is None:
                break
            job()
            self._poll()
        self._end()

    def _pause_s(self) -> float:
        """Return the seconds after which the reads are polled again."""
        begun_s = max((read.begun_s for read in self.reads if not read.is_given_up), default=None)
        if begun_s is None:
            return _GIVEN_UP_PAUSE_S
        return min(max(_POLL_SHARE * (time.monotonic() - begun_s), _LEAST_PAUSE_S), _LONGEST_PAUSE_S)

    def _start(self) -> None:
        agent = new_agent(self.name, is_local=self._is_local)
        served = _register(agent, self._serving)
        _register(agent, self._receiving)
        # Only the serving memory: peers must not access the receiving memory.
        self.metadata = agent.get_partial_agent_metadata(served, inc_conn_info=True, backends=["UCX"])
        self._agent = agent

    def _end(self) -> None:
        for read in self.reads:
            with suppress(Exception):
                self._agent.release_xfer_handle(read.handle)
            read.handle = None  # NIXL's object refers to the agent.
        self.reads.clear()
        self._agent = None  # NIXL ends with its last reference. Afterwards nothing is written.
        assert self._ended is not None
        ended = self._ended
        self._post(lambda: None if ended.done() else ended.set_result(None))

    def _add(self, peer: str, metadata: bytes) -> None:
        self._unwanted.discard(peer)
        if peer not in self._peers:
            given = self._agent.add_remote_agent(metadata)
            name = given.decode() if isinstance(given, bytes) else given
            if name != peer:
                self._agent.remove_remote_agent(name)
                raise ReadError(f"its agent is {name!r}, not {peer!r}")
            self._peers.add(peer)

    def _begin(self, read: _Read, addresses: Sequence[int]) -> None:
        length = self._receiving.row_bytes
        try:
            local = [(self._receiving.address(row), length, 0) for row in read.rows]
            remote = [(address, length, 0) for address in addresses]
            descriptors = [self._agent.get_xfer_descs(part, "DRAM") for part in (local, remote)]
            read.handle = self._agent.initialize_xfer("READ", *descriptors, read.peer)
            state = self._agent.transfer(read.handle)
        except Exception as error:
            self._finish(read, f"{type(error).__name__}: {error}")
            return
        if state == _IN_FLIGHT:
            self.reads.append(read)
        else:
            self._finish(read, state)

    def _poll(self) -> None:
        for read in list(self.reads):
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as error:
                state = f"{type(error).__name__}: {error}"
            if state != _IN_FLIGHT:
                self.reads.remove(read)
                self._finish(read, state)
        for peer in self._unwanted - {read.peer for read in self.reads}:
            self._unwanted.discard(peer)
            if peer in self._peers:
                self._peers.discard(peer)
                with suppress(Exception):
                    self._agent.remove_remote_agent(peer)

    def _finish(self, read: _Read, state: str) -> None:
        if read.handle is not None:
            with suppress(Exception):
                self._agent.release_xfer_handle(read.handle)
            read.handle = None
        self._post(partial(self._read_ended, read, state))

    def _post(self, callback: Callable[[], object]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)


def new_agent(name: str, *, is_local: bool) -> Any:
    """Return a NIXL agent with a UCX backend. NIXL is imported late, because the import takes seconds."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # The variable is read during the import.
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.agent = _agent_that_waits(name)
    agent.create_backend("UCX", {"engine_config": ",".join(_ucx_settings(is_local=is_local))})
    return agent


def _agent_that_waits(name: str) -> Any:
    """Return NIXL's own object behind ``nixl_agent``, which has no timeout for events."""
    from nixl import _bindings

    config = _bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = _PROGRESS_WAIT_US
    config.syncMode = _bindings.NIXL_THREAD_SYNC_NONE
    return _bindings.nixlAgent(name, config)


def _ucx_settings(*, is_local: bool) -> list[str]:
    """Return settings of UCX, except those set in the environment."""
    settings = {"TCP_TX_SEG_SIZE": "32k"}  # the default, 8k, halves TCP's throughput
    if is_local:
        settings["NET_DEVICES"] = "lo"
    return [f"{name}={value}" for name, value in settings.items() if f"UCX_{name}" not in os.environ]


def _register(agent: Any, memory: Memory) -> Any:
    return agent.register_memory([(memory.base, memory.rows * memory.row_bytes, 0, "")], "DRAM")
