"""Seeds that once have shown something."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier_testing.sim import run

LINES = (Path(__file__).parent / "seeds").read_text().splitlines()
SEEDS = [int(seed) for line in LINES if (seed := line.partition("#")[0].strip())]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_that_once_has_shown_something(seed: int) -> None:
    run(seed)
