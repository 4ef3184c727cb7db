"""For every failure of the tier process, each command ends once, no slot is written late, nothing leaks."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from kvtier._core.messages import Answer, GetEnded, ProcessEnded, PutEnded, Reset, TierDown, TierUp
from kvtier._isolation import link as links
from kvtier._isolation import process as processes
from kvtier._isolation.channel import RETRY_S
from kvtier._isolation.child import TierServer
from kvtier._isolation.heartbeat import Heartbeat, SupervisorTimes
from kvtier._isolation.link import Link
from kvtier.tiers import TRAILER_BYTES, Usage
from tests.common import children, failing_log_handler, is_alive, wait_while

from .conftest import (
    CHUNK_BYTES,
    MUCH,
    PATIENCE_S,
    SLOTS,
    STRICT,
    SWIFT,
    Harness,
    Launch,
    content,
    files,
    make_tier,
)

LESS_LIKELY = [pytest.param(how, marks=pytest.mark.full) for how in ("stopped", "forgotten")]
MISSING, LOCATED, COPIED = Answer.MISSING, Answer.LOCATED, Answer.COPIED


def test_usage_reaches_engine(launch: Launch) -> None:
    it = launch(
        make_tier("dummy", put_latency_s=600, deadline_s=600, capacity_bytes=1 << 20), make_tier("dummy")
    )
    for number in range(6):
        it.put([number])
    slow, other = it.process.activity
    it.until(lambda: (slow.puts.running, slow.puts.waiting) == (4, 2), "the queue")
    assert slow.gets.submitted == other.puts.submitted == 0
    it.hold([7, 8], tier=1)
    it.until(lambda: slow.usage == Usage(0, 1 << 20), "how full it is")
    it.until(lambda: other.usage and other.usage.used_bytes == 2 * (CHUNK_BYTES + TRAILER_BYTES), "the other")


@pytest.mark.usefixtures("reckless")
def test_engine_writes_log_lines(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    it = launch(make_tier("reckless", act="log"))
    it.until(lambda: caplog.records, "a line")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kvtier.reckless", logging.WARNING)
    assert record.getMessage() == "a line with arguments"


def test_lack_of_memory_is_no_busy_loop(launch: Launch) -> None:
    it = launch(make_tier("dummy"))
    it.hold([1])
    link = it.process._link
    attempts, refused = itertools.count(), 20

    def send(*arguments: Any) -> int:
        if next(attempts) < refused:
            raise OSError(errno.ENOBUFS, "no memory for a message")
        return sock.send(*arguments)  # type: ignore[no-any-return]

    sock, link.channel._sock = link._sock, Mock(wraps=link._sock, send=send)
    begun_s = time.monotonic()
    it.hold([2])
    assert time.monotonic() - begun_s > refused / 2 * RETRY_S
    assert it.endings == []


async def test_process_without_memory_lets_loop_run() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        attempts = iter([OSError(errno.ENOBUFS, "no memory")] * 20)

        def send(*arguments: Any) -> int:
            if error := next(attempts, None):
                raise error
            return ours.send(*arguments)

        server = TierServer(Mock(wraps=ours, send=send, fileno=ours.fileno), Mock())
        server._loop = asyncio.get_running_loop()
        begun_s = time.monotonic()
        server.channel.add(b"frame")
        while server.channel.is_full:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        assert time.monotonic() - begun_s > 10 * RETRY_S
        assert theirs.recv(100) == b"frame"


def test_failing_callback_is_retried(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    calls = iter([OSError("no memory for a callback"), None])
    again = threading.Event()

    def notify() -> None:
        if error := next(calls, None):
            raise error
        again.set()

    it = launch(make_tier("dummy"), notify=notify)
    it.until(again.is_set, "the second call")
    it.hold([1])
    assert it.endings == []
    assert "no memory for a callback" in caplog.text


@pytest.mark.parametrize("what", ["the callback", "the log"])
def test_process_ends_before_next(what: str, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    is_armed, is_killed = threading.Event(), threading.Event()

    def fail() -> None:
        if is_armed.is_set():
            raise OSError("no memory for it")

    def check_silence(it: Heartbeat) -> bool:
        return looks(it) or (is_armed.is_set() and not is_killed.is_set())

    class Witness(Link):
        """Each new process checks whether the previous one is gone."""

        def __init__(self, *args: object) -> None:
            left.append(children(os.getpid()))
            super().__init__(*args)  # type: ignore[arg-type]

        def kill(self) -> None:
            is_killed.set()
            super().kill()

    looks = Heartbeat.check_silence
    left: list[list[int]] = []
    before = children(os.getpid())
    monkeypatch.setattr(Heartbeat, "check_silence", check_silence)
    monkeypatch.setattr(processes, "Link", Witness)
    if what == "the log":
        monkeypatch.setattr(processes, "_WARN_S", 0.0)
        monkeypatch.setattr(processes, "_LOOK_S", 0.0)
    with failing_log_handler(fails=is_armed.is_set):
        notify = fail if what == "the callback" else int
        it = launch(make_tier("dummy", put_latency_s=600, deadline_s=600), notify=notify)
        put, pid = it.put([1]), it.pid()
        it.until(lambda: it.process.activity[0].puts.running, "the put")
        is_armed.set()
        assert it.end_of(put).reasons == {"process": 1}
        it.until(lambda: it.is_another(pid), "the next process")
        is_armed.clear()
        it.until_up()
        assert (it.endings, is_alive(pid)) == (["silent"], False)
        assert [set(pids) - set(before) for pids in left] == [set(), set()]


@pytest.mark.usefixtures("reckless")
def test_wordless_error_arrives(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """File names are bytes. Python represents non-UTF-8 ones with lone surrogates."""
    it = launch(make_tier("reckless", act="no_text"), make_tier("dummy"))
    it.until(lambda: any(isinstance(event, TierDown) for event in it.received), "its failure")
    (down,) = [event for event in it.received if isinstance(event, TierDown)]
    assert "/mnt/caf\\udce9" in down.reason
    it.hold([1], tier=1)
    it.until(lambda: "/mnt/caf\\udce9" in caplog.text, "the line about it")


@pytest.mark.usefixtures("reckless")
def test_secrets_stay_out_of_arguments(launch: Launch) -> None:
    it = launch(make_tier("reckless", password="correct-horse"))
    it.hold([1])
    for name in ("cmdline", "environ"):
        assert b"correct-horse" not in Path(f"/proc/{it.pid()}/{name}").read_bytes()


def test_program_imports_no_torch() -> None:
    code = "import sys, kvtier._isolation.child; print({'torch', 'numpy', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_all_engine_cpus_are_allowed(launch: Launch) -> None:
    """The starting process may be bound to its one compute CPU."""
    mine = os.sched_getaffinity(0)
    made: list[Harness] = []

    def start() -> None:
        os.sched_setaffinity(0, {min(mine)})
        made.append(launch(make_tier("dummy")))

    bound = threading.Thread(target=start)
    bound.start()
    bound.join()
    made[0].hold([1])
    assert os.sched_getaffinity(made[0].pid()) == mine


# --- crashes, hangs and kills --------------------------------------------------------------------


def test_killed_commands_end_once(launch: Launch, tmp_path: Path) -> None:
    it = launch(files(tmp_path), make_tier("dummy", put_latency_s=600, deadline_s=600))
    it.hold([1, 2, 3])
    ids = [it.put([4], tier=1), it.put([5], tier=1)]
    for number in range(10, 40):
        ids.append(it.put([number]))
        ids.append(it.fetch([1, 2, 3], [40, 41, 42]))
    os.kill(it.pid(), signal.SIGKILL)
    ends = [it.end_of(id_) for id_ in ids]
    assert [dict(end.reasons) for end in ends[:2]] == [{"process": 1}] * 2
    for end in ends:
        if isinstance(end, GetEnded) and list(end.answers) != [COPIED] * 3:
            assert (list(end.answers), sum(end.reasons.values())) == ([MISSING] * 3, 3)
    assert it.endings == ["killed"]
    it.until_up()
    assert list(it.fetched([1, 2, 3], [50, 51, 52]).answers) == [COPIED] * 3
    assert [it.bytes_in(slot) for slot in (50, 51, 52)] == [content(1), content(2), content(3)]
    assert os.sched_getscheduler(it.pid()) == os.SCHED_BATCH, "it may interrupt the engine's threads"
    it.close()
    ended = [event.id for event in it.received if isinstance(event, PutEnded | GetEnded)]
    assert sorted(ended) == list(range(1, it.submitted + 1))


def test_no_process_fails_commands(launch: Launch) -> None:
    it = launch(
        make_tier("dummy"),
        times=replace(SWIFT, first_pause_s=600, longest_pause_s=600),
    )
    it.hold([1])
    os.kill(it.pid(), signal.SIGKILL)
    it.until(lambda: isinstance(it.received[-1], TierDown), "the end")
    assert [type(event) for event in it.received[-2:]] == [ProcessEnded, TierDown]
    events = len(it.received)
    put, fetch = it.put([2]), it.fetch([1], [10])
    it.take()
    assert [event.id for event in it.received[events:] if isinstance(event, PutEnded | GetEnded)] == [
        put,
        fetch,
    ]
    assert [dict(it.end_of(id_).reasons) for id_ in (put, fetch)] == [{"down": 1}] * 2
    (activity,) = it.process.activity
    it.until(lambda: (activity.puts.submitted, activity.usage) == (0, None), "that it does nothing")


def test_dying_process_answers(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor answers the pending calls; the owner answers those it adds later."""

    class Slow(Link):
        """Dies, and is cleaned up, just before it receives a message."""

        dies = False

        @property
        def epochs(self) -> tuple[int, ...]:
            if Slow.dies and not self.is_over:
                os.kill(self.pid, signal.SIGKILL)
                end_s = time.monotonic() + PATIENCE_S
                while not self.is_over:
                    assert time.monotonic() < end_s
                    time.sleep(0.001)
            return self._epochs

        @epochs.setter
        def epochs(self, epochs: tuple[int, ...]) -> None:
            self._epochs = epochs

    monkeypatch.setattr(processes, "Link", Slow)
    it = launch(make_tier("dummy"))
    it.hold([1])
    Slow.dies = True
    assert it.end_of(it.fetch([1], [10])).reasons == {"process": 1}


