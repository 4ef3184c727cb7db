"""Whatever a tier suffers while requests run: no wrong token, no failed request, no long wait; it recovers.

One cell: ``pytest tests/integration/test_matrix.py -k "redis and hang"``. The table of docs/reliability.md is
written where ``KVTIER_WRITE_MATRIX`` is set, and compared otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration import fuse_mount
from tests.integration.conftest import Ask
from tests.integration.faulty_backends import BACKENDS, FAULTS, Backend, absent
from tests.integration.harness import PROJECT, Engine, Launcher
from tests.integration.matrix import BEGIN, END, HELD, Answered, Page, Row, Seen

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.__name__.lower())
def row(
    request: pytest.FixtureRequest,
    launcher: Launcher,
    llama: Path,
    reference_engine: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Row]:
    backend: Backend = request.param(tmp_path_factory.mktemp("backend"))
    with ExitStack() as stack:
        row = Row(backend, backend.start(stack), launcher, llama, reference_engine)
        stack.callback(row.end)
        yield row
        row.stop()


@pytest.fixture(scope="module")
def page() -> Page:
    """What the cells have shown."""
    return Page()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_costs_no_token_no_request_and_no_time_beyond_the_deadline_and_recovers(
    row: Row, reference: Ask, page: Page, fault: str
) -> None:
    seen = row.cell(fault)

    for one in seen.answered:
        assert one.answers == reference(*one.prompts)
        assert set(one.ends) == {"length"}
    assert seen.wait_s < seen.allowed_s, seen.reasons
    assert row.backend.shows(fault, seen.reasons), seen.reasons
    page.cells[row.backend.name, fault] = seen


def test_a_page_is_compared_by_its_tiers_its_faults_and_its_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"Before.\n\n{BEGIN}{END}\nAfter.\n")
    seen = Seen(during=[Answered([], [], [], [1.23])], reasons=Counter({"timeout": 3}), back_s=2.5)
    page = Page({(backend.name, fault): seen for backend in BACKENDS for fault in FAULTS})
    assert len(page.differences(path)) > len(BACKENDS)
    page.write(path)
    written = path.read_text()
    assert written.startswith("Before.\n")
    assert written.endswith("\nAfter.\n")
    assert page.differences(path) == []
    for figure, other in (("1.2 s", "9.9 s"), ("`timeout`", "`late`"), ("2.5 s", "7.1 s")):
        assert figure in written
        path.write_text(written.replace(figure, other))
        assert page.differences(path) == []
    for verdict, other in ((HELD, "lost"), ("| vanish |", "|"), (BACKENDS[0].name, "tape")):
        path.write_text(written.replace(verdict, other, 1))
        assert page.differences(path) != []
    assert Page().missing == [(backend.name, fault) for backend in BACKENDS for fault in FAULTS]


KILLED = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from tests.integration.fuse_mount import FuseMount, Trouble, memory
files = memory(Path(sys.argv[1], "files"), 1 << 20, ExitStack())
mount = FuseMount(files, Path(sys.argv[1], "root"))
mount.mount()
mount.be(Trouble(hangs=True))
print("hangs", flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_has_mounted_hangs_nobody_and_is_unmounted_by_the_next(tmp_path: Path) -> None:
    if why := fuse_mount.why_not():
        absent(f"no file system can be mounted: {why}")
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "hangs\n"
        looking = subprocess.Popen(["ls", str(tmp_path / "root")], stderr=subprocess.DEVNULL)
        fuse_mount.sweep()
        assert len(mounted_below(tmp_path)) == 2  # it lives
        run.kill()
    assert looking.wait(30) != 0
    fuse_mount.sweep()
    assert mounted_below(tmp_path) == []


def mounted_below(folder: Path) -> list[str]:
    return [line for line in Path("/proc/mounts").read_text().splitlines() if f" {folder}/" in line]


def test_the_page_has_what_was_seen(page: Page) -> None:
    assert page.missing == []
    path = PROJECT / "docs" / "reliability.md"
    if os.environ.get("KVTIER_WRITE_MATRIX"):
        page.write(path)
    assert page.differences(path) == [], "KVTIER_WRITE_MATRIX=1 writes it anew"
