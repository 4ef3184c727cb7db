"""A region borrowed by another process: it shares the bytes, but not the duties."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier._memory.region import Region
from kvtier.errors import RegionError, StateError

PAGE = 4096


def test_both_share_bytes_and_board() -> None:
    with Region.unnamed(4, PAGE, metadata_bytes=64) as region:
        with Region.borrowed(os.dup(region.fileno()), 4, PAGE, metadata_bytes=64) as other:
            other.view(3)[:] = b"x" * PAGE
            other.metadata[:] = b"y" * 64
            assert bytes(region.view(3)) == b"x" * PAGE
            assert bytes(region.metadata) == b"y" * 64
        assert bytes(region.view(3)) == b"x" * PAGE


def test_smaller_region_is_refused() -> None:
    with Region.unnamed(4, PAGE) as region:
        fd = os.dup(region.fileno())
        with pytest.raises(RegionError, match="has 16384 bytes, but this engine needs 20480"):
            Region.borrowed(fd, 5, PAGE)
        os.close(fd)


def test_anonymous_region_stays() -> None:
    with pytest.raises(StateError, match="anonymous"):
        Region.anonymous(1, PAGE).fileno()


HOLDER = """
import os, subprocess, sys
from pathlib import Path
from kvtier._memory.region import Region

region = Region.open("engine", 4, 4096, Path(sys.argv[1]))
region.claim()
fd = region.fileno()
arguments = [sys.executable, "-c", sys.argv[2], str(fd)]
borrower = subprocess.Popen(arguments, pass_fds=[fd], stdout=subprocess.PIPE)
borrower.stdout.readline()
print(borrower.pid, flush=True)
sys.stdin.read()
"""
BORROWER = """
import sys, time
from kvtier._memory.region import Region
region = Region.borrowed(int(sys.argv[1]), 4, 4096)
print("ready", flush=True)
time.sleep(1000)
"""


def test_borrower_blocks_claim(tmp_path: Path) -> None:
    """For a moment the process could still write to it."""
    engine = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), BORROWER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with engine:
        assert engine.stdout is not None
        borrower = int(engine.stdout.readline())
        pidfd = os.pidfd_open(borrower)
        try:
            engine.kill()
            engine.wait()
            with Region.open("engine", 4, PAGE, tmp_path) as region:
                with pytest.raises(RegionError, match="another running engine"):
                    region.claim()
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                wait_for_end(pidfd)
                region.claim()
        finally:
            os.close(pidfd)


def wait_for_end(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(20_000)
