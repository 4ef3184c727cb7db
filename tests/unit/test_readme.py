"""The README as a user has it: what it says to install is enough to run its commands and the example."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvtier import _schema as schema

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

_RUN = "import runpy, sys; sys.modules.update(dict.fromkeys({absent})); sys.argv = {argv}; runpy.{how}"


def test_sizes_are_called_sizes_and_what_they_are_is_said() -> None:
    rows = dict(re.findall(r"\| `(\w+)` \| ([^|]+) \|", "".join(schema.tables().values())))
    assert {rows[name] for name in rows if name.endswith("_bytes")} == {rows["cpu_bytes_to_use"]} == {"size"}
    assert "A *size* is a number of bytes" in schema.table()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def needed(extra: str) -> set[str]:
    """Return the distributions that installing kvtier with an extra brings, by their metadata."""
    waiting, seen = [("kvtier", extra)], set[tuple[str, str]]()
    while waiting:
        name, its_extra = waiting.pop()
        if (name, its_extra) in seen:
            continue
        seen.add((name, its_extra))
        try:
            texts = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        for requirement in map(Requirement, texts):
            if requirement.marker is None or requirement.marker.evaluate({"extra": its_extra}):
                waiting += [(canonicalize_name(requirement.name), each) for each in ("", *requirement.extras)]
    return {name for name, _ in seen}


def ended(extra: str, folder: Path, how: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run Python as after ``pip install kvtier[EXTRA]``: modules of other distributions are not found."""
    kept = needed(extra) | needed("")
    absent = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if kept.isdisjoint(map(canonicalize_name, owners))
    ]
    code = _RUN.format(absent=absent, argv=["kvtier", *argv], how=how)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.full
def test_the_python_example_runs_with_what_the_readme_says_to_install(tmp_path: Path) -> None:
    assert "pip install 'kvtier[torch]'" in README
    page = (ROOT / "docs" / "python.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = ended("torch", tmp_path, "run_path('example.py', run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "chunks").rglob("*.bin"))


@pytest.mark.full
@pytest.mark.parametrize("command", ["doctor -h", "ls -h", "tiers", "schema", "new-tier shelf", "--version"])
def test_the_commands_run_without_torch(command: str, tmp_path: Path) -> None:
    done = ended("", tmp_path, "run_module('kvtier')", *command.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text("from kvtier import KVCaches")
    done = ended("", tmp_path, "run_path('example.py')")
    assert "needs numpy, which is not installed: pip install 'kvtier[torch]'" in done.stderr
