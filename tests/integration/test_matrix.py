"""No fault of a tier causes a wrong token, a failed request or a long wait; the tier recovers.

One cell: ``pytest tests/integration/test_matrix.py -k "files and hang"``. docs/reliability.md has the table.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask
from tests.integration.faulty_backends import FAULTS, Backend, Files, InEngine, Plain
from tests.integration.harness import (
    OUTPUT_TOKENS,
    PROMPT_CHUNKS,
    TRAFFIC,
    Engine,
    Launcher,
    Metrics,
    Tokens,
    prompt,
)

pytestmark = pytest.mark.full

DEADLINE_S = 1.0
PAUSE_S = 0.25
COMPUTING_S = 4.0
"""Allowance for a busy machine, added to four times the same requests' wait without kvtier."""

LASTS_S = 1.5
ROUNDS = 3
SHOWN_S = 20.0
FILL_S = 60.0
MOST = 0.7
RECOVERY_S = 40.0
"""Twice the longest pause of a breaker, which grows from cell to cell."""

MIDST_S = 0.03
KEPT = [prompt(seed) for seed in range(12)]
COUNTED = (
    "kvtier_get_failed_chunks",
    "kvtier_put_failed_chunks",
    "kvtier_put_dropped_chunks",
    "kvtier_skipped_chunks",
)


class Row:
    """One engine over one tier, under load.

    Attributes:
        answered: the prompts sent, each with its tokens, finish reason and seconds to the first token.
    """

    def __init__(self, backend: Backend, engine: Engine) -> None:
        self.backend, self.engine = backend, engine
        self._prompts: Sequence[Tokens] = ()
        self._kept = itertools.cycle(KEPT)
        self._new = itertools.count(1000)
        self.answered: list[tuple[Tokens, Tokens, str, float]] = []

    def tell(self, new: int) -> None:
        """Send three of the recurring prompts and some new ones."""
        self.engine.reset(connector=False)  # the device's cache would keep those prompts from the tiers
        self._prompts = [next(self._kept) for _ in range(3)] + [prompt(next(self._new)) for _ in range(new)]
        self.engine.tell("call", **sent(self._prompts))

    def hear(self) -> None:
        heard = self.engine.hear("call")
        self.answered += zip(self._prompts, heard["answers"], heard["ends"], heard["waits"], strict=True)

    def ask(self, new: int = 0) -> None:
        self.tell(new)
        self.hear()

    def count(self, name: str) -> float:
        return self.engine.metrics().value(name, tier=self.backend.tier)

    def fill(self) -> None:
        """Send prompts until the tier serves most of the recurring ones."""
        deadline = time.monotonic() + FILL_S
        served = 0.0
        while served < MOST * len(KEPT) * PROMPT_CHUNKS:
            assert time.monotonic() < deadline, f"not served\n{self.engine.metrics()}"
            before = self.count("kvtier_loaded_chunks")
            for _ in range(len(KEPT) // 3):
                self.ask()
                self.engine.settled()
            served = self.count("kvtier_loaded_chunks") - before

    def suffer(self, fault: str) -> set[str]:
        """Send prompts while the fault lasts; return the reasons counted for chunks meanwhile."""
        before = self.engine.metrics()
        self.tell(2)
        time.sleep(MIDST_S)  # gets and puts are in flight
        begun = time.monotonic()
        wanted = self.backend.counted[fault]
        for round_ in itertools.count(1):
            self.backend.begin(fault)
            self.hear()
            reasons = self._reasons(before, self.engine.metrics())
            lasted = time.monotonic() - begun
            if round_ >= ROUNDS and lasted > LASTS_S and (not wanted or wanted & reasons or lasted > SHOWN_S):
                return reasons
            self.tell(2)
        raise AssertionError

    def _reasons(self, before: Metrics, after: Metrics) -> set[str]:
        words = {labels.get("reason", "") for _, labels, _ in after.samples} - {""}
        its = {"tier": self.backend.tier}
        return {
            word
            for name, word in itertools.product(COUNTED, words)
            if after.value(name, **its, reason=word) > before.value(name, **its, reason=word)
        }

    def recover(self) -> None:
        """Send prompts until the tier serves and keeps chunks again."""
        ended = time.monotonic()
        names = ("kvtier_loaded_chunks", "kvtier_put_chunks")
        before = [self.count(name) for name in names]
        while not all(self.count(name) > count for name, count in zip(names, before, strict=True)):
            assert time.monotonic() < ended + RECOVERY_S, f"not used again\n{self.engine.metrics()}"
            self.ask(new=1)


def sent(prompts: Sequence[Tokens]) -> dict[str, Any]:
    arguments = {"prompts": prompts, "output_tokens": OUTPUT_TOKENS}
    return {"module": TRAFFIC, "function": "requests", "arguments": arguments}


@pytest.fixture(scope="module", params=[Files, InEngine, Plain], ids=lambda backend: backend.__name__.lower())
def row(
    request: pytest.FixtureRequest, launcher: Launcher, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Row]:
    with ExitStack() as stack:
        backend: Backend = request.param(tmp_path_factory.mktemp("backend"), stack)
        settings = {
            # Eight of the twelve recurring prompts: with lru each of them must come from the tier.
            "cpu_bytes_to_use": "16MiB",
            "eviction_policy": "lru",
            "request_deadline_s": DEADLINE_S,
            "secondary_tiers": [{"deadline_s": DEADLINE_S, "breaker_pause_s": PAUSE_S, **backend.settings}],
            **backend.more,
        }
        with launcher.start(llama, settings, num_gpu_blocks_override=128, **backend.launch) as engine:
            assert (engine.tiers_process is None) == (backend.more.get("isolation") == "thread")
            yield Row(backend, engine)


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_tier_costs_bounded_time(
    row: Row, reference_engine: Engine, reference: Ask, fault: str
) -> None:
    row.answered.clear()
    row.fill()
    row.answered.clear()
    try:
        reasons = row.suffer(fault)
    finally:
        row.backend.come_back()
    row.recover()
    alone = reference_engine.ask("call", **sent([asked for asked, *_ in row.answered[:5]]))

    prompts, answers, ends, waits = zip(*row.answered, strict=True)
    assert list(answers) == reference(*prompts)
    assert set(ends) == {"length"}
    assert max(waits) < DEADLINE_S + 4 * max(alone["waits"]) + COMPUTING_S, reasons
    wanted = row.backend.counted[fault]
    assert not wanted or wanted & reasons, reasons
