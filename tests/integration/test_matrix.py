"""Whatever a tier suffers while requests run: no wrong token, no failed request, no long wait; it recovers.

One cell: ``pytest tests/integration/test_matrix.py -k "files and hang"``. docs/reliability.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.conftest import Ask
from tests.integration.faulty_backends import BACKENDS, FAULTS, Backend
from tests.integration.harness import Engine, Launcher
from tests.integration.matrix import Row

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.__name__.lower())
def row(
    request: pytest.FixtureRequest,
    launcher: Launcher,
    llama: Path,
    reference_engine: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Row]:
    backend: Backend = request.param(tmp_path_factory.mktemp("backend"))
    with ExitStack() as stack:
        row = Row(backend, backend.start(stack), launcher, llama, reference_engine)
        stack.callback(row.end)
        yield row
        row.stop()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_costs_no_token_no_request_and_no_time_beyond_the_deadline_and_recovers(
    row: Row, reference: Ask, fault: str
) -> None:
    seen = row.cell(fault)

    for one in seen.answered:
        assert one.answers == reference(*one.prompts)
        assert set(one.ends) == {"length"}
    assert seen.wait_s < seen.allowed_s, seen.reasons
    assert row.backend.shows(fault, seen.reasons), seen.reasons
