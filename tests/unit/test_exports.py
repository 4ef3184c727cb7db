"""``kvtier`` exports every name that its users need, including every error, and the reference lists them."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier import errors

PROJECT = Path(kvtier.__file__).parents[1]


def public_modules() -> Iterator[str]:
    """Yield every module without an underscore in its path."""
    yield "kvtier"
    for found in pkgutil.walk_packages(kvtier.__path__, "kvtier."):
        if not re.search(r"\b_", found.name):
            yield found.name


@pytest.mark.parametrize("module", sorted({*public_modules()} - {"kvtier.adapters", "kvtier.adapters.vllm"}))
def test_reference_lists_exports(module: str) -> None:
    listed = set(re.findall(r"^::: (\S+)", (PROJECT / "docs/reference/api.md").read_text(), re.MULTILINE))
    if module in listed:
        return
    exported = importlib.import_module(module)
    for name in exported.__all__:
        home = getattr(getattr(exported, name), "__module__", "")
        assert {f"{module}.{name}", home} & listed, name


def test_errors_are_exported() -> None:
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(kvtier.__all__)
