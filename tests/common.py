"""Tools of all tests: import a loose file, wait for a state without an event, inspect processes."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvtier.tiers._supervisor import AnyTier, NamedTier

PATIENCE_S = 60.0


def load_file(name: str, path: Path) -> Any:
    """Import a file that belongs to no package, under this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def named_tier(name: str, tier: AnyTier) -> NamedTier:
    """Return a named tier that opens the same object again and again."""
    return NamedTier(name, lambda: tier)


def wait_until(holds: Callable[[], object]) -> None:
    """Wait, in the test's own thread, until ``holds`` returns true."""
    wait_while(lambda: not holds())


def wait_while(there: Callable[[], object]) -> None:
    """Wait, in the test's own thread, until ``there`` returns false."""
    end_s = time.monotonic() + PATIENCE_S
    while left := there():
        assert time.monotonic() < end_s, left
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    """Return the unreaped processes that threads of a process started."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended meanwhile
                found += map(int, (task / "children").read_text().split())
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; False for a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@contextmanager
def failing_log_handler(fails: Callable[[], object] = lambda: True) -> Iterator[list[str]]:
    """Give kvtier's logger a handler that raises, as on a full disk; yield the lines that it received."""

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if fails():
                raise OSError("no room for the log")

    lines: list[str] = []
    handler, logger = Failing(), logging.getLogger("kvtier")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
