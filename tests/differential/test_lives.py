"""Lives are drawn, printed and reduced correctly. No engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.differential import draws, lives
from tests.differential.__main__ import Search, parsed
from tests.differential.driver import Request
from tests.differential.lives import Ask, Case, Life, Round, code
from tests.differential.models import Model
from tests.differential.mutations import MUTATIONS, OF_MANAGERS
from tests.differential.plan import ENOUGH, Plan
from tests.differential.shrink import shrink, smaller
from tests.differential.world import Failure
from tests.sim.mutations import planted

SEEDS = range(0, 600, 23)

draw = cache(draws.draw)


def test_a_printed_life_is_the_code_that_makes_it() -> None:
    for seed in SEEDS:
        assert eval(code(draw(seed)), {**vars(lives), "Model": Model}) == draw(seed)


def test_every_text_fits_the_engine() -> None:
    for seed in SEEDS:
        life = draw(seed)
        sizes: dict[int | None, int] = {None: 0}
        for ask in asks_of(life):
            begins = min(sizes[ask.after], ask.keep or life.case.longest)
            prompts = [begins, *(tokens for _, tokens in ask.pieces)]
            said = ask.say + sum(say + sum(tokens for _, tokens in pieces) for pieces, say in ask.more)
            sizes[ask.name] = sum(prompts) + said
            assert 0 < sum(prompts) <= sizes[ask.name] <= life.case.longest


def test_lives_load_what_they_have_stored() -> None:
    plans = [Plan(draw(seed)) for seed in SEEDS]
    assert sum(plan.loads >= ENOUGH for plan in plans) > 0.8 * len(plans)
    assert sum(plan.promotions > 0 for plan in plans) > 0.4 * len(plans)


def test_nothing_is_loaded_after_a_reset() -> None:
    asks = [Ask(number, ((1, 100),)) for number in range(2)]
    rounds = [Round((asks[0],)), Round((asks[1],), before="forget")]
    assert Plan(Life(Case(), tuple(rounds))).loads == 3
    rounds[1] = replace(rounds[1], before="reset")
    assert Plan(Life(Case(), tuple(rounds))).loads == 0


def test_smaller_lives_continue_only_what_they_have() -> None:
    for seed in SEEDS[:9]:
        for life in smaller(draw(seed)):
            known = set()
            for ask in asks_of(life):
                assert ask.after is None or ask.after in known
                known.add(ask.name)


def test_what_is_needed_to_fail_is_left() -> None:
    life = next(life for life in map(draw, SEEDS) if has_a_session(life))
    small = shrink(life, has_a_session, lambda: True)
    assert len(asks_of(small)) == 1
    assert small.probe is None
    assert not small.case.settings


def has_a_session(life: Life) -> bool:
    return any(ask.more for ask in asks_of(life))


@pytest.mark.parametrize(("alone", "is_reported"), [(None, True), ("engine", True), ("tokens", False)])
def test_the_same_failure_without_a_connector_excuses(
    tmp_path: Path, alone: str | None, is_reported: bool
) -> None:
    """Of another kind it can be the test's own: an engine without kvtier cannot do all that a life asks."""
    failures = {True: Failure("tokens", "wrong"), False: Failure(alone, "") if alone else None}
    stage: Any = SimpleNamespace(
        failure=lambda _, connector=True, **__: failures[connector], loaded=Counter[str]()
    )
    launcher: Any = None
    search = Search(launcher, tmp_path, parsed(["--shrink-s", "0"]))
    search._run(stage, 1, draw(1))
    assert bool(search.found) is is_reported


def test_blocks_are_named_without_a_connector() -> None:
    scheduler = SimpleNamespace(connector=None)
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))
    action = {"payload": {"block_hashes": [0.5]}}
    request = Request(engine, {"inputs": [([1], 1)]})
    named = request._named({"kv_hint": {"actions": [action]}})
    assert named == {"kv_hint": {"actions": [{"payload": {"block_hashes": [7]}}]}}


def asks_of(life: Life) -> list[lives.Ask]:
    return [ask for each in life.rounds for ask in each.asks]


def test_bugs_have_names_of_their_own() -> None:
    bugs = (*MUTATIONS, *OF_MANAGERS)
    assert len({bug.name for bug in bugs}) == len(bugs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in vLLM's imports
def test_every_bug_can_be_planted() -> None:
    pytest.importorskip("vllm")
    for bug in (*MUTATIONS, *OF_MANAGERS):
        with planted(bug):
            pass
