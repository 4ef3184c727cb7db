"""With a sliding window, a request that hits the device cache inside a chunk lacks that chunk's first blocks.

vLLM offers the chunk once its last block is computed. kvtier must not store it: its first blocks would not be
copied, and a later prompt that shares less text reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Engine, Launcher, Tokens, prompt
from tests.integration.test_models import GEMMA_MODEL

CHUNK_TOKENS = 256  # of the default size: eight blocks
WINDOW = {"sliding_window": CHUNK_TOKENS}
FIRST_TURN = prompt(1, 840)  # the next turn hits 832 tokens, whose window begins with block 18
SHORTER = prompt(2, 900, shared=FIRST_TURN[: 3 * CHUNK_TOKENS])  # whose window begins with block 16
OTHERS = [prompt(seed, 530) for seed in (11, 12, 13)]  # six chunks each
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 400}


def chat(engine: Engine, *, between: list[Tokens]) -> list[Tokens]:
    """Send both turns of a chat, and a prompt with the same beginning that the device no longer caches."""
    (answer,) = engine.generate(FIRST_TURN)
    engine.generate(*between)
    engine.settled()
    second_turn = [*FIRST_TURN, *answer, *prompt(3, 40)]
    (later,) = engine.generate(second_turn)
    engine.settled()
    engine.reset(connector=False)
    return [answer, later, *engine.generate(SHORTER)]


@pytest.fixture(scope="module")
def model(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, architecture, fields = GEMMA_MODEL
    return launcher.make_model(
        tmp_path_factory.mktemp("models") / "windows", config, architecture, {**fields, **WINDOW}
    )


@pytest.fixture(scope="module")
def expected(launcher: Launcher, model: Path) -> list[Tokens]:
    with launcher.start(model, **ROOM) as engine:
        return chat(engine, between=OTHERS)


@pytest.mark.parametrize(
    ("more", "between"),
    [({"cpu_bytes_to_use": "6MiB"}, OTHERS), ({"store_threshold": 2}, [])],
    ids=["evicted", "store_threshold"],
)
def test_window_begins_inside_chunk(
    launcher: Launcher, model: Path, expected: list[Tokens], more: dict[str, Any], between: list[Tokens]
) -> None:
    settings = {"cpu_bytes_to_use": "64MiB", "blocks_per_chunk": None, **more}
    with launcher.start(model, settings, **ROOM) as engine:
        answers = chat(engine, between=between)
        dropped = engine.metrics().value("kvtier_dropped_chunks", verb="store", reason="incomplete")
    assert answers == expected
    assert dropped == 2  # one in each window group
