"""A slow tier does not delay requests; requests load from it again once it is fast."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine import gate
from tests.integration.conftest import Ask
from tests.integration.harness import PATIENCE_S, Engine, Launcher, Tokens, prompt
from tests.integration.test_layouts import FULL, STATE, WINDOW, Cache, Case
from tests.integration.test_models import GEMMA_MODEL

PROMPTS = [prompt(seed) for seed in range(6)]  # more than device cache and primary tier hold
SLOW_S = 3.0
SETTINGS = {
    "cpu_bytes_to_use": 40 * 2**17,  # room for a little more than two prompts
    "promotion_budget": 1.0,
    "isolation": "thread",
    "load_gate": "latency",
    "secondary_tiers": [{"type": "dummy"}],
}


def throttle(engine: Engine, latency_s: float) -> None:
    engine.call("throttle", module=gate.__name__, bytes_s=0, latency_s=latency_s)


def ask(engine: Engine, tokens: Sequence[int], expected: Tokens) -> tuple[float, bool]:
    """Return the seconds until the correct answer, and whether it loaded chunks from the tier."""
    before = engine.settled().loaded().get("dummy", 0)
    started = time.monotonic()
    assert engine.generate(tokens) == [expected]
    seconds = time.monotonic() - started
    return seconds, engine.settled().loaded().get("dummy", 0) > before


def test_slow_tier_delays_nothing(launcher: Launcher, llama: Path, reference: Ask) -> None:
    answers = reference(*PROMPTS)
    with launcher.start(llama, SETTINGS, num_gpu_blocks_override=24, max_model_len=640) as engine:
        _throttle_in_turns(engine, answers)


def test_with_sliding_windows(launcher: Launcher, tmp_path: Path) -> None:
    model = launcher.make_model(tmp_path / "model", *GEMMA_MODEL)
    sizes: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 576}
    with launcher.start(model, enable_prefix_caching=False, **sizes) as engine:
        answers = [engine.generate(one)[0] for one in PROMPTS]
    with launcher.start(model, SETTINGS | {"block_size": 64}, **sizes) as engine:
        _throttle_in_turns(engine, answers)


@pytest.mark.parametrize(
    ("case", "judged", "window_chunks"),
    [
        (Case([(FULL, 2)]), 0, 0),
        (Case([(WINDOW, 2), (FULL, 2), (WINDOW, 2)]), 1, 4),
        (Case([(replace(STATE, page_size_padded=FULL.page_size_bytes), 2), (FULL, 2)]), 1, 1),
        (Case([(STATE, 3)]), None, sys.maxsize),
    ],
    ids=["full attention", "windows of two chunks", "states", "states alone"],
)
def test_judged_group(
    case: Case, judged: int | None, window_chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(case, 2)
    cache.register()
    spec = cache.spec
    spec._settings = spec._settings.model_copy(update={"load_gate": "latency"})
    manager: Any = spec.get_manager()
    try:
        assert manager.core.shared.gate.window_chunks == window_chunks
        assert (None if manager._steps is None else manager._steps._group) == judged
    finally:
        cache.connector.shutdown()
        manager.shutdown()
    assert ("load_gate 'latency' has no effect" in caplog.text) is (judged is None)


def _throttle_in_turns(engine: Engine, answers: Sequence[Tokens]) -> None:
    turns = [*zip(PROMPTS, answers, strict=True)]
    throttle(engine, 0.0)
    assert not any(ask(engine, *turn)[1] for turn in turns), "nothing was stored before"
    assert any([ask(engine, *turn)[1] for turn in turns]), "a fast tier is loaded from"

    throttle(engine, SLOW_S)
    for turn in turns:  # some find out
        ask(engine, *turn)
    found: list[Any] = [ask(engine, *turn) for turn in turns]
    assert not any(is_loaded for _, is_loaded in found)
    assert max(seconds for seconds, _ in found) < SLOW_S, "nobody waits for the tier"
    metrics = engine.metrics()
    assert metrics.value("kvtier_misses", reason="gate") > 0
    assert metrics.value("kvtier_expired_requests") == 0

    throttle(engine, 0.0)
    until_s = time.monotonic() + PATIENCE_S
    while not any(ask(engine, *turn)[1] for turn in turns):
        assert time.monotonic() < until_s, f"not loaded from again\n{engine.metrics()}"
