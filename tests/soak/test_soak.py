"""The soak's own instruments: they find and name leaks, and ignore figures that merely vary."""

from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.__main__ import Report
from tests.soak.figures import FEWEST_SAMPLES, Bound, ProcessStats, Sample, judge, zombies_of

MIB = 1 << 20
NOISE = random.Random(0)
BOUND = Bound(4, "kills", 0.25, most=200)


def samples(figure: Callable[[int], float], count: int = 36) -> list[Sample]:
    """Make two samples per kill, whose figure is a function of the number of kills so far."""
    return [Sample(4.0 * index, {"kills": 2 * index}, {"it": figure(2 * index)}) for index in range(count)]


@pytest.mark.parametrize(
    ("figure", "is_flat"),
    [
        (lambda kills: 68 - NOISE.choice([0, 0, 0, 8 * NOISE.random()]), True),  # connections come and go
        (lambda kills: min(kills, 20), True),  # warm-up
        (lambda kills: 68 + kills - NOISE.choice([0, 0, 0, 8 * NOISE.random()]), False),
        (lambda kills: max(0, kills - 36), False),  # it begins late
        (lambda kills: 201 if kills == 2 else 68, False),  # beyond the absolute limit, warm-up or not
    ],
)
def test_leak_is_told_from_noise(figure: Callable[[int], float], is_flat: bool) -> None:
    (found,) = judge(samples(figure), {"it": BOUND})
    assert found.is_flat == is_flat


def test_leak_names_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report(4711)
    report.show("flat", samples(lambda _: 68), Counter(requests=12_000), {"it": BOUND})
    assert not report.failures
    report.show("engine", samples(lambda kills: kills), Counter(), {"it": BOUND})
    report.show("short", samples(lambda _: 0, FEWEST_SAMPLES - 1), Counter(), {"it": BOUND})
    assert report.end() == 1
    printed = capsys.readouterr().out
    assert "FAILED: engine: it has grown by 24" in printed
    assert "8 samples are too few" in printed
    assert "--seed 4711" in printed


def test_all_resources_are_seen(tmp_path: Path) -> None:
    gc.collect()  # otherwise garbage of other tests is freed between the two samples
    before = ProcessStats.of(os.getpid(), tmp_path)
    zombies = zombies_of(os.getpid())
    held = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not memory that was freed before
    held.write(os.urandom(8 * MIB))
    with (tmp_path / "file").open("w"), open(os.devnull), open(os.devnull):
        after = ProcessStats.of(os.getpid(), tmp_path)
    assert 7 * MIB < after.memory_bytes - before.memory_bytes < 24 * MIB
    assert after.disk_files - before.disk_files == 1
    assert after.other_files - before.other_files == 2
    held.close()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert zombies_of(os.getpid()) == zombies + 1
    assert zombies_of(os.getpid()) == zombies
