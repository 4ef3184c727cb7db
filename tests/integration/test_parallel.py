"""Engines of several workers share chunks between splits, with correct tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import (
    PROMPT_CHUNKS,
    TWO_RANKS,
    TWO_WORKERS,
    Engine,
    Launcher,
    namespaces,
    primary_tier,
    prompt,
)

FIRST, SECOND = [prompt(1), prompt(2)], [prompt(3), prompt(4)]
CHUNKS = len(FIRST) * PROMPT_CHUNKS
# A layer's canonical shape: tokens, heads, keys and values, numbers, bytes of a number.
PAGE_BYTES = 32 * 2 * 2 * 64 * 4
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 200}
TWO_STAGES: dict[str, Any] = {**ROOM, **TWO_WORKERS, "pipeline_parallel_size": 2}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": "96MiB",
        "secondary_tiers": [_fs(tmp_path / "root")],
    }


def _fs(root: Path, **more: Any) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(root), **more}


def swap_heads(engine: Engine) -> None:
    """Swap the ranks' halves of every canonical page in the primary tier."""
    nbytes, _, region = primary_tier(engine)
    with region.open("r+b") as file:
        held = np.frombuffer(file.read(nbytes), np.uint8)
        file.seek(0)
        file.write(held.reshape(-1, 2, PAGE_BYTES // 2)[:, ::-1].tobytes())


@pytest.mark.full
def test_ranks_share_canonical_chunks(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["canonical_layout"] = True
    with launcher.start(llama, settings, **ROOM) as engine:
        engine.served(*FIRST)
    with launcher.start(llama, settings, **ROOM, **TWO_RANKS) as engine:
        assert len(engine.regions) == 1  # which both ranks share
        by_two, loaded_by_two = engine.served(*FIRST, *SECOND)
        engine.reset(connector=False)
        again, loaded_again = engine.served(*FIRST, *SECOND)
        swap_heads(engine)
        engine.reset(connector=False)
        misled = engine.generate(*FIRST, *SECOND)
    with launcher.start(llama, settings, **ROOM) as engine:
        by_one, loaded_by_one = engine.served(*FIRST, *SECOND)

    assert by_two == again == by_one == reference(*FIRST, *SECOND)
    assert (loaded_by_two, loaded_again, loaded_by_one) == (
        {"fs": CHUNKS},
        {"cpu": 2 * CHUNKS},
        {"fs": 2 * CHUNKS},
    )
    assert all(wrong != right for wrong, right in zip(misled, by_two, strict=True))
    assert len(namespaces(tmp_path / "root")) == 1


@pytest.mark.full
def test_noncanonical_needs_equal_split(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], tmp_path: Path
) -> None:
    with launcher.start(llama, settings, **ROOM, **TWO_RANKS) as engine:
        assert len(engine.regions) == 1
        cold, _ = engine.served(*FIRST)
        engine.reset(connector=False)
        again, loaded_again = engine.served(*FIRST)
        slots = engine.metrics().value("kvtier_slots")
    with launcher.start(llama, settings, **ROOM, **TWO_RANKS) as engine:
        restarted, loaded_restarted = engine.served(*FIRST)
    others = []
    for canonical in (False, True):  # another layout and the canonical one are different caches
        with launcher.start(llama, {**settings, "canonical_layout": canonical}, **ROOM) as engine:
            others.append(engine.served(*FIRST))

    assert cold == again == restarted == reference(*FIRST)
    assert slots == 768  # cpu_bytes_to_use is the total of all workers
    assert (loaded_again, loaded_restarted) == ({"cpu": CHUNKS}, {"fs": CHUNKS})
    assert others == [(cold, {})] * 2
    assert len(namespaces(tmp_path / "root")) == 3


@pytest.mark.full
def test_uneven_stages(
    launcher: Launcher, make_llama: Callable[..., Path], settings: dict[str, Any], tmp_path: Path
) -> None:
    # Three layers and two. The primary tier fits whole slots of either size. A stage that used its own size
    # would find its slots in other places of the same region.
    model = make_llama(tmp_path / "model", num_hidden_layers=5)
    with launcher.start(model, **ROOM) as engine:
        expected = engine.generate(*FIRST)
    with launcher.start(model, settings, **TWO_STAGES) as engine:
        assert len(engine.regions) == 1
        cold, _ = engine.served(*FIRST)
        engine.reset(connector=False)
        again, loaded_again = engine.served(*FIRST)
        slots = engine.metrics().value("kvtier_slots")
    with launcher.start(model, settings, **ROOM) as engine:
        by_one_worker = engine.served(*FIRST)

    assert cold == again == expected
    assert slots == 96 * 2**20 // (2 * 3 * PAGE_BYTES)
    assert loaded_again == {"cpu": CHUNKS}
    assert by_one_worker == (cold, {})
    identities = [json.loads(file.read_text()) for file in (tmp_path / "root").glob("*/config.json")]
    assert sorted(fields["parallel"].get("layers_of_stages", []) for fields in identities) == [[], [3, 2]]
