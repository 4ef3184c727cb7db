"""Fixtures of all tests: the event loop, and the detection of calls that block it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.effort import effort

# A slow machine is no failure: only pytest-timeout bounds a test.
settings.register_profile(
    "kvtier",
    max_examples=effort(100, 200),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvtier")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run coroutine tests on asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_blocking_in_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a coroutine test in which kvtier's code blocks the event loop.

    Only kvtier's own calls count, because real engines block, too. A test marked ``blocking`` blocks on
    purpose. If blockbuster cannot be imported, as on interpreters that it does not patch, tests run without.
    """
    markers = {marker.name for marker in request.node.iter_markers()}
    if "anyio_backend" not in request.fixturenames or markers & {"blocking", "integration", "device"}:
        yield
        return
    try:
        from blockbuster import blockbuster_ctx
    except ImportError:
        yield
        return
    with blockbuster_ctx("kvtier") as blockbuster:
        blockbuster.functions["os.readlink"].can_block_in("kvtier/_forks.py", "_name")  # of /proc/self/fd
        yield
