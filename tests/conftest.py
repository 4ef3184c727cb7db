"""What all tests share: the event loop they run on, and an eye on calls that block it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.effort import effort

# A slow machine is no failure: pytest-timeout bounds each test, and nothing else is timed.
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
    """Coroutine tests run on asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_blocking_in_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a coroutine test in which kvtier's code blocks the event loop.

    Only calls that come from kvtier count. Real engines block in ways that are not kvtier's to mend, and
    a test marked ``blocking`` blocks on purpose. Where blockbuster cannot be imported, as on interpreters
    that it does not patch, tests run without it.
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
