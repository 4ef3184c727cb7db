"""Speculative decoding, with hybrid models too: the same tokens as without kvtier, also after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LLAMA, in_full
from tests.integration.harness import Launcher
from tests.integration.test_models import GEMMA_MODEL, LLAMA_MODEL, run_all

NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}

Drafter = Callable[[Launcher, Path], dict[str, Any]]
"""Makes the model's drafter in a directory, and returns vLLM's arguments for it."""


def ngram(launcher: Launcher, target: Path) -> dict[str, Any]:
    return NGRAM


def draft_model(launcher: Launcher, target: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(_small_llama(launcher, target))}


def eagle(launcher: Launcher, target: Path) -> dict[str, Any]:
    head = target.with_name("eagle")
    _call(launcher, "add_eagle_head", directory=str(head), source=str(_small_llama(launcher, target)))
    return {"method": "eagle", "model": str(head)}


def _small_llama(launcher: Launcher, target: Path) -> Path:
    shape = json.loads((target / "config.json").read_text())
    fields = {name: shape[name] for name in LLAMA} | {"num_hidden_layers": 1}
    return launcher.make_model(target.with_name("draft"), "LlamaConfig", "LlamaForCausalLM", fields, seed=3)


def _call(launcher: Launcher, function: str, **arguments: Any) -> None:
    with launcher.fork() as maker:
        maker.call(function, module="tests.integration.drafters", **arguments)


# With a hybrid model and a draft model a chunk is one block: on the CPU vLLM's numbers then depend on
# the end of a hit, which must match the engine's own cache. (Without any cache, too, vLLM gives other
# tokens with that draft model than without it.)
@pytest.mark.parametrize(
    ("model", "drafter", "settings"),
    [
        in_full(GEMMA_MODEL, ngram, {"block_size": 64}),
        in_full(GEMMA_MODEL, draft_model, {}),
        (GEMMA_MODEL, eagle, {}),
        in_full(LLAMA_MODEL, draft_model, {}),
        in_full(LLAMA_MODEL, eagle, {"block_size": 64}),
    ],
    ids=[
        "ngram, sliding windows",
        "draft model, sliding windows",
        "EAGLE, sliding windows",
        "draft model",
        "EAGLE",
    ],
)
def test_drafts_change_no_token(
    launcher: Launcher,
    tmp_path: Path,
    model: tuple[str, str, dict[str, Any]],
    drafter: Drafter,
    settings: dict[str, Any],
) -> None:
    directory = launcher.make_model(tmp_path / "model", *model)
    speculation = {**drafter(launcher, directory), "num_speculative_tokens": 3}
    files = {"type": "fs", "root_dir": str(tmp_path / "root")}
    settings = {"cpu_bytes_to_use": "128MiB", "secondary_tiers": [files], **settings}
    seen = run_all(launcher, directory, settings, speculative_config=speculation)
    assert seen.drafted > 0
