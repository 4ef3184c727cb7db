"""A new tier made from the example installs, is listed, and passes the conformance suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier_testing import new_tier

EXAMPLES = Path(__file__).parents[3] / "examples"
PAGE = Path(__file__).parents[3] / "docs" / "write-a-tier.md"


def texts(folder: Path) -> dict[str, str]:
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    made_by_tools = (".", "__pycache__")
    return {
        str(name): path.read_text()
        for name, path in files.items()
        if not any(part.startswith(made_by_tools) for part in name.parts)
    }


@pytest.mark.parametrize("template", new_tier.Template)
def test_template_is_the_example(tmp_path: Path, template: new_tier.Template) -> None:
    assert texts(new_tier.create(str(template), tmp_path, template)) == texts(EXAMPLES / template)


@pytest.mark.parametrize("template", new_tier.Template)
def test_no_example_name_is_left(tmp_path: Path, template: new_tier.Template) -> None:
    made = texts(new_tier.create("tape-robot", tmp_path, template))
    assert set(made) == {
        "README.md",
        "pyproject.toml",
        "src/kvtier_tape_robot/__init__.py",
        "tests/test_tape_robot.py",
    }
    spelled = rf"\b{template}\b|_{template}|{template.capitalize()}"
    assert [path for path, text in made.items() if re.search(spelled, text)] == []
    assert 'tape-robot = "kvtier_tape_robot:TapeRobotTier"' in made["pyproject.toml"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Tape", "lower-case letters.*try tape$"),
        ("tape_robot", "try tape-robot$"),
        ("3d", "begins with a letter$"),
        ("", "begins with a letter$"),
        ("tape--robot", "try tape-robot$"),
        ("../tape", "try tape$"),
        ("kvtier-tape", "put in front anyway; try tape$"),
        ("fs", r"the tier of this name is that of kvtier .*FsTier"),
    ],
)
def test_impossible_name_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)NAME = .*{words}"):
        new_tier.create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept(tmp_path: Path) -> None:
    made = new_tier.create("tape", tmp_path)
    (made / "pyproject.toml").write_text("mine")
    with pytest.raises(ConfigError, match="kvtier-tape is there already, and is left as it is"):
        new_tier.create("tape", tmp_path)
    assert (made / "pyproject.toml").read_text() == "mine"


def test_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/kvtier-tape cannot be made: Not a directory"):
        new_tier.create("tape", tmp_path / "file")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_page_is_right(tmp_path: Path) -> None:
    """Its commands are carried out as they stand; pip installs into a folder, and asks no network."""
    pytest.importorskip("hatchling", reason="the build backend of the new distribution is not installed")
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    installed = tmp_path / "installed"
    environment = {
        **os.environ,
        "COLUMNS": "200",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PIP_NO_BUILD_ISOLATION": "0",  # which is pip's way to say that there is to be none
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_TARGET": str(installed),
        "PYTEST_ADDOPTS": "-q -W error -p no:cacheprovider",
        "PYTHONPATH": str(installed),
    }
    done = subprocess.run(
        ["sh", "-euc", "".join(blocks)],
        capture_output=True,
        text=True,
        timeout=380,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"shelf +│ kvtier-shelf +│ 0\.1\.0 +│ yes", done.stdout)
    assert re.search(r"\d+ passed", done.stdout)
