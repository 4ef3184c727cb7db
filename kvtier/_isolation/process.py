"""The engine's side of an executor in a tier process.

A thread of the engine, the supervisor, starts the process, reads its messages, and starts another one when it
has ended. A slot that the process uses becomes free only when the process has certainly ended.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

from msgspec import convert

from kvtier._core.messages import Command, Get, ProcessEnded, Put, Reset, TierDown
from kvtier._core.tiers.backoff import Backoff
from kvtier._execution.executor import CLOSE_S, LAST_STEP_S, ExecutorThread, NamedTier, failure_of
from kvtier._identity import Identity
from kvtier._isolation import wire
from kvtier._isolation.decoder import MessageDecoder
from kvtier._isolation.heartbeat import Heartbeat, SupervisorTimes
from kvtier._isolation.link import Link, engine_cpus
from kvtier._isolation.wire import Hello, SlotChecksumsLayout, TierSettings, WireError
from kvtier._log import GuardedLogger
from kvtier._memory.region import Region
from kvtier._memory.slot_checksums import SlotChecksums
from kvtier.errors import IsolationError, StateError

logger = GuardedLogger("kvtier.executor")

_KILL_SHARE = 1 / 3  # share of the time after the drain, to end a process that does not exit
_WARN_S = 5.0
_LOOK_S = 0.05
_READS_AT_ONCE = 16
_OWN_FAULTS = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS)
)


@dataclass(frozen=True, slots=True)
class _End:
    """The reason why a process ended or must be killed: a word of ``reasons.PROCESS_ENDED``, and details."""

    reason: str
    text: str


class ExecutorProcess:
    """An executor in a separate process, with the interface of ``ExecutorThread``.

    The owner submits and takes from one thread, and never waits. While no process runs, each command fails at
    once, and the tiers are down. The next process begins with all resets submitted so far, so that chunks
    stored before a reset stay hidden.

    Args:
        tiers: the tiers, in the core's order. The process makes and opens its own. ConfigError if the
            settings of one cannot be sent there.
        region: the memory of the slots. StateError if it is an anonymous one.
        slot_checksums: checksums of audited slots, in the region's metadata; None if chunks are not audited.
        memory_limit_bytes: limit of the process's own memory; None for no limit.
        notify: called by any thread when there are new events. If it raises, it is called again with the next
            heartbeat.
    """

    def __init__(
        self,
        tiers: Sequence[NamedTier],
        identity: Identity,
        region: Region,
        *,
        slot_checksums: SlotChecksums | None = None,
        memory_limit_bytes: int | None = None,
        times: SupervisorTimes | None = None,
        notify: Callable[[], object] = lambda: None,
    ) -> None:
        region.fileno()  # raises if there is none
        self._slot_checksums = slot_checksums
        self._decoder = MessageDecoder(tiers)
        self.events = self._decoder.events  # events, which the owner takes from the left
        self.activity = self._decoder.activity
        self._settings = [TierSettings.of(named) for named in tiers]
        self._identity = identity
        self._region = region
        self._memory_limit_bytes = memory_limit_bytes
        self._times = times or SupervisorTimes()
        self._is_started: Future[None] = Future()
        self._notify = notify
        self._is_notice_due = False  # because ``notify`` raised
        self._backoff = Backoff(self._times.first_pause_s, self._times.longest_pause_s, random.random)
        self._epochs = (0,) * len(tiers)
        self._link: Link | None = None
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close_wakeup = weakref.finalize(self, os.close, self._wakeup)
        self._close_wakeup.atexit = False  # the supervisor may still wait for it
        self._closing = threading.Event()
        self._drain_by_s = self._leave_by_s = self._end_by_s = inf
        self._thread = threading.Thread(target=self._run, name="kvtier-supervisor", daemon=True)

    @property
    def pid(self) -> int | None:
        """The id of the current process; None if no process runs."""
        link = self._link
        return None if link is None else link.pid

    # --- called by the owner ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the process, which then opens the tiers; a tier that fails to open is retried there.

        The engine's start continues meanwhile, because commands wait in the socket until the process reads
        them. A process that ends is restarted, including the first one. IsolationError if none can be started
        here.
        """
        self._thread.start()
        try:
            self._is_started.result()
        except Exception as error:
            self.close(0.0)
            raise IsolationError(
                f"no tier process can run here: {error}; set isolation to 'thread'"
            ) from error

    def submit(self, commands: Sequence[Command]) -> None:
        """Start commands. Raises nothing. If there is no process, the commands fail at once."""
        before, self._epochs = self._epochs, _after(self._epochs, commands)
        # Only now, because a process started from here on receives these resets at its start.
        link = self._link
        if link is None:
            self._refuse(commands)
            return
        missed = [Reset(tier, epoch) for tier, epoch in enumerate(before) if link.epochs[tier] != epoch]
        link.epochs = self._epochs
        for command in commands:
            if isinstance(command, Put | Get):
                link.in_flight[command.id] = command
        if missed or commands:
            link.channel.add(wire.pack((*missed, *commands)))
        # The process has ended meanwhile, and the supervisor may have missed these commands.
        if link.is_over:
            self._fail_pending(link, "process")

    def close(self, drain_s: float, close_s: float = CLOSE_S) -> bool:
        """Drain for at most ``drain_s`` seconds, and end the process within ``close_s`` more.

        Returns whether it ended. If it did not, it may still touch slots, so the memory must stay mapped.
        """
        if self._thread.is_alive():
            self.submit(())  # resets that it may have missed
            self._drain_by_s = time.monotonic() + drain_s
            self._end_by_s = self._drain_by_s + close_s
            self._leave_by_s = self._end_by_s - _KILL_SHARE * close_s
            self._closing.set()
            os.eventfd_write(self._wakeup, 1)
            self._thread.join(drain_s + close_s)
        if self._thread.is_alive():
            return False
        self._close_wakeup()
        return self._link is None

    def _refuse(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if self._closing.is_set():
                self.events.append(TierDown(command.tier, "the executor has ended"))
            self.events.extend(failure_of(command, "down"))
        self._notify_owner()

    def _notify_owner(self) -> None:
        """Call ``notify``.

        Raises nothing, because neither ``submit`` nor the end of a process may be interrupted.
        """
        try:
            self._notify()
        except Exception:
            was_due, self._is_notice_due = self._is_notice_due, True
            if not was_due:  # logged once, as long as it fails
                logger.exception("the callback for new events failed; retrying")
        else:
            self._is_notice_due = False

    # --- the supervisor --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # This thread starts the process, because the kernel ends the process with it.
            self._link = self._new_link()
        except BaseException as error:
            self._closing.set()
            self._is_started.set_exception(error)
            return
        self._is_started.set_result(None)
        try:
            while True:
                try:
                    self._run_process()
                except Exception:
                    logger.exception("tier process killed after an error of its supervisor; restarting")
                if self._closing.wait(self._backoff.next_s()):
                    return
        finally:
            self._closing.set()

    def _run_process(self) -> None:
        """Start a process, supervise it until it has ended, and fail what is still in flight."""
        try:
            link = self._link = self._link or self._new_link()
        except (OSError, StateError) as error:
            self._report_end(_End("not_started", f"it cannot be started: {error}"))
            return
        begun_s = time.monotonic()
        ping = partial(link.channel.add, wire.pack([wire.Ping()]))
        heartbeat = Heartbeat(self._times, ping, lambda: self._decoder.are_all_up)
        end: _End | None = _End("killed", "its supervisor failed")
        try:
            end = self._supervise(link, heartbeat)
        finally:
            self._finish(link, end)
        if heartbeat.has_started and time.monotonic() - begun_s > 2 * self._times.longest_pause_s:
            self._backoff.reset()

    def _new_link(self) -> Link:
        return Link(self._region.fileno(), self._hello(), lambda: os.eventfd_write(self._wakeup, 1))

    def _hello(self) -> Hello:
        return Hello(
            tiers=self._settings,
            model=self._identity.model,
            manifest=self._identity.manifest,
            slots=self._region.slots,
            chunk_bytes=self._region.chunk_bytes,
            metadata_bytes=len(self._region.metadata),
            slot_checksums=convert(self._slot_checksums, SlotChecksumsLayout | None, from_attributes=True),
            epochs=list(self._epochs),
            cpus=sorted(engine_cpus()),
            memory_limit_bytes=self._memory_limit_bytes,
            log_level=GuardedLogger("kvtier").getEffectiveLevel(),
            other_log_level=logging.root.getEffectiveLevel(),
        )

    def _supervise(self, link: Link, heartbeat: Heartbeat) -> _End | None:
        """Read a process's messages until it ends. Return why it must be killed, or None if it ended."""
        leave_by_s = inf
        try:
            while not link.is_gone():
                now_s = time.monotonic()
                if self._closing.is_set() and leave_by_s == inf:
                    leave_by_s = max(now_s, self._leave_by_s)
                    drain_s = min(max(0.0, self._drain_by_s - now_s), leave_by_s - now_s)
                    link.channel.add(wire.pack([wire.Shutdown(drain_s, leave_by_s - now_s - drain_s)]))
                if now_s >= leave_by_s:
                    return _End("silent", "it did not exit in time")
                if heartbeat.check_silence():
                    return self._overdue(heartbeat)
                link.wait(min(heartbeat.wait_s, leave_by_s - now_s), self._wakeup)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
                link.channel.flush()
                self._receive(link, heartbeat)
        except WireError as error:
            return _End("garbled", str(error))
        return None

    def _receive(self, link: Link, heartbeat: Heartbeat) -> None:
        count = len(self.events)
        for frame in link.channel.receive(_READS_AT_ONCE):
            if self._decoder.decode(frame, link):
                heartbeat.acknowledge()
        if len(self.events) != count or self._is_notice_due:
            self._notify_owner()

    def _overdue(self, heartbeat: Heartbeat) -> _End:
        if heartbeat.has_started:
            return _End("silent", f"its event loop has not run for {heartbeat.limit_s:g} s")
        return _End("not_started", f"it was not ready within {heartbeat.limit_s:g} s")

    def _finish(self, link: Link, end: _End | None) -> None:
        """Kill a process; after its end, fail its commands in flight.

        This must not raise: the next process starts afterwards, in slots that must be free by then.
        """
        is_shutdown = self._closing.is_set()
        self._link = None
        link.kill()
        if end is not None and not is_shutdown:
            self._report_end(end, link.pid)
        if not self._wait_for_end(link):
            self._link = link  # The process may still touch its slots, so they stay reserved.
            return
        if end is None or end.reason != "garbled":
            self._receive_rest(link)
        code = link.reap()
        link.is_over = True
        self._decoder.clear_activity()
        if end is None and not is_shutdown:
            self._report_end(_end_of(code), link.pid)
        self._fail_pending(link, "cancelled" if is_shutdown else "process")

    def _wait_for_end(self, link: Link) -> bool:
        """Wait until a killed process is gone, without a limit; during a shutdown only until its deadline."""
        warn_s = time.monotonic() + _WARN_S
        while not link.is_gone(_LOOK_S):
            now_s = time.monotonic()
            gives_up = self._closing.is_set() and now_s > self._end_by_s - LAST_STEP_S
            if now_s > warn_s or gives_up:
                warn_s = inf
                logger.error(
                    "tier process %d does not exit after SIGKILL: it is blocked in the kernel, probably in "
                    "disk I/O",
                    link.pid,
                )
            if gives_up:
                return False
        return True

    def _receive_rest(self, link: Link) -> None:
        """Read the messages sent before a process ended. Those transfers ended, and their slots are free."""
        try:
            for frame in link.channel.receive(inf):
                self._decoder.decode(frame, link, is_last=True)
        except Exception as error:  # Its transfers fail with the others.
            logger.warning("tier process %d: its last messages are malformed: %s", link.pid, error)

    def _report_end(self, end: _End, pid: int | None = None) -> None:
        """Report the end of a process before waiting for it. From now on the tiers get no commands."""
        logger.error("tier process%s ended: %s; restarting", "" if pid is None else f" {pid}", end.text)
        self.events.append(ProcessEnded(end.reason))
        for tier in range(len(self.activity)):
            self.events.append(TierDown(tier, f"the tier process ended: {end.text}"))
        self._notify_owner()

    def _fail_pending(self, link: Link, reason: str) -> None:
        """Fail the commands in flight of an ended process. Supervisor and owner may do so concurrently."""
        for transfer in list(link.in_flight):
            command = link.in_flight.pop(transfer, None)
            if command is not None:
                self.events.extend(failure_of(command, reason))
        self._notify_owner()


AnyExecutor = ExecutorThread | ExecutorProcess
"""An executor that does not block its owner."""


def _after(epochs: tuple[int, ...], commands: Sequence[Command]) -> tuple[int, ...]:
    """Return the tiers' epochs after these commands. Without a reset, it is the same object."""
    changed = {command.tier: command.epoch for command in commands if isinstance(command, Reset)}
    return tuple(changed.get(tier, epoch) for tier, epoch in enumerate(epochs)) if changed else epochs


def _end_of(code: int) -> _End:
    if code >= 0:
        return _End("exited", f"it exited with status {code}")
    number = -code
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return _End("crashed" if number in _OWN_FAULTS else "killed", f"it was ended by {name}")
