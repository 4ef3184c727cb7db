"""Chunks of several blocks, and models whose KV cache is more than one kind of full attention."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LLAMA, Ask
from tests.integration.harness import PROMPT_CHUNKS, Forge, Tokens, prompt

SHARED = prompt(90, 200)
PROMPTS: Sequence[Tokens] = [
    prompt(1, 100),
    prompt(2, 333),
    prompt(3, 777),
    *(prompt(4 + number, tokens, shared=SHARED) for number, tokens in enumerate((230, 321, 512, 640))),
]
OTHERS = [prompt(seed, 700) for seed in range(10, 16)]

GEMMA = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 64,
}
MLA = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 3,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
LLAMA_MODEL = ("LlamaConfig", "LlamaForCausalLM", LLAMA)
GEMMA_MODEL = ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA)
MLA_MODEL = ("DeepseekV2Config", "DeepseekV2ForCausalLM", MLA)

ROOM: dict[str, Any] = {"num_gpu_blocks_override": 200}


def _settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": "128MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
        **more,
    }


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (LLAMA_MODEL, {"block_size": 64}),
        (LLAMA_MODEL, {"blocks_per_chunk": 4}),
        (GEMMA_MODEL, {}),
        (GEMMA_MODEL, {"block_size": 64}),
    ],
    ids=["two blocks", "four blocks", "sliding windows", "sliding windows, two blocks"],
)
def test_a_hit_equals_the_engines_own(
    forge: Forge, tmp_path: Path, model: tuple[str, str, dict[str, Any]], more: dict[str, Any]
) -> None:
    directory = forge.make_model(tmp_path / "model", *model)
    settings = _settings(tmp_path, **more)
    with forge.start(directory, **ROOM) as engine:
        expected = [engine.generate(one, one)[1] for one in PROMPTS]
    with forge.start(directory, settings, **ROOM) as engine:
        engine.generate(*PROMPTS)
        engine.generate(*OTHERS, *OTHERS)
        engine.reset(connector=False)
        again, loaded_again = engine.served(*PROMPTS)
    with forge.start(directory, settings, **ROOM) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS)

    assert again == restarted == expected
    assert loaded_again["cpu"] > 10
    assert loaded_restarted["fs"] > 10


def test_latent_attention(forge: Forge, tmp_path: Path) -> None:
    # On the CPU vLLM reuses no latent blocks itself, and computes what follows a hit otherwise than a
    # whole prompt: tokens soon differ for that reason alone. The first one shows whether the bytes are
    # the prompt's, and both tiers must agree on all.
    prompts = [prompt(1, 100), prompt(2, 333), prompt(3, 777), prompt(4, 230)]
    directory = forge.make_model(tmp_path / "model", *MLA_MODEL)
    settings = _settings(tmp_path)
    with forge.start(directory, settings, **ROOM) as engine:
        cold, loaded_cold = engine.served(*prompts)
        chunks = engine.metrics().value("kvtier_stored_chunks")
        again, loaded_again = engine.served(*prompts)
    with forge.start(directory, settings, **ROOM) as engine:
        restarted, loaded_restarted = engine.served(*prompts)

    assert again == restarted
    assert [tokens[0] for tokens in again] == [tokens[0] for tokens in cold]
    assert (loaded_cold, loaded_again, loaded_restarted) == ({}, {"cpu": chunks}, {"fs": chunks})


def test_two_workers(forge: Forge, llama: Path, reference: Ask, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    cores = sorted(os.sched_getaffinity(0))
    two: dict[str, Any] = {
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    prompts = [prompt(1), prompt(2)]
    chunks = len(prompts) * PROMPT_CHUNKS
    with forge.start(llama, settings, **two) as engine:
        assert len(engine.regions) == 1  # which both share
        cold, _ = engine.served(*prompts)
        engine.reset(connector=False)
        again, loaded_again = engine.served(*prompts)
        slots = engine.metrics().value("kvtier_slots")
    with forge.start(llama, settings, **two) as engine:
        restarted, loaded_restarted = engine.served(*prompts)
    with forge.start(llama, settings) as engine:
        by_one_worker = engine.served(*prompts)

    assert cold == again == restarted == reference(*prompts)
    assert slots == 1024  # cpu_bytes_to_use is meant over all workers
    assert (loaded_again, loaded_restarted) == ({"cpu": chunks}, {"fs": chunks})
    assert by_one_worker == (cold, {})  # another parallel layout is another cache
