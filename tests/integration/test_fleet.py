"""Engines that share a tier reuse each other's chunks, except when they must not. A router names a source."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine.compared import BLOCK_TOKENS
from tests.integration.conftest import Ask
from tests.integration.harness import OUTPUT_TOKENS, PROMPT_CHUNKS, Engine, Launcher, Tokens, prompt
from tests.integration.router import Router
from tests.integration.shared_tiers import SharedTier, shared_tier
from tests.integration.test_disaggregation import PREFILL, Counts
from tests.unit.test_hints import action, envelope

ROLES = "tests.integration.pd_roles"
WAIT_S = 60.0
CPU = ("CPU", None)
WAITS = {"kvtier": {"wait_s": WAIT_S}}
STEM, OWN, TAIL = 25 * BLOCK_TOKENS, 6 * BLOCK_TOKENS, 8
"""Tokens that a family's prompts share, tokens of each prompt alone, and tokens that fill no chunk."""


def family(number: int) -> list[Tokens]:
    stem = prompt(1000 + number, STEM)
    return [prompt(2000 + 10 * number + one, STEM + OWN + TAIL, shared=stem) for one in range(4)]


FAMILIES = [family(number) for number in range(3)]
ONCE = len(FAMILIES) * (STEM + len(FAMILIES[0]) * (OWN + TAIL))
"""Tokens of all families if each is computed once."""


@contextmanager
def started(
    launcher: Launcher, llama: Path, shared: SharedTier, *numbers: int, router: Router | None = None
) -> Iterator[list[Engine]]:
    """Start engines that each have loaded the first one's chunks; a router follows the first one."""
    with ExitStack() as stack:
        engines: list[Engine] = []
        for number in numbers:
            tiers = [shared.of(number)]
            settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": tiers, "max_wait_s": WAIT_S}
            more: dict[str, Any] = {}
            if router is not None:
                settings["self_describing_kv_events"] = True
                more = {"kv_transfer_config": PREFILL, **({} if engines else router.arguments)}
            environment = {**shared.environment, **more.pop("environment", {})}
            engine = launcher.start(llama, settings, environment=environment, **more)
            engines.append(stack.enter_context(engine))
            engine.until_up(shared.name)
            engine.served(prompt(number))
        for number, engine in zip(
            numbers, engines, strict=True
        ):  # once this is answered, peers are connected
            for other in set(numbers) - {number}:
                _, loaded = engine.served(prompt(other), kv_transfer_params=WAITS)
                assert loaded == {shared.name: PROMPT_CHUNKS}
        yield engines


def computed(engines: Sequence[Engine], prompts: Sequence[list[Tokens]]) -> tuple[list[list[Tokens]], int]:
    """Send each engine its prompts, all engines at once; return answers, and the tokens computed."""

    def ask(engine: Engine, mine: list[Tokens]) -> dict[str, Any]:
        said = engine.call("computed", module=ROLES, prompts=mine, output_tokens=OUTPUT_TOKENS)
        engine.settled()
        return said

    with ThreadPoolExecutor() as threads:
        said = list(threads.map(ask, engines, prompts))
    return [one["answers"] for one in said], sum(one["computed"] for one in said)


@pytest.mark.full
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


@pytest.mark.full
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


@dataclass(frozen=True)
class Routed:
    """Two engines behind a router that makes the second one read the first one's chunks."""

    first: Engine
    second: Engine
    router: Router
    shared: SharedTier

    def compute(self, asked: Tokens) -> list[int]:
        """Let the first engine compute a prompt; return the blocks that its KV events report."""
        self.first.served(asked)
        self.router.until(self.first, lambda: len(self.router.chain(CPU, asked)) == PROMPT_CHUNKS)
        return [int.from_bytes(found[-8:], "big") for found in self.router.chain(CPU, asked)]

    def send(self, asked: Tokens, source: int | str, hashes: list[int]) -> dict[str, Any]:
        """Send a prompt to the second engine with Dynamo's message."""
        address = self.shared.of(source)["listen"] if isinstance(source, int) else source
        fetch = action("kv.fetch", "1.0", source_control_endpoint=address, block_hashes=hashes, mode="copy")
        before, counts = self.second.settled().loaded(), Counts(self.second)
        arguments = {"prompt": asked, "params": {"kv_hint": envelope(fetch)}, "output_tokens": OUTPUT_TOKENS}
        said = self.second.call("respond", module=ROLES, **arguments)
        (told,) = said["params"]["kvtier"]["outcomes"]
        loaded = self.second.settled().loaded().get("nixl", 0) - before.get("nixl", 0)
        told = {"outcome": told["outcome"], "reason": told["reason"]}
        return {"answer": said["answer"], **told, "loaded": loaded, "misses": counts.misses()}


@pytest.fixture(scope="module")
def routed(launcher: Launcher, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    folder = tmp_path_factory.mktemp("routed")
    router = Router(f"ipc://{folder}/events")
    with (
        shared_tier("nixl", folder) as shared,
        started(launcher, llama, shared, 0, 1, router=router) as (first, second),
    ):
        router.join(first)
        yield Routed(first, second, router, shared)
    router.close()


def test_fetch_reads_the_source(routed: Routed, reference: Ask) -> None:
    asked = prompt(31)
    expected = {"answer": reference(asked)[0], "outcome": "accepted", "reason": "ok"}
    said = routed.send(asked, 0, routed.compute(asked))
    assert said == {**expected, "loaded": PROMPT_CHUNKS, "misses": {}}


@pytest.mark.parametrize(
    ("seed", "source", "outcome"),
    [(41, 3, ("accepted", "ok")), (42, "203.0.113.1:1", ("rejected", "peer"))],
    ids=["dead", "no_peer"],
)
def test_wrong_source_costs_nothing(
    routed: Routed, reference: Ask, seed: int, source: int | str, outcome: tuple[str, str]
) -> None:
    asked = prompt(seed)
    said = routed.send(asked, source, routed.compute(asked))
    expected = {"answer": reference(asked)[0], "outcome": outcome[0], "reason": outcome[1]}
    assert said == {**expected, "loaded": PROMPT_CHUNKS, "misses": {}}, "the other peers are asked"


@pytest.mark.parametrize(
    ("seed", "source", "outcome"),
    [(51, 0, ("missing", "blocks")), (52, 3, ("missing", "blocks")), (53, "evil:1", ("rejected", "peer"))],
)
def test_lying_fetch_costs_one_miss(
    routed: Routed, reference: Ask, seed: int, source: int | str, outcome: tuple[str, str]
) -> None:
    asked = prompt(seed)
    expected = {"answer": reference(asked)[0], "outcome": outcome[0], "reason": outcome[1]}
    said = routed.send(asked, source, [7, 2**64 - 1])
    assert said == {**expected, "loaded": 0, "misses": {"absent": 1}}


def test_silent_source_costs_one_miss(routed: Routed, reference: Ask) -> None:
    asked = prompt(61)
    expected = {"answer": reference(asked)[0], "outcome": "accepted", "reason": "ok"}
    hashes = routed.compute(asked)
    with ExitStack() as stack:
        for pid in routed.first.processes:
            stack.enter_context(suspended(pid))
        said = routed.send(asked, 0, hashes)
    assert said == {**expected, "loaded": 0, "misses": {"absent": 1}}, "no deadline has passed"


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
