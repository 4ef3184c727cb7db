"""Stands in for packages that SGLang's modules import and that have no build for the CPU, or no use here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

_MISSING = [name for name in ("torchvision", "gguf") if find_spec(name) is None]


class _Shim(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _MISSING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(__path__=[], __getattr__=lambda name: MagicMock())
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: every name is there when it is asked for."""


def install() -> None:
    """Make the packages importable; where a real one is installed it is used."""
    sys.meta_path.append(_Shim())
