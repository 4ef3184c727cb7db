"""Real agents of NIXL, over TCP on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engines  # The import sets the variables that UCX reads.
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvtier", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvtier")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[engines.Holder]:
    """Another engine's tier, in its own process, with chunks 0 to 7."""
    with engines.Holder(tmp_path / "holder.log") as holder:
        yield holder
