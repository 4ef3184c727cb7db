"""Real pools. Tests share the one with session scope and must not disturb it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from pools import Pool

settings.register_profile(
    "kvtier", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvtier")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def own_pool(tmp_path: Path) -> Iterator[Pool]:
    """A pool for a single test, which may disturb it."""
    with Pool(tmp_path / "own", 256 << 20) as pool:
        yield pool
