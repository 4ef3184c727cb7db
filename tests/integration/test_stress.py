"""Many requests over small tiers: tokens stay right under stores, evictions, promotions and loads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Launcher, Tokens, batches
from tests.integration.test_models import GEMMA_MODEL, LLAMA_MODEL

pytestmark = pytest.mark.full

BATCHES = list(islice(batches(random.Random(1)), 24))
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 120, "max_model_len": 1024, "max_num_batched_tokens": 256}


@pytest.mark.parametrize(
    ("model", "more", "arguments"),
    [
        (LLAMA_MODEL, {"block_size": 64}, {}),
        (GEMMA_MODEL, {"block_size": 64, "offload_prompt_only": False}, {}),
        # Steps end inside chunks, whose first blocks are gone when the last ones are computed.
        (
            GEMMA_MODEL,
            {"blocks_per_chunk": 8},
            {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 320},
        ),
    ],
    ids=["full attention", "sliding windows, answers too", "chunks larger than windows"],
)
def test_answers_match_without_reuse(
    launcher: Launcher,
    tmp_path: Path,
    model: tuple[str, str, dict[str, Any]],
    more: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    directory = launcher.make_model(tmp_path / "model", *model)
    settings = {
        "cpu_bytes_to_use": "8MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
        **more,
    }
    with launcher.start(directory, enable_prefix_caching=False, **SMALL) as engine:
        expected = [engine.generate(*batch) for batch in BATCHES]
    said: list[Sequence[Tokens]] = []
    with launcher.start(directory, settings, **{**SMALL, **arguments}) as engine:
        for number, batch in enumerate(BATCHES):
            said.append(engine.generate(*batch, together=True))
            if number % 4 == 3:
                engine.reset(connector=False)
        metrics = engine.settled()

    assert said == expected
    assert min(metrics.loaded()["cpu"], metrics.loaded()["fs"]) > 20
    assert metrics.value("kvtier_evicted_chunks") > 20
