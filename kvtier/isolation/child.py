"""The program of the process of the tiers: ``python -m kvtier.isolation.child SOCKET MEMORY``.

Both are descriptors that the engine hands over. It takes commands from the socket and says there what
came of them, for as long as the engine is at the other end; it ends with the engine, whatever that is
doing. It imports neither torch nor an engine.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc

from kvtier.core.messages import (
    MAX_TEXT,
    Command,
    Event,
    ProcessEnded,
    Reset,
    SlotsReady,
    TierDown,
    TierUp,
)
from kvtier.executor import Executor, TierActivity
from kvtier.forks import keep_fd_from_children
from kvtier.isolation import settings, wire
from kvtier.isolation.send_queue import SendQueue
from kvtier.isolation.wire import Frames, Hello, Order, Report
from kvtier.memory.custody import Custody, custody_bytes
from kvtier.memory.region import Region
from kvtier.tiers.runner import call_soon

logger = logging.getLogger("kvtier.executor")

_READ_BYTES = 256 * 1024
_FULL = 1000
_PR_SET_PDEATHSIG = 1
_KILL_ME_BEFORE_THE_ENGINE = 500
_LAST_WORDS_S = 1.0
_LAST_STEP_S = 0.2  # of a shutdown, for what follows when tiers are closed
_STACK_BYTES = 2**20
_PTHREAD_ATTR_BYTES = 256  # more than any has


class _Forward(logging.Handler):
    """Hands lines of the log to the engine, whose handlers write them beside its own."""

    def __init__(self, send_queue: SendQueue) -> None:
        super().__init__()
        self._send_queue = send_queue

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = wire.log_line(record.levelno, record.name, self.format(record))
            if len(self._send_queue) < _FULL:  # or the engine is stopped, and nobody reads them
                self._send_queue.add(wire.pack([line]))
        except Exception:
            self.handleError(record)


class TierServer:
    """Carries out what the engine orders, on an event loop.

    Args:
        sock: the socket to the engine.
        hello: what it said first.

    Attributes:
        memory: its slots.
        send_queue: what it is told.
    """

    memory: Region

    def __init__(self, sock: socket.socket, hello: Hello) -> None:
        self._sock = sock
        self._frames = Frames()
        self.send_queue = SendQueue(sock, self._wait_for_room)
        self._hello = hello
        self._reports: list[Report] = []
        self._activity: Sequence[TierActivity] = ()
        self._said: list[wire.Activity] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = anyio.Event()
        self._drain_by_s = self._end_by_s = 0.0

    async def serve(self) -> None:
        """Serve until the engine says that it is enough."""
        self._loop = asyncio.get_running_loop()
        tiers = [settings.unpack(tier) for tier in self._hello.tiers]
        identity = self._hello.identity.read()
        async with anyio.create_task_group() as tasks:
            async with Executor(
                tiers, identity, self.memory, self._post, custody=_custody(self._hello, self.memory)
            ) as executor:
                self._activity = executor.activity
                executor.submit(_owed_resets(self._hello.epochs))
                for tier in range(len(tiers)):
                    tasks.start_soon(self._tell_when_up, executor, tier)
                self._loop.add_reader(self._sock, self._hear, executor, tasks)
                await self._leaving.wait()
                with anyio.move_on_after(max(0.0, self._drain_by_s - time.monotonic())):
                    await executor.drained()
                executor.end_by_s = self._end_by_s - _LAST_STEP_S
            self._loop.remove_reader(self._sock)
            tasks.cancel_scope.cancel()
        self._flush()

    def flush_blocking(self) -> None:
        """Send what is left, once the loop has ended."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while self.send_queue.is_full and poll.poll(1000 * _LAST_WORDS_S):
            self.send_queue.flush()

    # --- what the engine says --------------------------------------------------------------------

    def _hear(self, executor: Executor, tasks: anyio.abc.TaskGroup) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                os._exit(0)  # the engine is gone: its slots may be another's at any moment
            for frame in self._frames.feed(data):
                self._obey(wire.unpack_orders(frame), executor, tasks)
        except BlockingIOError:
            pass
        except Exception:
            logger.exception("what the engine says is not understood: the process of the tiers ends")
            os._exit(1)

    def _obey(self, orders: list[Order], executor: Executor, tasks: anyio.abc.TaskGroup) -> None:
        commands: list[Command] = []
        for order in orders:
            if isinstance(order, wire.Ping):
                self._say(wire.Pong())
            elif isinstance(order, wire.WhenSettled | wire.WhenDrained):
                tasks.start_soon(self._tell_when, order, executor)
            elif isinstance(order, wire.Leave):
                self._drain_by_s = time.monotonic() + order.drain_s
                self._end_by_s = self._drain_by_s + order.close_s
                self._leaving.set()
            else:
                commands.append(order)
        executor.submit(commands)

    async def _tell_when(self, order: wire.WhenSettled | wire.WhenDrained, executor: Executor) -> None:
        if isinstance(order, wire.WhenSettled):
            await executor.settled()
        else:
            await executor.drained()
        self._say(wire.Reached(order.id))

    async def _tell_when_up(self, executor: Executor, tier: int) -> None:
        """Tell that a tier can be used: the engine takes it for down since the last process has ended."""
        if await executor.comes_up(tier):
            self._post(TierUp(tier))

    # --- what it is told -------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        assert not isinstance(event, SlotsReady | ProcessEnded), event
        if isinstance(event, TierDown):
            event = TierDown(event.tier, event.reason[:MAX_TEXT])
        self._say(event)

    def _say(self, report: Report) -> None:
        """Say it in a moment, with all that comes until then."""
        if not self._reports and self._loop is not None:
            self._loop.call_soon(self._flush)
        self._reports.append(report)

    def _flush(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            self.send_queue.add(wire.pack([*self._activities(), *reports]))

    def _activities(self) -> list[wire.Activity]:
        """Return what has changed of what the tiers are doing."""
        now = [wire.activity_of(tier, activity) for tier, activity in enumerate(self._activity)]
        before, self._said = self._said, now
        return [activity for activity in now if activity not in before]

    def _wait_for_room(self) -> None:
        if self._loop is not None:
            call_soon(self._loop, self._watch_for_room)

    def _watch_for_room(self) -> None:
        assert self._loop is not None
        self._loop.add_writer(self._sock, self._use_room)

    def _use_room(self) -> None:
        assert self._loop is not None
        self.send_queue.flush()
        if not self.send_queue.is_full:
            self._loop.remove_writer(self._sock)


def main(arguments: list[str]) -> int:
    """Run the process; return its exit status."""
    _end_with_the_engine()
    sock, memory_fd = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    for fd in (sock.fileno(), memory_fd):
        os.set_inheritable(fd, False)  # not for what a tier starts
    keep_fd_from_children(sock.fileno())
    hello = wire.unpack_hello(_first_frame(sock))
    sock.setblocking(False)
    server = TierServer(sock, hello)
    _log_to(server.send_queue, hello)
    try:
        _keep_to(hello)
        server.memory = Region.borrowed(memory_fd, hello.slots, hello.chunk_bytes, hello.board_bytes)
        server.send_queue.add(wire.pack([wire.Reached(wire.STARTED)]))
        anyio.run(server.serve)
    except Exception:
        logger.exception("the process of the tiers ends")
        return 1
    finally:
        server.flush_blocking()
    return 0


def _end_with_the_engine() -> None:
    """Have the system kill this process when the thread of the engine that has started it ends.

    Where that was before, the socket says so. And where memory runs out the engine should be the last to go.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    with suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + _KILL_ME_BEFORE_THE_ENGINE)))


def _first_frame(sock: socket.socket) -> bytes:
    """Read what the engine says first, and no more of it. Where there is nothing the engine is gone."""
    head = sock.recv(wire.LENGTH_BYTES, socket.MSG_WAITALL)
    frame = sock.recv(wire.length_of(head), socket.MSG_WAITALL) if head else b""
    if not frame:
        sys.exit(0)
    return frame


def _log_to(send_queue: SendQueue, hello: Hello) -> None:
    handler = _Forward(send_queue)
    logging.basicConfig(level=hello.other_log_level, handlers=[handler], format="%(message)s")
    logging.getLogger("kvtier").setLevel(hello.log_level)


def _keep_to(hello: Hello) -> None:
    """Use the CPUs and the memory that the engine leaves to this process."""
    with suppress(OSError):
        os.sched_setaffinity(0, hello.cpus)
    if hello.memory_limit_bytes is not None:
        # Of memory of its own; the engine's slots, which are shared, do not count. Stacks do, in full.
        _have_small_stacks()
        resource.setrlimit(resource.RLIMIT_DATA, (hello.memory_limit_bytes, hello.memory_limit_bytes))


def _have_small_stacks() -> None:
    """Give threads from here on stacks of this size, those of libraries too: of 8 MiB few would fit."""
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_PTHREAD_ATTR_BYTES)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
    with suppress(AttributeError):  # other C libraries have small ones anyway
        libc.pthread_setattr_default_np(attributes)


def _custody(hello: Hello, region: Region) -> Custody | None:
    it = hello.custody
    if it is None:
        return None
    words = region.board[it.offset :][: custody_bytes(region.slots, it.areas)]
    return Custody(region, words, it.rate, it.areas, it.area_bytes, is_shared=it.is_shared)


def _owed_resets(epochs: list[int]) -> list[Command]:
    """Return the resets that the engine has ordered of the processes before this one.

    Repeated whether they were done or not: what is put after a reset is for its opener alone.
    """
    return [Reset(tier, epoch) for tier, epoch in enumerate(epochs) if epoch]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