@pytest.mark.usefixtures("reckless")
@pytest.mark.parametrize(
    ("act", "ending", "times"),
    [
        pytest.param("segfault", "crashed", SWIFT, id="segfault"),
        pytest.param("exit", "exited", SWIFT, id="exit", marks=pytest.mark.full),
        pytest.param("block", "silent", STRICT, id="block"),
        pytest.param("report_junk", "exited", SWIFT, id="junk"),
    ],
)
def test_crash_or_hang_costs_misses(launch: Launch, act: str, ending: str, times: SupervisorTimes) -> None:
    it = launch(make_tier("reckless", act=act), make_tier("dummy"), times=times)
    it.hold([1])
    it.hold([1], tier=1)
    end = it.fetched([1], [10])
    if act != "report_junk":  # an earlier get may have been answered
        assert (list(end.answers), end.reasons) == ([MISSING], {"process": 1})
    it.until_up()
    assert it.endings[0] == ending
    it.hold([2])


@pytest.mark.usefixtures("reckless")
def test_memory_limit_holds(launch: Launch) -> None:
    it = launch(make_tier("reckless", act="eat"), memory_limit_bytes=512 << 20)
    it.hold([1])
    end = it.fetched([1], [10])  # it would take 4 GiB
    assert list(end.answers) == [MISSING]
    assert set(end.reasons) <= {"error", "process"}
    if it.endings or not is_alive(it.pid()):
        it.until_up()
    it.hold([2])


