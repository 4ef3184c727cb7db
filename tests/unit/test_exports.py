"""``kvtier`` exports what its users name: every error, and what docstrings and the docs refer to."""

from __future__ import annotations

import ast
import builtins
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier import errors

PROJECT = Path(kvtier.__file__).parents[1]
PAGES = [PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")]
ERROR = re.compile(r"\b[A-Z]\w*Error\b")


def classes_of(module: object) -> set[str]:
    return {name for name, value in vars(module).items() if isinstance(value, type)}


def public_docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
            yield ast.get_docstring(node) or ""


def public_modules() -> Iterator[str]:
    """Yield every module without an underscore in its path."""
    yield "kvtier"
    for found in pkgutil.walk_packages(kvtier.__path__, "kvtier."):
        if not re.search(r"\b_", found.name):
            yield found.name


@pytest.mark.parametrize("name", kvtier.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(kvtier, name) is not None


@pytest.mark.parametrize("module", sorted({*public_modules()} - {"kvtier.adapters", "kvtier.adapters.vllm"}))
def test_the_reference_lists_what_a_public_module_exports(module: str) -> None:
    listed = set(re.findall(r"^::: (\S+)", (PROJECT / "docs/reference/api.md").read_text(), re.MULTILINE))
    if module in listed:
        return
    exported = importlib.import_module(module)
    for name in exported.__all__:
        home = getattr(getattr(exported, name), "__module__", "")
        assert {f"{module}.{name}", home} & listed, name


def test_every_error_is_exported() -> None:
    assert {name for name in classes_of(errors) if name.endswith("Error")} <= set(kvtier.__all__)


def test_every_error_that_the_manager_is_documented_to_raise_is_exported() -> None:
    names = ("_build", "_config", "_identity", "_manager/manager")
    sources = [PROJECT / f"kvtier/{name}.py" for name in names]
    named = {name for path in sources for text in public_docstrings(path) for name in ERROR.findall(text)}
    others = {"ValidationError"}  # pydantic's
    assert named - set(dir(builtins)) - others <= set(kvtier.__all__)


def test_every_name_that_the_docs_import_from_kvtier_is_exported() -> None:
    imported = re.compile(r"^\s*from kvtier import ([\w, ]+)", re.MULTILINE)
    qualified = re.compile(r"\bkvtier\.([A-Z]\w+)")
    for page in PAGES:
        text = page.read_text()
        named = {name.strip() for line in imported.findall(text) for name in line.split(",")}
        assert named | set(qualified.findall(text)) <= set(kvtier.__all__), page
