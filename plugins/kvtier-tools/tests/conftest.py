"""The command line in this process, and a cache for its commands; other fixtures are of kvtier's tests."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from kvtier import _cli as cli
from tests.caches import Cache, Kvtier, Said
from tests.conftest import _no_blocking_in_the_loop, anyio_backend
from tests.unit.conftest import acme, install_distribution

__all__ = ["_no_blocking_in_the_loop", "acme", "anyio_backend", "install_distribution"]


@pytest.fixture
def kvtier(monkeypatch: pytest.MonkeyPatch) -> Kvtier:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["kvtier", *map(str, arguments)])
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main()
        status = ended.value.code
        return Said(status if isinstance(status, int) else 0, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A cache on a root that is not there yet."""
    return Cache(tmp_path / "root")
