"""What tests of all kinds do: import a file that is in no package, wait for what nobody tells of."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0


def load_file(name: str, path: Path) -> Any:
    """Import a file that is in no package, under this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def wait_until(holds: Callable[[], object]) -> None:
    """Wait in a thread of the test's own until something holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)
