"""The simulation finds bugs planted in kvtier."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier_testing.sim import run
from tests.sim.mutations import FLEET_MUTATIONS, MUTATIONS, Mutation, planted

SEEDS = range(2_000)
FLEETS = range(200)  # each runs four engines


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_planted_bug_is_found(mutation: Mutation, record_property: Callable[[str, object], None]) -> None:
    _require_found(mutation, SEEDS, 1, record_property)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", FLEET_MUTATIONS, ids=lambda mutation: mutation.name)
def test_peer_bug_is_found(mutation: Mutation, record_property: Callable[[str, object], None]) -> None:
    _require_found(mutation, FLEETS, 4, record_property)


def _require_found(
    mutation: Mutation, seeds: range, engines: int, record_property: Callable[[str, object], None]
) -> None:
    with planted(mutation):
        for seed in seeds:
            try:
                run(seed, engines=engines)
            except Exception as found:
                record_property("found", f"seed {seed}: {type(found).__name__}: {found}")
                return
    pytest.fail(f"{len(seeds)} seeds have not found it")


@pytest.mark.parametrize("mutation", [*MUTATIONS, *FLEET_MUTATIONS], ids=lambda mutation: mutation.name)
def test_bug_can_be_planted(mutation: Mutation) -> None:
    """Check that the mutated code still exists. Only the full tests check that the simulation finds the
    bug."""
    with planted(mutation):
        pass


def test_planting_is_undone() -> None:
    mutation = next(one for one in MUTATIONS if one.name == "checksum_not_verified")
    seed = next(seed for seed in SEEDS if _is_found(mutation, seed))
    run(seed)


def _is_found(mutation: Mutation, seed: int) -> bool:
    with planted(mutation):
        try:
            run(seed)
        except Exception:
            return True
    return False
