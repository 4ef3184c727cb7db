"""The prefix cache for transformers: the same tokens as without it, from each tier, and on a GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from kvtier import TieringConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_prefix_cache"
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
needs_gpu = pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
DEVICES = ["cpu", pytest.param("gpu", marks=[pytest.mark.device, needs_gpu])]


def llama(seed: int, device: str = "cpu") -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0, eos_token_id=None)).to(device).eval()


def config(root: Path) -> TieringConfig:
    tiers = [{"type": "fs", "root_dir": str(root), "min_free_bytes": 0}]
    return TieringConfig.from_mapping({"cpu_bytes_to_use": "16MiB", "secondary_tiers": tiers})


@pytest.fixture
def open_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("prefix_cache").open_prefix_cache


def test_second_run_reuses_files(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE), str(tmp_path), "--tokens", "520"]
    computed, loaded = "nothing loaded", "8 chunks from fs"
    for first in (computed, loaded):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        rows = re.findall(r"\d\.\d\d  (.*); same tokens: True", done.stdout)
        assert rows == [first, "8 chunks from cpu", loaded]


@pytest.mark.parametrize("device", DEVICES)
async def test_only_the_rest_is_computed(open_prefix_cache: Any, tmp_path: Path, device: str) -> None:
    device = "cpu" if device == "cpu" else torch.accelerator.current_accelerator().type
    model = llama(1, device)
    shared = torch.arange(1, 201)
    prompts = [torch.cat((shared, torch.full((20,), last))).unsqueeze(0).to(device) for last in (7, 8, 9)]
    settings = {"max_new_tokens": 12, "do_sample": False}
    async with open_prefix_cache(model, config(tmp_path), chunk_tokens=16) as cache:
        for prompt in prompts:
            answer = await cache.generate(prompt, **settings)
            assert torch.equal(answer, model.generate(prompt, **settings))
            before = cache.loaded_chunks()
            next_turn = torch.cat((answer, prompt), dim=1)
            assert torch.equal(
                await cache.generate(next_turn, **settings), model.generate(next_turn, **settings)
            )
            assert (cache.loaded_chunks() - before)["cpu"] == (220 + 12 - 1) // 16
        assert cache.loaded_chunks()["cpu"] == 2 * (200 // 16) + 3 * ((220 + 12 - 1) // 16)


async def test_other_weights_find_nothing(open_prefix_cache: Any, tmp_path: Path) -> None:
    prompt = torch.arange(1, 201).unsqueeze(0)
    for seed in (1, 2):
        async with open_prefix_cache(llama(seed), config(tmp_path), chunk_tokens=16) as cache:
            await cache.generate(prompt, max_new_tokens=1)
            assert not cache.loaded_chunks()


async def test_unkeyed_input_is_refused(open_prefix_cache: Any, tmp_path: Path) -> None:
    async with open_prefix_cache(llama(1), config(tmp_path), chunk_tokens=16) as cache:
        with pytest.raises(ValueError, match="num_beams"):
            await cache.generate(torch.arange(1, 40).unsqueeze(0), max_new_tokens=1, num_beams=2)
        with pytest.raises(ValueError, match="2 prompts"):
            await cache.generate(torch.ones((2, 40), dtype=torch.int64), max_new_tokens=1)


async def test_other_state_is_refused(open_prefix_cache: Any, tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    models = {
        "layer 0 keeps a DynamicSlidingWindowLayer": Gemma3ForCausalLM(
            Gemma3TextConfig(**SMALL, sliding_window=32)
        ),
        "'dynamic' may depend on": LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=dynamic)),
    }
    for why, model in models.items():
        with pytest.raises(ValueError, match=why):
            async with open_prefix_cache(model, config(tmp_path)):
                pass
