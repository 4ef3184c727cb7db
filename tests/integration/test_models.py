"""Chunks of several blocks, and models whose KV cache is more than one kind of full attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine.compared import EngineError
from tests.integration.conftest import LLAMA, in_full
from tests.integration.harness import (
    OUTPUT_TOKENS,
    Launcher,
    Tokens,
    misplace_chunks,
    prompt,
    vllm_release,
)

SHARED = prompt(90, 200)
PROMPTS: Sequence[Tokens] = [
    prompt(1, 100),
    prompt(2, 333),
    prompt(3, 777),
    *(prompt(4 + number, tokens, shared=SHARED) for number, tokens in enumerate((230, 321, 512, 640))),
]
OTHERS = [prompt(seed, 700) for seed in range(10, 16)]

SMALL = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
GEMMA = {
    **SMALL,
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 64,
    "tie_word_embeddings": False,  # if tied, the model repeats its last token regardless of its cache
}
GEMMA4 = {
    **GEMMA,
    "global_head_dim": 128,  # full attention: its pages are larger than a window's
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 1024,
    "hidden_size_per_layer_input": 32,
}
MLA = {
    **{name: value for name, value in SMALL.items() if name != "head_dim"},
    "num_hidden_layers": 3,
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
}
GPT_OSS = {
    **SMALL,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LLAMA4 = {
    **SMALL,
    "intermediate_size_mlp": 512,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 64,
    "no_rope_layers": [1, 0, 1, 0],  # layers without RoPE use full attention, the others local chunks
}
# vLLM saves the state at a block's end if a step ends there; on the CPU its Mamba2 cannot save one inside a
# step. With steps as long as a block, a hit equals the engine's own.
FALCON_H1 = {
    **{name: value for name, value in SMALL.items() if name != "head_dim"},
    "mamba_d_ssm": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_chunk_size": 8192,
}
ZAMBA2 = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "mamba_d_state": 32,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "chunk_size": 8192,
}
QWEN3_NEXT = {
    **SMALL,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
LFM2 = {
    **{name: value for name, value in SMALL.items() if name != "head_dim"},
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_dim": 256,
    "block_dim": 256,
    "block_ff_dim": 512,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": False,
}
LLAMA_MODEL = ("LlamaConfig", "LlamaForCausalLM", LLAMA)
GEMMA_MODEL = ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA)
GEMMA4_MODEL = ("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4)
GPT_OSS_MODEL = ("GptOssConfig", "GptOssForCausalLM", GPT_OSS)
LLAMA4_MODEL = ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4)
FALCON_H1_MODEL = ("FalconH1Config", "FalconH1ForCausalLM", FALCON_H1)
ZAMBA2_MODEL = ("Zamba2Config", "Zamba2ForCausalLM", ZAMBA2)
QWEN3_NEXT_MODEL = ("Qwen3NextConfig", "Qwen3NextForCausalLM", QWEN3_NEXT)
LFM2_MODEL = ("Lfm2Config", "Lfm2ForCausalLM", LFM2)
MLA_MODEL = ("DeepseekV2Config", "DeepseekV2ForCausalLM", MLA)

LATENT_BLOCK_TOKENS = 16  # vLLM requires it for latent attention on the CPU
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 200}
RECOMPUTING = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}
PARTS_OF_BLOCKS: dict[str, Any] = {"max_num_batched_tokens": 32, "prefix_match_unit": 32}


def _settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "cpu_bytes_to_use": "128MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
        **more,
    }


@dataclass(frozen=True)
class Seen:
    """Answers to ``PROMPTS``, and the chunks loaded for them by tier.

    Attributes:
        expected: from an engine without kvtier, whose own cache holds them.
        misled: from a primary tier whose chunks were exchanged.
        loaded: from the primary tier.
        loaded_restarted: from the file tier.
        drafted: tokens that were drafted.
    """

    expected: Sequence[Tokens]
    misled: Sequence[Tokens]
    loaded: Mapping[str, int]
    loaded_restarted: Mapping[str, int]
    drafted: float


def run_all(launcher: Launcher, model: Path, settings: dict[str, Any], **arguments: Any) -> Seen:
    """Run an engine without kvtier, one that stores and loads, and another one that finds the files."""
    arguments = {**ROOM, **arguments}
    with launcher.start(model, **arguments) as engine:
        expected = [engine.generate(one, one)[1] for one in PROMPTS]
    if "prefix_match_unit" in arguments:
        arguments["kv_transfer_config"] = RECOMPUTING
    with launcher.start(model, settings, **arguments) as engine:
        engine.generate(*PROMPTS)
        engine.generate(*OTHERS, *OTHERS)
        engine.reset(connector=False)
        again, loaded = engine.served(*PROMPTS)
        drafted = engine.metrics().value("vllm:spec_decode_num_draft_tokens")
        misplace_chunks(engine)
        engine.reset(connector=False)
        misled = engine.generate(*PROMPTS)
    with launcher.start(model, settings, **arguments) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS)

    assert again == restarted == expected != misled
    assert loaded["cpu"] > 10
    assert loaded_restarted["fs"] > 10
    return Seen(expected, misled, loaded, loaded_restarted, drafted)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        in_full(LLAMA_MODEL, {"block_size": 64}),
        in_full(LLAMA_MODEL, {"blocks_per_chunk": 4}),
        in_full(GEMMA_MODEL, {}),
        in_full(GEMMA_MODEL, {"block_size": 64}),  # each commit: two random lives of such a model
        in_full(GEMMA_MODEL, {"blocks_per_chunk": 4}),
        in_full(GEMMA4_MODEL, {}),
        in_full(GPT_OSS_MODEL, {}),
        in_full(LLAMA4_MODEL, {"block_size": 64}),
    ],
    ids=[
        "two blocks",
        "four blocks",
        "sliding windows",
        "sliding windows, two blocks",
        "sliding windows, four blocks",
        "pages of two lengths, shared layers",
        "sliding windows and sinks",
        "local chunks, two blocks",
    ],
)
def test_hit_equals_engines_own(
    launcher: Launcher, tmp_path: Path, model: tuple[str, str, dict[str, Any]], more: dict[str, Any]
) -> None:
    directory = launcher.make_model(tmp_path / "model", *model)
    seen = run_all(launcher, directory, _settings(tmp_path, **more))
    assert sum(seen.loaded_restarted.values()) == seen.loaded["cpu"]
    # The first prompt is shorter than some chunks.
    assert all(wrong != right for wrong, right in zip(seen.misled[1:], seen.expected[1:], strict=True))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (FALCON_H1_MODEL, {"max_num_batched_tokens": 64}),
        (FALCON_H1_MODEL, PARTS_OF_BLOCKS),
        (ZAMBA2_MODEL, {"max_num_batched_tokens": 32}),
        (QWEN3_NEXT_MODEL, {"dtype": "bfloat16"}),
        (LFM2_MODEL, {}),
    ],
    ids=[
        "state and attention in a layer",
        "parts of blocks",
        "mamba",
        "linear attention",
        "short convolution",
    ],
)
def test_state_hit_equals_engines_own(
    launcher: Launcher, tmp_path: Path, model: tuple[str, str, dict[str, Any]], arguments: dict[str, Any]
) -> None:
    if model is not QWEN3_NEXT_MODEL and vllm_release() < (0, 32):
        pytest.skip("vLLM before 0.32 has no convolution of this kind for the CPU")
    directory = launcher.make_model(tmp_path / "model", *model)
    seen = run_all(launcher, directory, _settings(tmp_path), enable_prefix_caching=True, **arguments)
    restarted = sum(seen.loaded_restarted.values())
    # vLLM does not wait for the part behind the last whole block.
    assert (
        restarted < seen.loaded["cpu"]
        if "prefix_match_unit" in arguments
        else restarted == seen.loaded["cpu"]
    )


@pytest.mark.full
def test_bounds_within_parts_of_blocks(launcher: Launcher, tmp_path: Path) -> None:
    """vLLM's connector ends the engine if a client's bound lies before the part of a block."""
    if vllm_release() < (0, 32):
        pytest.skip("vLLM before 0.32 has no convolution of this kind for the CPU")
    directory = launcher.make_model(tmp_path / "model", *FALCON_H1_MODEL)
    arguments = {**ROOM, **PARTS_OF_BLOCKS, "enable_prefix_caching": True}
    asked = prompt(1, 360)
    with pytest.raises(EngineError, match="use KVTierConnector"):
        launcher.start(directory, _settings(tmp_path), **arguments)
    with launcher.start(
        directory, _settings(tmp_path), kv_transfer_config=RECOMPUTING, **arguments
    ) as engine:
        expected = engine.generate(asked, kv_transfer_params={"max_offload_tokens": 0})
        assert engine.settled().value("kvtier_stored_chunks") == 0
        assert engine.generate(prompt(2, 360), kv_transfer_params={"max_offload_tokens": 300})
        assert engine.generate(prompt(3, 360))
        stored = engine.settled().value("kvtier_stored_chunks")
        engine.reset(connector=False)
        assert engine.served(asked) == (expected, {})
    assert stored


@pytest.mark.full
def test_latent_attention(launcher: Launcher, tmp_path: Path) -> None:
    # vLLM's kernels for latent attention on the CPU disagree: computing a whole prompt, or only its last
    # token over the same blocks, gives different tokens (vLLM itself reuses no blocks). So the test sends a
    # prompt of whole blocks, and then the same prompt with the first token of its answer. After the load of
    # the blocks only the first engine's next step remains, and the same kernel computes it.
    prompts = [prompt(seed, LATENT_BLOCK_TOKENS * blocks) for seed, blocks in enumerate((3, 6, 20, 48))]
    directory = launcher.make_model(tmp_path / "model", *MLA_MODEL)
    settings = _settings(tmp_path)
    with launcher.start(directory, settings, **ROOM) as engine:
        said = engine.generate(*prompts, output_tokens=OUTPUT_TOKENS + 1)
        longer = [[*one, words[0]] for one, words in zip(prompts, said, strict=True)]
        again, loaded_again = engine.served(*longer)
        misplace_chunks(engine)
        misled, _ = engine.served(*longer)
    with launcher.start(directory, settings, **ROOM) as engine:
        restarted, loaded_restarted = engine.served(*longer)

    assert again == restarted == [words[1:] for words in said]
    assert all(wrong != right for wrong, right in zip(misled, again, strict=True))
    assert (loaded_again, loaded_restarted) == ({"cpu": 77}, {"fs": 77})
