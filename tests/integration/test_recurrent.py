"""Models with states beside attention: Mamba, linear attention, short convolutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import from_vllm, in_full
from tests.integration.harness import Launcher
from tests.integration.test_models import SMALL, run_all

# vLLM saves the state of a block's end where a step ends, and on the CPU its Mamba2 can not save one from
# inside a step. Steps as long as a block need none, and then a hit equals the engine's own.
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

WITH_KERNELS = [from_vllm((0, 32), "has no convolution of this kind for the CPU"), pytest.mark.full]


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        pytest.param(
            ("FalconH1Config", "FalconH1ForCausalLM", FALCON_H1),
            {"max_num_batched_tokens": 64},
            marks=WITH_KERNELS,
        ),
        pytest.param(
            ("FalconH1Config", "FalconH1ForCausalLM", FALCON_H1),
            {"max_num_batched_tokens": 32, "prefix_match_unit": 32},
            marks=WITH_KERNELS,
        ),
        pytest.param(
            ("Zamba2Config", "Zamba2ForCausalLM", ZAMBA2), {"max_num_batched_tokens": 32}, marks=WITH_KERNELS
        ),
        in_full(("Qwen3NextConfig", "Qwen3NextForCausalLM", QWEN3_NEXT), {"dtype": "bfloat16"}),
        pytest.param(("Lfm2Config", "Lfm2ForCausalLM", LFM2), {}, marks=WITH_KERNELS),
    ],
    ids=[
        "state and attention in a layer",
        "parts of blocks",
        "mamba",
        "linear attention",
        "short convolution",
    ],
)
def test_a_hit_equals_the_engines_own(
    launcher: Launcher,
    tmp_path: Path,
    model: tuple[str, str, dict[str, Any]],
    arguments: dict[str, Any],
) -> None:
    directory = launcher.make_model(tmp_path / "model", *model)
    settings = {
        "cpu_bytes_to_use": "128MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
    }
    seen = run_all(launcher, directory, settings, enable_prefix_caching=True, **arguments)

    if "prefix_match_unit" in arguments:  # vLLM does not wait for the part behind the last whole block
        assert sum(seen.loaded_restarted.values()) < seen.loaded["cpu"]
    else:
        assert sum(seen.loaded_restarted.values()) == seen.loaded["cpu"]
