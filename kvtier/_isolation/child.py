"""The program of the tier process: ``python -m kvtier._isolation.child SOCKET MEMORY``.

Both are descriptors that the engine passes. The process carries out the engine's commands for as long as the
engine is at the other end of the socket, and exits with it. It imports neither torch nor an engine.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
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
from functools import partial
from pathlib import Path

import anyio
from msgspec.structs import asdict

from kvtier._core.messages import Command, Event, ProcessEnded, Reset, SlotsReady, TierDown
from kvtier._execution.executor import Executor, TierActivity
from kvtier._forks import keep_fd_from_children
from kvtier._identity import Identity
from kvtier._isolation import wire
from kvtier._isolation.channel import RETRY_S, Channel
from kvtier._isolation.wire import Hello, Order, Report
from kvtier._log import GuardedLogger
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier.tiers._waiting import call_soon

logger = GuardedLogger("kvtier.executor")

_MOST_FRAMES = 1000
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 500  # Higher than the engine's: if memory runs out, the kernel should kill the engine last.
_LAST_FLUSH_S = 1.0
_STACK_BYTES = 2**20
_PTHREAD_ATTR_BYTES = 256  # more than any C library needs


class _ForwardHandler(logging.Handler):
    """Sends log lines to the engine, whose handlers write them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = wire.log_line(record.levelno, record.name, self.format(record))
            if len(self._channel) < _MOST_FRAMES:  # Otherwise the engine is stopped and reads no lines.
                self._channel.add(wire.pack([line]))
        except Exception:
            self.handleError(record)


