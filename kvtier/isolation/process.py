"""The executor in a process of its own, seen from the engine: commands go and events come, whatever happens.

A thread of the engine, the supervisor, starts the process, hears what it says, and starts another one when
it has ended. A slot that the process was given is given to nobody else before it is certain that it is gone.
"""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from kvtier.core.backoff import Backoff, Chance
from kvtier.core.messages import Command, Event, Fetch, ProcessEnded, Put, Reset, TierDown
from kvtier.errors import IsolationError, StateError
from kvtier.executor import CLOSE_S, NamedTier, failure_of
from kvtier.identity import Identity
from kvtier.isolation import settings, wire
from kvtier.isolation.decoder import MessageDecoder
from kvtier.isolation.heartbeat import Heartbeat, SupervisorTimes
from kvtier.isolation.link import Link, ReadState
from kvtier.isolation.startup import Startup
from kvtier.isolation.wire import CustodyText, Hello, IdentityText, WireError
from kvtier.memory.custody import Custody
from kvtier.memory.region import Region

logger = logging.getLogger("kvtier.executor")

_KILL_SHARE = 1 / 3  # of the seconds after the drain, to end a process that does not end by itself
_LAST_STEP_S = 0.2  # of these, for what follows
_WARN_S = 5.0
_LOOK_S = 0.05
_OWN_FAULTS = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS)
)


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a process has ended, or why it is to end: a word that is counted, and the rest of a sentence."""

    reason: str
    text: str


_HAS_ENDED = _Ending("", "")


class ExecutorProcess:
    """An executor in a process of its own. The same face as ``ExecutorThread``.

    The owner submits and takes from one thread, and waits for nothing. While the process is gone each
    command fails at once; its tiers are down. The next process begins with the resets that were ordered
    so far: what one of before a reset has kept is not seen again.

    Args:
        tiers: the tiers, in the core's order. They are made anew, and opened, in the process.
        identity: the cache that all chunks belong to.
        region: where the slots are; not an anonymous one.
        custody: what audited slots must hold, in the region's board; None where nothing is audited.
        memory_limit_bytes: memory of its own that the process may have; None for any.
        times: how closely it is watched.
        start_wait_s: seconds that ``start`` waits to see whether there can be such a process here; 0 to start
            one again and again where there can not.
        notify: called, by any thread, when there are new events.
        chance: the source of chance, for pauses that differ from engine to engine.

    Attributes:
        events: what has happened, to be taken from the left.
        activity: what each tier was doing when it last said so.

    Raises:
        ConfigError: a tier's settings can not be handed to another process.
        StateError: the region can not be shared, or the custody is not in it.
    """

    def __init__(
        self,
        tiers: Sequence[NamedTier],
        identity: Identity,
        region: Region,
        *,
        custody: Custody | None = None,
        memory_limit_bytes: int | None = None,
        times: SupervisorTimes | None = None,
        start_wait_s: float = 0.0,
        notify: Callable[[], object] = lambda: None,
        chance: Chance = random.random,
    ) -> None:
        region.fileno()  # raises where there is none
        self._custody = None if custody is None else _spell(custody, region)
        self._decoder = MessageDecoder(tiers)
        self.events: deque[Event] = self._decoder.events
        self.activity = self._decoder.activity
        self._settings = [settings.pack(named) for named in tiers]
        self._identity = IdentityText.of(identity)
        self._region = region
        self._memory_limit_bytes = memory_limit_bytes
        self._times = times or SupervisorTimes()
        self._startup = Startup(start_wait_s)
        self._notify = notify
        self._backoff = Backoff(self._times.first_pause_s, self._times.longest_pause_s, chance)
        self._epochs = (0,) * len(tiers)
        self._early: list[Command] | None = []
        self._link: Link | None = None
        self._last_wait = 0
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._forget_wakeup = weakref.finalize(self, os.close, self._wakeup)
        self._forget_wakeup.atexit = False  # the supervisor may wait for it still
        self._closing = False
        self._drain_by_s = self._leave_by_s = self._end_by_s = inf
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-supervisor", daemon=True)

    @property
    def pid(self) -> int | None:
        """The process id of the process of this moment; None where there is none."""
        link = self._link
        return None if link is None else link.pid

    # --- what the owner calls --------------------------------------------------------------------

    def start(self) -> None:
        """Start the process. It opens the tiers meanwhile; where it fails at that, it is tried again.

        Raises:
            IsolationError: it has ended, within ``start_wait_s``, before it had to do with any tier: there can be
                none here. Nothing of it is left.
        """
        self._thread.start()
        self._has_begun.wait()
        if failure := self._startup.wait():
            self.close(0.0)
            raise IsolationError(
                f"the tiers cannot run in a process of their own here: {failure}; set isolation to 'thread'"
            )
        early, self._early = self._early or [], None
        self.submit(early)

    def submit(self, commands: Sequence[Command]) -> None:
        """Hand commands over. Raises nothing: where there is no process they fail at once."""
        if self._early is not None:
            self._early += commands
            return
        before, self._epochs = self._epochs, _after(self._epochs, commands)
        link = self._link  # only now: a process that is started from here on is told of these resets
        if link is None:
            self._refuse(commands)
            return
        missed = [Reset(tier, epoch) for tier, epoch in enumerate(before) if link.epochs[tier] != epoch]
        link.epochs = self._epochs
        for command in commands:
            if isinstance(command, Put | Fetch):
                link.in_flight[command.id] = command
        if missed or commands:
            link.send_queue.add(wire.pack((*missed, *commands)))
        if link.is_over:  # it has ended meanwhile, and the supervisor may have missed these
            self._answer_for(link, "process")

    def when_settled(self, done: Callable[[], object]) -> None:
        """Have ``done`` called, by any thread, when each tier is through with its resets, or is down."""
        self._when(wire.WhenSettled, done)

    def when_drained(self, done: Callable[[], object]) -> None:
        """Have ``done`` called, by any thread, when no put, no fetch and no reset is under way."""
        self._when(wire.WhenDrained, done)

    def close(self, drain_s: float, close_s: float | None = None) -> bool:
        """Let what runs end, for at most ``drain_s`` seconds, close the tiers, end the process.

        Args:
            drain_s: seconds for what is under way.
            close_s: seconds after these for everything else, at whose end the process is killed; default
                ``CLOSE_S``.

        Returns:
            Whether it has ended. Where it is false the system does not let go of it, and it may still
            touch slots: the memory must stay where it is.
        """
        if not self._thread.is_alive():
            self._forget_wakeup()
            return self._link is None
        self.submit(())  # resets that it may have missed
        close_s = CLOSE_S if close_s is None else close_s
        self._drain_by_s = time.monotonic() + drain_s
        self._end_by_s = self._drain_by_s + close_s
        self._leave_by_s = self._end_by_s - _KILL_SHARE * close_s
        self._closing = True
        self._wake()
        self._thread.join(drain_s + close_s)
        if self._thread.is_alive():
            return False
        self._forget_wakeup()
        return self._link is None

    def _when(self, order: type[wire.WhenSettled | wire.WhenDrained], done: Callable[[], object]) -> None:
        self.submit(())
        link = self._link
        if link is None:
            done()
            return
        self._last_wait += 1
        link.waiting[self._last_wait] = done
        link.send_queue.add(wire.pack([order(self._last_wait)]))
        if link.is_over:
            self._answer_for(link, "process")

    def _refuse(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if self._closing:
                self.events.append(TierDown(command.tier, "the executor has ended"))
            self.events.extend(failure_of(command, "down"))
        self._notify()

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    # --- the supervisor --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._live()
                except Exception as error:  # of the owner's callbacks, or ours
                    self._has_begun.set()
                    if self._startup.decide(repr(error)):
                        self._closing = True
                    else:
                        logger.exception("an error ended a process of the tiers; it is started anew")
                if not self._closing:
                    self._sleep(self._backoff.next_s())
        finally:
            self._closing = True
            self._has_begun.set()

    def _live(self) -> None:
        """Start a process, attend to it until it has ended, and answer for what it owes."""
        try:
            link = Link(self._region.fileno(), self._hello(), self._wake)
        except (OSError, StateError) as error:
            self._tell_end(_Ending("not_started", f"it cannot be started: {error}"))
            self._has_begun.set()
            return
        link.waiting[wire.STARTED] = self._startup.decide
        self._link = link
        self._has_begun.set()
        begun_s = time.monotonic()
        heartbeat = Heartbeat(self._times, lambda: link.send_queue.add(wire.pack([wire.Ping()])))
        ending = _Ending("killed", "it was ended after an error of its supervisor")
        try:
            ending = self._attend(link, heartbeat)
        finally:
            self._finish(link, ending)
        if heartbeat.has_started and time.monotonic() - begun_s > 2 * self._times.longest_pause_s:
            self._backoff.start_anew()

    def _hello(self) -> Hello:
        return Hello(
            tiers=self._settings,
            identity=self._identity,
            slots=self._region.slots,
            chunk_bytes=self._region.chunk_bytes,
            board_bytes=len(self._region.board),
            custody=self._custody,
            epochs=list(self._epochs),
            cpus=sorted(_cpus()),
            memory_limit_bytes=self._memory_limit_bytes,
            log_level=logging.getLogger("kvtier").getEffectiveLevel(),
            other_log_level=logging.getLogger().getEffectiveLevel(),
        )

    def _attend(self, link: Link, heartbeat: Heartbeat) -> _Ending:
        """Take in what a process says, until it has ended or is to be ended; say why it is."""
        leave_by_s = inf
        try:
            while not link.is_gone():
                now_s = time.monotonic()
                if self._closing and leave_by_s == inf:
                    leave_by_s = max(now_s, self._leave_by_s)
                    drain_s = min(max(0.0, self._drain_by_s - now_s), leave_by_s - now_s)
                    link.send_queue.add(wire.pack([wire.Leave(drain_s, leave_by_s - now_s - drain_s)]))
                if now_s >= leave_by_s:
                    return _Ending("silent", "has not ended in time")
                if heartbeat.is_overdue():
                    return self._silence(heartbeat)
                link.wait(min(heartbeat.wait_s, leave_by_s - now_s), self._wakeup)
                self._rest()
                link.send_queue.flush()
                self._hear(link, heartbeat)
        except WireError as error:
            return _Ending("garbled", str(error))
        return _HAS_ENDED

    def _hear(self, link: Link, heartbeat: Heartbeat) -> None:
        count = len(self.events)
        for frame in link.receive():
            if self._decoder.decode(frame, link):
                heartbeat.acknowledge()
        if len(self.events) != count:
            self._notify()

    def _silence(self, heartbeat: Heartbeat) -> _Ending:
        if heartbeat.has_started:
            return _Ending("silent", f"its event loop has not run for {self._times.silent_timeout_s:g} s")
        return _Ending("not_started", f"it was not ready within {self._times.start_timeout_s:g} s")

    def _finish(self, link: Link, ending: _Ending) -> None:
        """See a process to its end; when it is gone answer for what it was given."""
        leaves = self._closing
        if not leaves and ending is not _HAS_ENDED:
            self._tell_end(ending, link.pid)
        self._link = None
        link.kill()
        if not self._wait_for_end(link):
            self._link = link  # its slots are touched still, and nobody may have them
            return
        if ending.reason != "garbled":
            self._hear_out(link)
        code = link.reap()
        if not leaves and ending is _HAS_ENDED:
            self._tell_end(_ending_of(code), link.pid)
        link.is_over = True
        self._decoder.clear_activity()
        self._answer_for(link, "cancelled" if leaves else "process")

    def _wait_for_end(self, link: Link) -> bool:
        """Wait until a process that was killed is gone, for as long as that takes, unless all is to end."""
        warn_s = time.monotonic() + _WARN_S
        while not link.is_gone(_LOOK_S):
            now_s = time.monotonic()
            gives_up = self._closing and now_s > self._end_by_s - _LAST_STEP_S
            if now_s > warn_s or gives_up:
                warn_s = inf
                logger.error("process %d of the tiers was killed, but the system does not end it", link.pid)
            if gives_up:
                return False
        return True

    def _hear_out(self, link: Link) -> None:
        """Take in what a process has said before its end: those slots it had let go of."""
        try:
            while link.state is not ReadState.CLOSED:
                for frame in link.receive():
                    self._decoder.decode(frame, link, last=True)
                if link.state is ReadState.DRAINED:
                    return
        except WireError as error:
            logger.warning("the last words of process %d of the tiers: %s", link.pid, error)

    def _tell_end(self, ending: _Ending, pid: int | None = None) -> None:
        """Tell of an end before anything else is: nothing more is asked of the tiers."""
        if self._startup.decide(ending.text):  # by whoever waits for it
            self._closing = True
            return
        who = "the process of the tiers" if pid is None else f"process {pid} of the tiers"
        logger.error("%s: %s; it is started anew", who, ending.text)
        self.events.append(ProcessEnded(ending.reason))
        for tier in range(len(self.activity)):
            self.events.append(TierDown(tier, f"the process of the tiers: {ending.text}"))
        self._notify()

    def _answer_for(self, link: Link, reason: str) -> None:
        """Answer for what a process owes that is gone. Supervisor and owner may both: each takes some."""
        for transfer in list(link.in_flight):
            command = link.in_flight.pop(transfer, None)
            if command is not None:
                self.events.extend(failure_of(command, reason))
        for wait in list(link.waiting):
            done = link.waiting.pop(wait, None)
            if done is not None:
                done()
        self._notify()

    def _sleep(self, pause_s: float) -> None:
        """Pause, unless all is to end."""
        end_s = time.monotonic() + pause_s
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        while not self._closing and (left_s := end_s - time.monotonic()) > 0:
            poll.poll(1000 * left_s)
            self._rest()

    def _rest(self) -> None:
        """Take back the wake-up."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)


def _spell(custody: Custody, region: Region) -> CustodyText:
    return CustodyText(
        custody.offset_in(region), custody.rate, custody.areas, custody.area_bytes, custody.is_shared
    )


def _after(epochs: tuple[int, ...], commands: Sequence[Command]) -> tuple[int, ...]:
    """Return the tiers' epochs after these commands: the same object where there is no reset among them."""
    changed = {command.tier: command.epoch for command in commands if isinstance(command, Reset)}
    return tuple(changed.get(tier, epoch) for tier, epoch in enumerate(epochs)) if changed else epochs


def _ending_of(code: int) -> _Ending:
    """Say how a process has ended, by its exit status."""
    if code >= 0:
        return _Ending("exited", f"it has ended with status {code}")
    number = -code
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return _Ending("crashed" if number in _OWN_FAULTS else "killed", f"it was ended by {name}")


def _cpus() -> set[int]:
    """Return the CPUs that any thread of the engine may run on.

    Engines bind their threads, the one that starts the process among them perhaps: what does not compute
    must not be squeezed onto the CPU of one that does. What the user leaves to the whole engine is kept to.
    """
    cpus = os.sched_getaffinity(0)
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            cpus |= os.sched_getaffinity(int(task))
    return cpus
