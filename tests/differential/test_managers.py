"""Random lives of a manager with real tiers keep every byte, and detect planted bugs."""

from __future__ import annotations

import pytest

from tests.differential import managers
from tests.differential.mutations import OF_MANAGERS
from tests.sim.mutations import MUTATIONS, planted

pytestmark = pytest.mark.blocking(reason="the lives' own loops read and write what they judge")

LIVES = 200
QUICKLY_FOUND = ("pinned_chunks_are_evicted", "commit_before_the_copy_has_ended")
SELDOM_FOUND = (  # found once in hundreds of lives, some depending on thread timing; unit tests cover them
    "keys_of_a_batch_can_be_reordered",
    "lookup_keys_can_be_reordered",
    "slots_are_free_while_a_view_is_left",
    "slots_of_a_batch_can_be_reordered",
)
FOUND = (
    "epoch_not_checked",
    "checksum_not_verified",
    "answers_in_the_wrong_order",
    "failed_get_lands",
    "reset_does_not_reach_tiers",
    "load_that_a_reset_overtakes_counts",
    "reset_forgets_stores_under_way",
    "load_not_pinned",
    "load_released_twice",
    "pin_is_kept_after_a_request",
    "aborted_store_keeps_its_slots",
    "budget_not_given_back",
    "backlog_not_given_back",
    *(bug.name for bug in OF_MANAGERS if bug.name not in SELDOM_FOUND),
)


@pytest.mark.parametrize("seed", range(6))
def test_a_manager_gives_back_what_was_stored(seed: int) -> None:
    managers.run(seed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [*QUICKLY_FOUND, *(pytest.param(name, marks=pytest.mark.full) for name in FOUND)]
)
def test_a_planted_bug_shows(name: str) -> None:
    (mutation,) = [one for one in (*OF_MANAGERS, *MUTATIONS) if one.name == name]
    with planted(mutation), pytest.raises((AssertionError, ExceptionGroup, TimeoutError)):
        [managers.run(seed) for seed in range(LIVES)]
