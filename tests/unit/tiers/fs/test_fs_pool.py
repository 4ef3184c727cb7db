"""The native library's threads: assignment of work and completion."""

from __future__ import annotations

import ctypes
import select
import threading
import time
from array import array

import pytest

from kvtier import _native as native
from tests.unit.tiers.fs.library import WORK

pytestmark = pytest.mark.timeout(60)


class Pool:
    """A pool whose work runs in Python: it waits at a gate, and is recorded."""

    def __init__(self, readers, writers):
        assert native.library is not None
        assert native.holding is not None
        self.library, self.holding = native.library, native.holding
        self.address = self.library.kvt_pool_open(readers, writers)
        self.begun = []
        self._lock = threading.Condition()
        self._kept = []

    def submit(self, name, *, reading, chunks=1, part=1, gate=None, token=1):
        def work(_, first, end):
            with self._lock:
                self.begun.append((name, first, end))
                self._lock.notify_all()
            if gate is not None:
                gate.wait(30)
            return end - first

        function = WORK(work)
        self._kept.append(function)
        pointer = ctypes.cast(function, ctypes.c_void_p)
        assert not self.holding.kvt_pool_submit(self.address, pointer, None, chunks, part, reading, token)

    def wait_for(self, holds):
        """Wait until the condition holds for the names of started calls."""
        with self._lock:
            assert self._lock.wait_for(lambda: holds(self.names()), 20), self.begun

    def wait_begun(self, count):
        self.wait_for(lambda names: len(names) >= count)

    def names(self):
        with self._lock:
            return [name for name, _, _ in self.begun]

    def ended(self, count):
        """Wait for ``count`` ends through the descriptor."""
        found: list[tuple[int, int]] = []
        descriptor = self.library.kvt_pool_fd(self.address)
        tokens, sums = array("Q", bytes(8 * 64)), array("q", bytes(8 * 64))
        addresses = tokens.buffer_info()[0], sums.buffer_info()[0]
        while len(found) < count:
            assert select.select([descriptor], [], [], 20)[0]
            got = self.holding.kvt_pool_ended(self.address, *addresses, 64)
            assert got < 64  # with 64, more may remain, and the descriptor does not signal them
            found += zip(tokens[:got], sums[:got], strict=True)
        assert not select.select([descriptor], [], [], 0)[0]
        return found

    def close(self):
        self.library.kvt_pool_close(self.address)


class Moment:
    """A gate that opens after some milliseconds."""

    def wait(self, _):
        time.sleep(0.01)


@pytest.fixture
def make_pool():
    pools = []

    def make(readers, writers):
        pools.append(Pool(readers, writers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_chunks_are_done_once(make_pool):
    pool = make_pool(2, 2)
    pool.submit("a", reading=True, chunks=10, part=3, token=7)
    assert pool.ended(1) == [(7, 10)]
    assert sorted(pool.begun) == [("a", 0, 3), ("a", 3, 6), ("a", 6, 9), ("a", 9, 10)]


def test_look_ups_precede_reads(make_pool):
    pool, gate = make_pool(1, 1), threading.Event()
    pool.submit("hold", reading=0, gate=gate)
    pool.submit("hold", reading=1, gate=gate)
    pool.wait_begun(2)
    getting = threading.Event()
    for _ in range(4):
        pool.submit("get", reading=1, gate=getting)
    pool.submit("look up", reading=2)
    gate.set()
    pool.wait_for(lambda names: "look up" in names)  # if gets go first, both threads hang in gets
    getting.set()
    pool.ended(7)


def test_reads_precede_writes(make_pool):
    pool, gate, writing = make_pool(1, 2), threading.Event(), threading.Event()
    for _ in range(2):  # all three threads are busy: with two writes, and then with a read
        pool.submit("hold", reading=False, gate=gate)
    pool.wait_begun(2)
    pool.submit("hold", reading=True, gate=gate)
    pool.wait_begun(3)
    for _ in range(4):
        pool.submit("write", reading=False, gate=writing)
    for _ in range(4):
        pool.submit("read", reading=True)
    gate.set()
    # One or two writers went on to hanging writes. If writes went first, all threads would hang.
    pool.wait_for(lambda names: names.count("read") == 4 and "write" in names)
    writing.set()
    pool.ended(11)


def test_one_reader_stays_free(make_pool):
    pool, gate = make_pool(2, 2), threading.Event()
    for _ in range(10):
        pool.submit("write", reading=False, gate=gate)
    pool.wait_begun(3)
    time.sleep(0.1)
    assert len(pool.names()) == 3
    pool.submit("read", reading=True, token=5)
    assert pool.ended(1) == [(5, 1)]
    gate.set()
    pool.ended(10)


def test_writers_take_over_reads(make_pool):
    pool, gate = make_pool(1, 2), threading.Event()
    for _ in range(3):
        pool.submit("read", reading=True, gate=gate)
    pool.wait_begun(3)
    gate.set()
    pool.ended(3)


def test_endless_reads_allow_writes(make_pool):
    pool, gate = make_pool(1, 1), threading.Event()
    for _ in range(2):
        pool.submit("hold", reading=True, gate=gate)
    pool.wait_begun(2)
    for _ in range(40):
        pool.submit("read", reading=True, gate=Moment())
    pool.submit("write", reading=False)
    gate.set()
    pool.ended(43)
    assert "write" in pool.names()[:-1]  # the writer can wait, but not for all reads


def test_close_finishes_jobs(make_pool):
    pool = Pool(1, 1)
    for _ in range(20):
        pool.submit("write", reading=False)
    pool.close()
    assert len(pool.begun) == 20
