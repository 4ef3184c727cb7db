"""Stubs for packages that SGLang's modules import and that have no CPU build or are not needed here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch  # noqa: F401 - before the shims: it does without triton where that is missing

_MISSING = [
    name
    for name in ("torchvision", "gguf", "triton", "IPython", "compressed_tensors")
    if find_spec(name) is None
]


class _Members(type):
    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)


def _attribute(name: str) -> Any:
    """Return a stub for a name in a missing package. If the name looks like a class, the stub is a class."""
    if name.startswith("__"):
        raise AttributeError(name)
    # torch needs instances of some of these classes
    return _Members(name, (), {}) if name[:1].isupper() else MagicMock()


class _Shim(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _MISSING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(__path__=[], __version__="0", __getattr__=_attribute)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: every name is already imported."""


def install() -> None:
    """Make the packages importable; installed ones take precedence."""
    sys.meta_path.append(_Shim())
