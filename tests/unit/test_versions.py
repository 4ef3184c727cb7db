"""The range of vLLM versions is stated consistently, and older ones are refused with a reason."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

OLD_VLLM = """
import sys, types
sys.modules["vllm"] = vllm = types.ModuleType("vllm")
vllm.__version__ = "0.20.1"
import kvtier.adapters.vllm.MODULE
"""


def constant(file: str, name: str) -> ast.expr:
    """Return the value that a module assigns to a name."""
    for node in ast.parse((PROJECT / file).read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign([ast.Name(found)], value) if found == name:
                return value
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                for one, value in zip(names, values, strict=True):
                    if isinstance(one, ast.Name) and one.id == name:
                        return value
    raise LookupError(name)


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.fixture(scope="module")
def supported() -> tuple[tuple[int, int], tuple[int, int]]:
    oldest, newest = (constant("kvtier/adapters/vllm/_compat.py", name) for name in ("OLDEST", "NEWEST"))
    return ast.literal_eval(oldest), ast.literal_eval(newest)


def test_range_ends_are_tested(supported: tuple[tuple[int, int], tuple[int, int]]) -> None:
    oldest, newest = (ast.literal_eval(constant("noxfile.py", name)) for name in ("VLLM_OLDEST", "VLLM_NEXT"))
    assert (release(oldest), release(newest)) == supported


def test_extra_asks_for_range(supported: tuple[tuple[int, int], tuple[int, int]]) -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    (oldest, (major, minor)) = supported
    assert f"vllm>={oldest[0]}.{oldest[1]},<{major}.{minor + 1}" in extras["vllm"]


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md", "kvtier/adapters/vllm/_compat.py"])
def test_range_is_told(supported: tuple[tuple[int, int], tuple[int, int]], page: str) -> None:
    oldest, newest = (".".join(map(str, number)) for number in supported)
    text = " ".join((PROJECT / page).read_text(encoding="utf-8").split())
    assert f"vLLM {oldest} to {newest}" in text or f"vLLM, {oldest} to {newest}" in text


@pytest.mark.parametrize("module", ["spec", "connector"])
def test_incomplete_vllm_is_refused(module: str) -> None:
    script = OLD_VLLM.replace("MODULE", module)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=PROJECT)
    last = run.stderr.splitlines()[-1]
    assert last.startswith("kvtier.errors.ConfigError: ")
    assert "0.31 to 0.33" in last
    assert "0.20.1" in last
