"""Random lives of a manager with real tiers keep every byte, and planted bugs show in them."""

from __future__ import annotations

import pytest

from tests.differential import managers
from tests.sim.mutations import MUTATIONS, planted

pytestmark = pytest.mark.blocking(reason="the lives' own loops read and write what they judge")


@pytest.mark.parametrize("seed", range(6))
def test_a_manager_gives_back_what_was_stored(seed: int) -> None:
    managers.run(seed)


@pytest.mark.parametrize("name", ["commit_before_the_copy_has_ended", "reset_does_not_reach_tiers"])
def test_a_planted_bug_shows(name: str) -> None:
    (mutation,) = [one for one in MUTATIONS if one.name == name]
    with planted(mutation), pytest.raises((AssertionError, ExceptionGroup)):
        [managers.run(seed) for seed in range(8)]
