"""Every example runs as its users run it, without a warning, and prints what it is to show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# For each example its arguments, where {tmp} is a directory of its own, and what it prints.
SHOWS: dict[str, tuple[list[str], list[str]]] = {
    "tensors.py": (
        ["{tmp}/chunks"],
        ["stored 8 chunks", "loaded 8 chunks", "from {'fs': 8}", "the same bytes: True"],
    ),
}


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    arguments, shown = SHOWS[name]
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    command += [argument.format(tmp=tmp_path) for argument in arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == shown
