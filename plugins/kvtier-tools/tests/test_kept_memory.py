"""``--memory``: host memory that engines left for their next start is listed and removed."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier._core.slot_trailers import slot_trailers_bytes
from kvtier._memory import guard
from kvtier._memory._locked_file import kept_files
from kvtier._memory.region import Region
from kvtier_tools.root.memory import summary
from tests.caches import Kvtier
from tests.common import wait_until


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """Memory whose guard keeps it for ten minutes."""
    nbytes = slot_trailers_bytes(4)
    with (
        Region.open("one", 4, 4096, tmp_path, nbytes, "model.0 4 slots", keep_s=600.0) as region,
        (tmp_path / "kvtier_one").open("rb") as file,
    ):
        assert region.path == Path(file.name)
        os.close(guard.start(file.name, file.fileno(), 600.0))
    path = tmp_path / "kvtier_one.kept"
    wait_until(path.exists)
    wait_until(lambda: path.stat().st_mtime > time.time() + 300)
    yield path
    path.unlink(missing_ok=True)


def test_kept_memory_is_listed(kvtier: Kvtier, kept: Path) -> None:
    said = kvtier("ls", "--memory", kept.parent, "--json")
    (found,) = json.loads(said.out)["kept"]
    assert (found["path"], found["owner"], found["contents"]) == (str(kept), "model.0", "4 slots")
    assert found["bytes"] == kept.stat().st_size
    assert 300 < found["until"] - time.time() <= 600
    assert "model.0" in kvtier("ls", "--memory", kept.parent).out


def test_kept_memory_is_removed(kvtier: Kvtier, kept: Path) -> None:
    assert "would be removed" in kvtier("gc", "--memory", kept.parent, "--dry-run").out
    assert kept.exists()
    assert kvtier("gc", "--memory", kept.parent).status == 0
    assert not kept.exists()


def test_claimed_memory_is_not_removed(kvtier: Kvtier, kept: Path) -> None:
    with kept.open("r+b") as claimant:
        fcntl.fcntl(claimant, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        said = kvtier("gc", "--memory", kept.parent)
        assert (said.status, kept.exists()) == (1, True)
        assert "its engine has it again" in said.out


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_root_is_required_without_memory(kvtier: Kvtier, command: str) -> None:
    said = kvtier(command)
    assert said.status == 2
    assert "--memory" in said.err


def test_doctor_mentions_kept_memory(kvtier: Kvtier, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_tools.doctor.SHARED_MEMORY", kept.parent)
    said = kvtier("doctor", "--tier", '{"type": "dummy"}')
    assert f"{summary(kept_files(kept.parent))}: see kvtier ls --memory" in said.out
