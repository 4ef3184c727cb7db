"""Random lives with many loads and fixed seeds: EAGLE over sliding windows. See ``tests.differential``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.differential.draws import draw
from tests.differential.judges import wrong_counters
from tests.differential.plan import ENOUGH
from tests.differential.world import Stage
from tests.integration.harness import Launcher, Metrics

SEEDS = (2124, 2125)
"""Chosen anew when draws change: chunks of two blocks, sessions, aborts, files that two engines share."""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_drawn_lives_are_right(launcher: Launcher, tmp_path: Path) -> None:
    lives = [draw(seed) for seed in SEEDS]
    (model,) = {life.case.model for life in lives}
    assert model.draft == "eagle"
    assert model.window
    with Stage(launcher, tmp_path, model) as stage:
        for life in lives:
            stage.check(life, warm=True)
            assert stage.loaded.total() > ENOUGH


def test_lost_puts_do_not_add_up() -> None:
    counted = {"kvtier_stored_chunks_total": 8.0, "kvtier_put_chunks_total": 5.0}
    tier = {"type": "fs", "write_policy": "all"}
    dropped = ("kvtier_put_dropped_chunks_total", {"tier": "fs", "reason": "backlog"}, 3.0)
    samples = [(name, {"tier": "fs"}, count) for name, count in counted.items()]
    assert not wrong_counters(Metrics([*samples, dropped]), [tier])
    assert wrong_counters(Metrics(samples), [tier])