@pytest.mark.full
def test_lowest_limit_fits_files(launch: Launch, tmp_path: Path) -> None:
    """Stacks of threads count, and each tier has its own threads."""
    both = [make_tier("fs", root_dir=tmp_path / name, **MUCH) for name in ("one", "two")]
    it = launch(*both, memory_limit_bytes=256 << 20)
    for number in range(SLOTS // 2):
        for tier in range(len(both)):
            it.hold([number], tier=tier)
    assert it.endings == []


@pytest.mark.usefixtures("reckless")
def test_stopped_process_spares_slots(launch: Launch, tmp_path: Path) -> None:
    it = launch(make_tier("reckless", act="late", folder=tmp_path, deadline_s=600), times=STRICT)
    it.hold([1])
    fetch = it.fetch([1], [10])
    it.until((tmp_path / "begun").exists, "the get")
    pid = it.pid()
    os.kill(pid, signal.SIGSTOP)
    assert it.end_of(fetch).reasons == {"process": 1}
    assert not is_alive(pid)
    assert it.endings == ["silent"]
    it.region.view(10)[:] = content(2)  # by now the slot belongs to another chunk
    (tmp_path / "go").touch()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.3)
    assert not (tmp_path / "written").exists()
    assert it.bytes_in(10) == content(2)


@pytest.mark.full
@pytest.mark.usefixtures("reckless")
def test_forked_child_spares_slots(launch: Launch, tmp_path: Path) -> None:
    it = launch(make_tier("reckless", act="fork", folder=tmp_path))
    it.hold([1])
    it.region.view(10)[:] = content(2)
    it.fetched([1], [10])
    assert os.WTERMSIG(int((tmp_path / "status").read_text())) == signal.SIGSEGV
    assert it.bytes_in(10) == content(2)


