"""One phase of the demo in a process of its own: starts a real engine, sends prompts, prints what it saw.

Reads a plan as JSON from standard input and writes JSON lines to the file that the plan names, so that
the engine's own output stays apart. Run by ``kvtier demo``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from prometheus_client import REGISTRY

BLOCK_TOKENS = 32
WARM_UP_SEED = 10**6


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine of the demo has to do.

    Attributes:
        model: directory of the model.
        report: file for the JSON lines.
        rounds: rounds of prompts as (name, seeds of the prompts); a prompt is made from its seed.
        extra_config: kvtier's settings; None for an engine without a connector.
        prompt_tokens: length of each prompt.
        output_tokens: how many tokens are generated for each.
        device_blocks: size of the engine's own cache, in blocks.
        dtype: of the model and its KV cache.
    """

    model: str
    report: str
    rounds: Sequence[tuple[str, Sequence[int]]]
    extra_config: Mapping[str, object] | None
    prompt_tokens: int
    output_tokens: int
    device_blocks: int
    dtype: str


def make_model(directory: Path, dtype: str) -> None:
    """Make a small random Llama-style model. Nothing is downloaded.

    Large enough that a prompt takes a core or two a second or more, and initialised so that what
    the model says depends on all of its prompt: then a wrong byte in the cache shows in the tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.06,
        tie_word_embeddings=False,
    )
    torch.manual_seed(20261121)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)


def make_prompt(seed: int, tokens: int, vocabulary: int = 1024) -> list[int]:
    """Make the token ids of a prompt. Prompts of different seeds share nothing."""
    generator = random.Random(seed)
    return [generator.randrange(2, vocabulary) for _ in range(tokens)]


def run(plan: Plan, report: TextIO) -> None:
    """Start the engine, send the rounds, stop it."""
    from vllm import LLM, SamplingParams

    engine = LLM(**_engine_arguments(plan))
    sampling = SamplingParams(
        max_tokens=plan.output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    warm_up = make_prompt(WARM_UP_SEED, 2 * BLOCK_TOKENS)
    engine.generate([{"prompt_token_ids": warm_up}], sampling, use_tqdm=False)
    for name, seeds in plan.rounds:
        for seed in seeds:
            before = dict(loaded_chunks())
            prompt = make_prompt(seed, plan.prompt_tokens)
            (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            loaded = {
                tier: int((count - before.get(tier, 0)) * BLOCK_TOKENS) for tier, count in loaded_chunks()
            }
            answer = {
                "phase": name,
                "seed": seed,
                "ttft_s": output.metrics.first_token_latency,
                "tokens": list(output.outputs[0].token_ids),
                "loaded": {tier: tokens for tier, tokens in loaded.items() if tokens},
            }
            print(json.dumps(answer), file=report, flush=True)
    engine.llm_engine.engine_core.shutdown()


def _engine_arguments(plan: Plan) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": plan.model,
        "dtype": plan.dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": plan.device_blocks,
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "disable_log_stats": False,
        "seed": 0,
    }
    if plan.extra_config is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"spec_name": "KVTierOffloadingSpec", **plan.extra_config},
        }
    return arguments


def loaded_chunks() -> Iterator[tuple[str, float]]:
    """Say how many chunks the engine of this process has loaded from each tier, by its own metrics."""
    for metric in REGISTRY.collect():
        if metric.name == "kvtier_loaded_chunks":
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    yield sample.labels["tier"], sample.value


def main() -> None:
    """Carry out the plan on standard input."""
    raw = json.load(sys.stdin)
    if "make_model" in raw:
        make_model(Path(raw["make_model"]), raw["dtype"])
        return
    with Path(raw["report"]).open("w", encoding="utf-8") as report:
        run(Plan(**raw), report)


if __name__ == "__main__":
    main()
