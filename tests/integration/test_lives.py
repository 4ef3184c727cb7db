"""Random lives that load much, with fixed seeds: EAGLE over sliding windows. See ``tests.differential``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.differential.draws import draw
from tests.differential.plan import ENOUGH
from tests.differential.world import Stage
from tests.integration.harness import Launcher

SEEDS = (4480, 4473)
"""Chosen anew where draws change: chunks of two blocks and of one, loaded from files too, after restarts."""


@pytest.mark.timeout(900)
def test_drawn_lives_are_right(launcher: Launcher, tmp_path: Path) -> None:
    lives = [draw(seed) for seed in SEEDS]
    (model,) = {life.case.model for life in lives}
    assert model.draft == "eagle"
    assert model.window
    with Stage(launcher, tmp_path, model) as stage:
        for life in lives:
            stage.check(life, warm=True)
            assert stage.loaded["cpu"] > ENOUGH
            assert stage.loaded["fs"] > 0
