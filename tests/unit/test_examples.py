"""The example policy installs as users install it, and every example has a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# Distributions among the examples. The conformance session installs and tests them.
DISTRIBUTIONS = {"files", "second_chance", "shelf"}


def test_examples_are_tested() -> None:
    """The other examples have their own tests: ``test_pd_proxy``, ``test_transformers_example``."""
    assert not list(EXAMPLES.glob("*.py"))
    assert {path.parent.name for path in EXAMPLES.glob("*/pyproject.toml")} == DISTRIBUTIONS


@pytest.mark.full  # the conformance session runs them, too
def test_policy_example_passes(tmp_path: Path) -> None:
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
