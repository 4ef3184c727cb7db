"""Engines that share a tier reuse each other's chunks, except when they must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine.compared import BLOCK_TOKENS
from tests.integration.conftest import Ask
from tests.integration.harness import OUTPUT_TOKENS, PROMPT_CHUNKS, Engine, Launcher, Tokens, prompt
from tests.integration.shared_tiers import SharedTier, shared_tier

pytestmark = pytest.mark.full

ROLES = "tests.integration.pd_roles"
WAIT_S = 60.0
WAITS = {"kvtier": {"wait_s": WAIT_S}}
STEM, OWN, TAIL = 25 * BLOCK_TOKENS, 6 * BLOCK_TOKENS, 8
"""Tokens that the prompts of a family share, that each has for itself, and that fill no chunk."""


def family(number: int) -> list[Tokens]:
    stem = prompt(1000 + number, STEM)
    return [prompt(2000 + 10 * number + one, STEM + OWN + TAIL, shared=stem) for one in range(4)]


FAMILIES = [family(number) for number in range(3)]
ONCE = len(FAMILIES) * (STEM + len(FAMILIES[0]) * (OWN + TAIL))
"""Tokens of all families, each computed once."""


@contextmanager
def started(launcher: Launcher, llama: Path, shared: SharedTier, *numbers: int) -> Iterator[list[Engine]]:
    """Start engines, each already served with the first one's chunks."""
    with ExitStack() as stack:
        engines = []
        for number in numbers:
            tiers = [shared.of(number)]
            settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": tiers, "max_wait_s": WAIT_S}
            engine = launcher.start(llama, settings, environment=shared.environment)
            engines.append(stack.enter_context(engine))
            engine.until_up(shared.name)
            engine.served(prompt(number))
        for number, engine in zip(numbers, engines, strict=True):  # peers are connected when that is answered
            for other in set(numbers) - {number}:
                _, loaded = engine.served(prompt(other), kv_transfer_params=WAITS)
                assert loaded == {shared.name: PROMPT_CHUNKS}
        yield engines


def computed(engines: Sequence[Engine], prompts: Sequence[list[Tokens]]) -> tuple[list[list[Tokens]], int]:
    """Have each engine asked its prompts, all engines at once; return answers, and the tokens computed."""

    def ask(engine: Engine, mine: list[Tokens]) -> dict[str, Any]:
        said = engine.call("computed", module=ROLES, prompts=mine, output_tokens=OUTPUT_TOKENS)
        engine.settled()
        return said

    with ThreadPoolExecutor() as threads:
        said = list(threads.map(ask, engines, prompts))
    return [one["answers"] for one in said], sum(one["computed"] for one in said)


@pytest.mark.parametrize("name", ["redis", "nixl"])
def test_shared_prompts_computed_once(
    launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path, name: str
) -> None:
    with (
        shared_tier(name, tmp_path) as shared,
        started(launcher, llama, shared, 0, 1, 2) as engines,
    ):
        own, first = computed(engines, FAMILIES)
        others = [FAMILIES[(place + 1) % 3] + FAMILIES[(place + 2) % 3] for place in range(3)]
        rest, more = computed(engines, others)
    assert own == [reference(*prompts) for prompts in FAMILIES]
    assert rest == [reference(*prompts) for prompts in others]
    assert first == ONCE
    assert first + more <= 1.1 * ONCE


@pytest.mark.parametrize("has_new_weights", [False, True], ids=["reset", "weights"])
def test_nixl_refuses_other_caches(
    launcher: Launcher,
    llama: Path,
    make_llama: Callable[..., Path],
    reference: Ask,
    tmp_path: Path,
    has_new_weights: bool,
) -> None:
    before, after = prompt(11), prompt(12)
    other_model = make_llama(tmp_path / "other", seed=2)
    with (
        shared_tier("nixl", tmp_path) as shared,
        started(launcher, llama, shared, 0, 1) as (one, other),
    ):
        one.served(before)
        if has_new_weights:
            one.call("reload", weights=str(other_model))
        one.reset()
        of_new, _ = one.served(after)
        served = other.served(before, after)
        settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [shared.of(2)]}
        with launcher.start(other_model, settings, environment=shared.environment) as stranger:
            other.served(prompt(13))
            said_by_stranger = stranger.served(before, prompt(13))
            refusal = "another identity: model, settings or namespace differ"
            stranger.until(lambda _: refusal in stranger.log(), "its log says why it is refused")

    assert served == (reference(before, after), {})
    assert (of_new == reference(after)) is not has_new_weights
    assert said_by_stranger[1] == {}
