"""Every example runs as its users run it, without a warning, and prints what it is to show."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# For each example its arguments, where {tmp} is a directory of its own, and patterns of what it prints.
SHOWS: dict[str, tuple[list[str], list[str]]] = {
    "tensors.py": (
        ["{tmp}/chunks"],
        ["stored 8 chunks", "loaded 8 chunks", "from {'fs': 8}", "the same bytes: True"],
    ),
}


# Distributions among the examples. That of the tier is installed and tested as docs/write-a-tier.md says.
DISTRIBUTIONS = {"second_chance", "shelf"}


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHOWS)
    assert {path.parent.name for path in EXAMPLES.glob("*/pyproject.toml")} == DISTRIBUTIONS


@pytest.mark.parametrize("name", SHOWS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    arguments, shown = SHOWS[name]
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    command += [argument.format(tmp=tmp_path) for argument in arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(shown)
    assert all(fnmatch.fnmatchcase(line, pattern) for line, pattern in zip(lines, shown, strict=True)), lines


@pytest.mark.full  # the conformance session runs them as well
def test_the_example_of_a_policy_installs_and_passes_its_tests(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the build backend of the example is not installed")
    project = shutil.copytree(EXAMPLES / "second_chance", tmp_path / "second_chance")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path / "installed"), str(project)], check=True, timeout=90)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