class TierServer:
    """Carries out the engine's commands, on an event loop."""

    memory: Region

    def __init__(self, sock: socket.socket, hello: Hello) -> None:
        self._sock = sock
        self.channel = Channel(sock, self._wait_for_room)
        self._hello = hello
        self._reports: list[Report] = []
        self._activity: Sequence[TierActivity] = ()
        self._sent: list[wire.Activity] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = anyio.Event()
        self._drain_by_s = self._end_by_s = 0.0

    async def serve(self) -> None:
        """Serve until the engine sends ``Shutdown``."""
        self._loop = asyncio.get_running_loop()
        tiers = [tier.make() for tier in self._hello.tiers]
        identity = Identity(self._hello.model, json.loads(self._hello.manifest))
        # Repeat earlier resets: only the instance that made a reset sees the chunks put after it.
        resets = [Reset(tier, epoch) for tier, epoch in enumerate(self._hello.epochs) if epoch]
        shape = self._hello.slot_checksums
        checksums = SlotChecksums.shared(self.memory, **asdict(shape)) if shape else None
        async with Executor(tiers, identity, self.memory, self._post, slot_checksums=checksums) as executor:
            self._activity = executor.activity
            executor.submit(resets)
            self._loop.add_reader(self._sock, self._receive, executor)
            await self._leaving.wait()
            await executor.finish(self._drain_by_s, self._end_by_s)
        self._loop.remove_reader(self._sock)
        self._flush()

    def flush_blocking(self) -> None:
        """Send the remaining messages after the loop has ended."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while self.channel.is_full and poll.poll(1000 * _LAST_FLUSH_S):
            self.channel.flush()
            time.sleep(RETRY_S if self.channel.lacks_memory else 0)

    # --- from the engine -------------------------------------------------------------------------

    def _receive(self, executor: Executor) -> None:
        try:
            for frame in self.channel.receive():
                self._carry_out(wire.unpack(wire.ORDERS, frame), executor)
            if self.channel.is_closed:
                os._exit(0)  # The engine is gone, so its slots may belong to another engine at any moment.
        except Exception:
            logger.exception("tier process exits: the engine sent an invalid message")
            os._exit(1)

    def _carry_out(self, orders: list[Order], executor: Executor) -> None:
        commands: list[Command] = []
        for order in orders:
            if isinstance(order, wire.Ping):
                self._report(wire.Pong())
            elif isinstance(order, wire.Shutdown):
                self._drain_by_s = time.monotonic() + order.drain_s
                self._end_by_s = self._drain_by_s + order.close_s
                self._leaving.set()
            else:
                commands.append(order)
        executor.submit(commands)

    # --- to the engine ---------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        assert not isinstance(event, SlotsReady | ProcessEnded), event
        if isinstance(event, TierDown):
            event = TierDown(event.tier, wire.sendable(event.reason))
        self._report(event)

    def _report(self, report: Report) -> None:
        """Send a message at the end of this turn of the loop, in a frame with other messages."""
        if not self._reports and self._loop is not None:
            self._loop.call_soon(self._flush)
        self._reports.append(report)

    def _flush(self) -> None:
        if self._reports:
            reports, self._reports = self._reports, []
            try:
                frame = wire.pack([*self._changed_activities(), *reports])
            except Exception:  # Otherwise the engine would wait for ever for the events in the message.
                logger.exception("tier process exits: a message for the engine cannot be sent")
                os._exit(1)
            self.channel.add(frame)

    def _changed_activities(self) -> list[wire.Activity]:
        now = [wire.activity_of(tier, activity) for tier, activity in enumerate(self._activity)]
        before, self._sent = self._sent, now
        return [activity for activity in now if activity not in before]

    def _wait_for_room(self) -> None:
        if self._loop is not None:  # any thread may call this
            call_soon(self._loop, partial(self._loop.add_writer, self._sock, self._send_more))

    def _send_more(self) -> None:
        assert self._loop is not None
        self.channel.flush()
        if not self.channel.is_full or self.channel.lacks_memory:
            self._loop.remove_writer(self._sock)
        if self.channel.lacks_memory:
            self._loop.call_later(RETRY_S, self._wait_for_room)


def main(arguments: list[str]) -> int:
    """Run the process; return its exit status."""
    _serve_the_engine_first()
    sock, memory_fd = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    for fd in (sock.fileno(), memory_fd):
        # Reset the flag, so that processes started by a tier do not inherit the descriptors.
        os.set_inheritable(fd, False)
    keep_fd_from_children(sock.fileno())
    hello = wire.unpack(wire.HELLO, _first_frame(sock))
    sock.setblocking(False)
    server = TierServer(sock, hello)
    handler = _ForwardHandler(server.channel)
    logging.basicConfig(level=hello.other_log_level, handlers=[handler], format="%(message)s")
    GuardedLogger("kvtier").setLevel(hello.log_level)
    try:
        _limit_resources(hello)
        server.memory = Region.borrowed(memory_fd, hello.slots, hello.chunk_bytes, hello.metadata_bytes)
        anyio.run(server.serve)
    except Exception:
        logger.exception("tier process exits after an error")
        return 1
    finally:
        server.flush_blocking()
    return 0


def _serve_the_engine_first() -> None:
    """Let the kernel prefer the engine, and kill this process when the thread that started it ends.

    If that thread ended before this call, the socket reports it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    with suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + _OOM_SCORE)))
    with suppress(OSError):  # Its wake-ups then do not interrupt the engine's threads for a millisecond each.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _first_frame(sock: socket.socket) -> bytes:
    """Return exactly the engine's first frame. Exit if there is none, because the engine is gone."""
    head = sock.recv(wire.LENGTH_BYTES, socket.MSG_WAITALL)
    frame = sock.recv(wire.length_of(head), socket.MSG_WAITALL) if head else b""
    if not frame:
        sys.exit(0)
    return frame


def _limit_resources(hello: Hello) -> None:
    """Use the CPUs and the memory that the engine allows this process."""
    with suppress(OSError):
        os.sched_setaffinity(0, hello.cpus)
    if hello.memory_limit_bytes is not None:
        # The limit covers private memory, not the engine's shared slots. Stacks count in full.
        _shrink_stacks()
        resource.setrlimit(resource.RLIMIT_DATA, (hello.memory_limit_bytes, hello.memory_limit_bytes))


def _shrink_stacks() -> None:
    """Give later threads small stacks, also in C libraries, because few stacks of 8 MiB would fit."""
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_PTHREAD_ATTR_BYTES)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
    with suppress(AttributeError):  # other C libraries use small stacks anyway
        libc.pthread_setattr_default_np(attributes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
