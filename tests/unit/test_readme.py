"""The README as a user has it: what it says to install is enough to run its commands and the example."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvtier import _schema as schema

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_sizes_are_called_sizes_and_what_they_are_is_said() -> None:
    rows = dict(re.findall(r"\| `(\w+)` \| ([^|]+) \|", "".join(schema.tables().values())))
    assert {rows[name] for name in rows if name.endswith("_bytes")} == {rows["cpu_bytes_to_use"]} == {"size"}
    assert "A *size* is a number of bytes" in schema.table()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


# ------------------------------------------------------------------------- as a user installs it


def needed(extra: str) -> Iterator[str]:
    """Yield the distributions that installing kvtier with an extra brings, by what the metadata say."""
    waiting, seen = [("kvtier", extra)], set[tuple[str, str]]()
    while waiting:
        name, its_extra = waiting.pop()
        if (name, its_extra) in seen:
            continue
        seen.add((name, its_extra))
        if name != "kvtier":
            yield name
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            wanted = [
                each
                for each in {"", its_extra}
                if requirement.marker is None or requirement.marker.evaluate({"extra": each})
            ]
            if wanted and is_installed(requirement.name):
                waiting += [(requirement.name, each) for each in requirement.extras or {""}]


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def link(name: str, site: Path) -> None:
    """Make a distribution that is installed here importable in another environment, and nothing else."""
    found = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        source = Path(str(found.locate_file(top)))
        if source.exists() and not (site / top).exists():
            (site / top).symlink_to(source)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "kvtier", sources / "kvtier", ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, sources)
    build = "from hatchling.build import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=sources, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


Environment = tuple[Path, dict[str, str]]


@pytest.fixture(params=["", "torch"])
def environment(request: pytest.FixtureRequest, tmp_path: Path, wheel: Path) -> Environment:
    """An environment with the wheel and what its metadata ask for: `pip install kvtier[EXTRA]`, offline."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, site, "zip")
    for name in needed(request.param):
        link(name, site)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV"))}
    return home / "bin" / "python", env


def ended(environment: Environment, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    python, env = environment
    return subprocess.run(
        [str(python), *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )


@pytest.mark.full
@pytest.mark.parametrize("environment", ["torch"], indirect=True)
def test_the_python_example_runs_with_what_the_readme_says_to_install(
    environment: Environment, tmp_path: Path
) -> None:
    assert "pip install 'kvtier[torch]'" in README
    page = (ROOT / "docs" / "python.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = ended(environment, tmp_path, "example.py")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "chunks").rglob("*.bin"))


@pytest.mark.full
@pytest.mark.parametrize("environment", [""], indirect=True)
def test_the_commands_run_without_torch_and_name_what_is_missing(
    environment: Environment, tmp_path: Path
) -> None:
    for arguments in (
        ["doctor", "-h"],
        ["ls", "-h"],
        ["tiers"],
        ["schema"],
        ["new-tier", "shelf"],
        ["--version"],
    ):
        done = ended(environment, tmp_path, "-m", "kvtier", *arguments)
        assert done.returncode == 0, done.stderr
    done = ended(environment, tmp_path, "-m", "kvtier", "demo")
    assert (done.returncode, "pip install kvtier-bench" in done.stderr) == (2, True)
    done = ended(environment, tmp_path, "-c", "from kvtier import KVCaches")
    assert "needs numpy, which is not installed: pip install 'kvtier[torch]'" in done.stderr
