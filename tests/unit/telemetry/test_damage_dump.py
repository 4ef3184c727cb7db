"""Dumps of damaged chunks: only their owner can read them, they are bounded, and they cause no failure."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvtier._telemetry import damage_dump
from kvtier.tiers import LogLimit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "kvtier" / "evidence"


def test_evidence_is_private(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage_dump.write("it differs", {"slot": 3}, slot=b"a" * 10_000, device=b"a" * 9_999 + b"b")
    (said,) = folder.glob("*.json")
    facts = json.loads(said.read_text())
    assert facts == {"what": "it differs", "slot": 3}
    assert said.with_suffix(".device").read_bytes() == b"a" * 9_999 + b"b"
    assert said.with_suffix(".slot").read_bytes() == b"a" * 10_000
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (line,) = caplog.records
    assert line.levelno == logging.ERROR
    assert str(folder) in line.getMessage()
    assert said.stem in line.getMessage()


def test_open_directory_is_closed(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o777)
    damage_dump.write("it differs", {})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_files_are_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(damage_dump, "MOST_BYTES", 5_000)
    monkeypatch.setattr(damage_dump, "_log_limit", LogLimit(60.0))  # other tests may have filled a folder
    for _ in range(damage_dump.MOST_FILES):
        damage_dump.write("it differs", {}, slot=bytes(6_000), device=bytes(6_000))
    files = list(folder.iterdir())
    assert damage_dump.MOST_FILES - 3 <= len(files) <= damage_dump.MOST_FILES
    assert max(path.stat().st_size for path in files) == 5_000
    assert "is full, empty it" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("home", ["a file", "none"])
def test_unwritable_home_falls_back(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    if home == "none":
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    damage_dump.write("it is so", {})
    (kept,) = tmp_path.glob("kvtier-evidence-*/*.json")
    assert "it is so" in kept.read_text()


def test_log_has_unkept_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "somebody's"
    target.mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    (tmp_path / f"kvtier-evidence-{os.getuid()}").symlink_to(target)  # a trap: any user may create one there
    damage_dump.write("it differs", {"slot": 77})
    assert list(target.iterdir()) == []
    assert "cannot be kept" in caplog.text
    assert "77" in caplog.text


FULL = """
import logging, resource, signal, sys
from pathlib import Path
from kvtier._telemetry import damage_dump

logging.basicConfig(format="%(message)s", stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
damage_dump.write("it differs", {"slot": 3}, slot=bytes(20_000), device=bytes(20_000))
"""


def test_excess_evidence_is_whole(folder: Path) -> None:
    """The file size limit causes a short write, as a nearly full disk does."""
    found = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=True)
    assert "the evidence cannot be kept" in found.stdout
    assert list(folder.iterdir()) == []
