"""Lives are drawn, printed and made smaller as they should be. No engine."""

from __future__ import annotations

import pytest

from tests.differential import lives
from tests.differential.draws import draw
from tests.differential.lives import Life, code
from tests.differential.models import Model
from tests.differential.mutations import MUTATIONS
from tests.differential.shrink import shrink, smaller
from tests.sim.mutations import planted

SEEDS = range(0, 600, 7)


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


def asks_of(life: Life) -> list[lives.Ask]:
    return [ask for each in life.rounds for ask in each.asks]


def test_bugs_have_names_of_their_own() -> None:
    assert len({bug.name for bug in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_every_bug_can_be_planted() -> None:
    pytest.importorskip("vllm")
    for bug in MUTATIONS:
        with planted(bug):
            pass