@pytest.mark.full
@pytest.mark.usefixtures("reckless")
def test_grandchildren_are_killed(launch: Launch, tmp_path: Path) -> None:
    it = launch(make_tier("reckless", act="leave_a_child", folder=tmp_path))
    it.hold([1])
    it.fetched([1], [10])
    child = int((tmp_path / "child").read_text())
    assert is_alive(child)
    os.kill(it.pid(), signal.SIGKILL)
    it.until(lambda: not is_alive(child), "its end")


def test_stopped_process_delays_nothing(launch: Launch) -> None:
    """The socket fills up long before: a blocking send would never return."""
    it = launch(make_tier("dummy", deadline_s=PATIENCE_S))
    it.hold(range(20))
    pid = it.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        ids = [it.fetch([*range(20), *range(100, 200)], range(30, 50)) for _ in range(1000)]
        assert not it.ends_of(ids[0])
    finally:
        os.kill(pid, signal.SIGCONT)
    for id_ in ids:
        end = it.end_of(id_)
        assert isinstance(end, GetEnded)
        assert end.answers.count(COPIED) == 20
    assert it.endings == []


# --- starts --------------------------------------------------------------------------------------


@pytest.mark.full
def test_hung_start_is_killed(launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "acme_hangs.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(links, "_PROGRAM", "acme_hangs")
    times = SupervisorTimes(
        heartbeat_s=0.1, start_timeout_s=2.0, first_pause_s=600, longest_pause_s=600
    )  # there is no second process
    it = launch(make_tier("dummy"), times=times)
    pid, put = it.pid(), it.put([1])
    assert it.end_of(put).reasons == {"process": 1}
    assert it.endings == ["not_started"]
    assert not is_alive(pid)


@pytest.mark.usefixtures("reckless")
def test_open_may_hold_gil(launch: Launch, tmp_path: Path) -> None:
    """Importing a large client library does this."""
    it = launch_opening(launch, tmp_path, seconds=3, times=replace(STRICT, silent_timeout_s=0.5))
    it.until(lambda: TierUp(0, 0) in it.received, "the tier")
    assert ProcessEnded not in map(type, it.received[: it.received.index(TierUp(0, 0))])


@pytest.mark.full
@pytest.mark.usefixtures("reckless")
def test_hung_open_is_ended(launch: Launch, tmp_path: Path) -> None:
    times = replace(
        STRICT, silent_timeout_s=600.0, start_timeout_s=10.0, first_pause_s=600, longest_pause_s=600
    )
    it = launch_opening(launch, tmp_path, seconds=1000, times=times)
    it.until(lambda: it.endings == ["silent"], "its end")


def launch_opening(launch: Launch, folder: Path, *, seconds: int, times: SupervisorTimes) -> Harness:
    """Start a process that answers heartbeats until one of its tiers holds the interpreter lock."""
    opening = make_tier("reckless", act="hold_lock_at_start", folder=folder, seconds=seconds, deadline_s=600)
    it = launch(opening, make_tier("dummy"), times=times)
    it.hold([1], tier=1)  # the first ping came earlier
    (folder / "go").touch()
    return it


def test_start_is_retried(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/nonexistent/python")

    it = launch(make_tier("dummy"))  # a failure of the first start raises
    monkeypatch.setattr(processes, "Link", fail)
    os.kill(it.pid(), signal.SIGKILL)
    it.until(lambda: "not_started" in it.endings, "a failed start")
    assert it.end_of(it.put([1])).reasons == {"down": 1}
    monkeypatch.undo()
    it.until_up()
    it.hold([1])


@pytest.mark.full
def test_garbage_sender_is_killed(launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "acme_babbles.py").write_text(
        "import socket, sys, time\n"
        "socket.socket(fileno=int(sys.argv[1])).sendall(b'\\x04\\0\\0\\0oops')\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(links, "_PROGRAM", "acme_babbles")
    it = launch(make_tier("dummy"))
    pid = it.pid()
    it.until(lambda: "garbled" in it.endings, "its end")
    it.until(lambda: not is_alive(pid), "its death")


# --- resets --------------------------------------------------------------------------------------


def test_reset_outlives_process(launch: Launch, tmp_path: Path) -> None:
    it = launch(files(tmp_path))
    it.hold([1])
    it.reset(1)  # the process may or may not receive it
    os.kill(it.pid(), signal.SIGKILL)
    it.until_up()
    assert list(it.fetched([1], [10]).answers) == [MISSING]
    it.hold([2])
    os.kill(it.pid(), signal.SIGKILL)
    it.until(lambda: len(it.endings) == 2, "the second end")
    it.until_up()
    # Chunks put after the reset are lost too: for other engines they could have other weights.
    assert list(it.fetched([1, 2], [10, 11]).answers) == [MISSING] * 2


def test_reset_waits_for_start(launch: Launch, tmp_path: Path) -> None:
    it = launch(files(tmp_path), times=replace(SWIFT, first_pause_s=0.5))
    it.hold([1])
    os.kill(it.pid(), signal.SIGKILL)
    it.until(lambda: it.endings, "the end")  # for half a second there is no process
    it.reset(1)
    it.until_up()
    assert list(it.fetched([1], [10]).answers) == [MISSING]


@pytest.mark.full
def test_reset_during_start_counts(launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process learns the number of resets before the owner can reach it."""
    it = launch(files(tmp_path))
    it.hold([1])
    begin = Link.__init__

    def begin_late(self: Link, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        it.process.submit([Reset(0, 1)])

    monkeypatch.setattr(Link, "__init__", begin_late)
    os.kill(it.pid(), signal.SIGKILL)
    it.until_up()
    assert list(it.fetched([1], [10]).answers) == [MISSING]


# --- shutdown ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("how", ["stopped", "in an endless system call"])
def test_shutdown_keeps_deadline(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Harness(make_tier("dummy", hang_rate=1, deadline_s=600))
    it.process.start()
    put, pid = it.put([1]), it.pid()
    activity = it.process.activity[0]
    it.until(lambda: activity.puts.running, "the put")
    os.kill(pid, signal.SIGSTOP)
    close_s = 4.5  # one third is reserved for the exit of a killed process
    if how != "stopped":
        monkeypatch.setattr(Link, "is_gone", lambda *_: False)
        close_s = 1.5
    begun_s = time.monotonic()
    has_ended = it.process.close(0.5, close_s)
    assert time.monotonic() - begun_s < PATIENCE_S  # the promise is far shorter; a busy machine may be late
    assert has_ended == (how == "stopped")
    if has_ended:
        assert it.end_of(put).reasons == {"cancelled": 1}
    else:
        os.waitpid(pid, 0)
    it.region.close()
    del it
    gc.collect()  # objects abandoned with the process


def test_close_skips_restart(launch: Launch) -> None:
    it = launch(make_tier("dummy"), times=SupervisorTimes(first_pause_s=600, longest_pause_s=600))
    it.hold([1])
    os.kill(it.pid(), signal.SIGKILL)
    it.until(lambda: it.process.pid is None, "the end")
    it.close()


ENGINE = """
import os, signal, sys, time
from kvtier._execution.executor import NamedTier
from kvtier._identity import Identity
from kvtier._isolation.process import ExecutorProcess
from kvtier._memory.region import Region
from kvtier.tiers import _registry as registry
from pathlib import Path

how, folder = sys.argv[1], Path(sys.argv[2])
act = "block_at_once" if how == "blocked" else ""
tier = registry.load("reckless")(registry.validate({"type": "reckless", "act": act, "folder": str(folder)}))
it = ExecutorProcess([NamedTier("tier", lambda: tier)], Identity.make("m", {}), Region.unnamed(4, 4096))
it.start()
while not (it.events or (folder / "begun").exists()):
    time.sleep(0.01)
print(it.pid, flush=True)
if how == "stopped":
    os.kill(it.pid, signal.SIGSTOP)
if how != "forgotten":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("reckless")
@pytest.mark.parametrize("how", ["killed", *LESS_LIKELY])
def test_process_ends_with_engine(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, how, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "acme-reckless")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    pid = int(done.stdout)
    wait_while(lambda: is_alive(pid))


@pytest.mark.full
def test_deaths_leave_nothing(launch: Launch) -> None:
    it = launch(make_tier("dummy"))
    it.hold([1])
    before = resources()
    for _ in range(20):
        pid = it.pid()
        it.put([2])
        os.kill(pid, signal.SIGKILL)
        it.until(partial(it.is_another, pid), "the next one")
    it.until_up()
    it.hold([1])
    assert it.endings == ["killed"] * 20
    until_no_more_than(before)
    it.close()


def resources() -> dict[str, int]:
    """Count the resources that a process can leave behind."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children(os.getpid())),
        "shared memory": len(list(Path("/dev/shm").glob(f"kvtier_{os.getpid()}*"))),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:kvtier"),
    }


def until_no_more_than(before: Mapping[str, int]) -> None:
    """Wait until leftovers, such as a joined thread, are gone."""
    wait_while(lambda: {name: count for name, count in resources().items() if count > before[name]})
