"""Show what a prefix cache saves: ``python examples/transformers_prefix_cache DIRECTORY``.

Asks a model about one long document: without kvtier, with an empty cache, with the KV in host memory, and
with a new manager, which loads it from files. In a second run, the first answer loads from the files of the
first run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import anyio
import torch
from prefix_cache import PrefixCache, open_prefix_cache
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvtier import TieringConfig

NEW_TOKENS = 8


SHAPES = {  # shapes of models with random weights
    "small": {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "8b": {  # Llama 3.1's
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def make_model(name: str, device: str) -> PreTrainedModel:
    """Load a model, or make one of ``SHAPES`` with random weights, which are the same in each run."""
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name).to(device).eval()
    torch.manual_seed(1)
    config = LlamaConfig(**SHAPES[name], max_position_embeddings=131072, pad_token_id=0, eos_token_id=None)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.float32 if name == "small" else torch.bfloat16).eval()


async def ask(cache: PrefixCache, prompt: torch.Tensor, expected: torch.Tensor, when: str) -> None:
    """Print the time to the first token and the source of the KV. Exit on a wrong token."""
    before = cache.loaded_chunks()
    began_s = time.perf_counter()
    (await cache.generate(prompt, max_new_tokens=1, do_sample=False)).cpu()
    took_s = time.perf_counter() - began_s
    by_tier = cache.loaded_chunks() - before
    loaded = ", ".join(f"{count} chunks from {tier}" for tier, count in by_tier.items())
    answer = await cache.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    same = torch.equal(answer, expected)
    print(f"{when:<16} {took_s:8.2f}  {loaded or 'nothing loaded'}; same tokens: {same}")
    if not same:
        raise SystemExit(1)


async def main(root: Path, model: PreTrainedModel, tokens: int, memory: str) -> None:
    """Print a row for each way to the first token."""
    config = TieringConfig.from_mapping(
        {"cpu_bytes_to_use": memory, "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
    )
    drawn = torch.Generator().manual_seed(2)
    prompt = torch.randint(1, model.config.vocab_size, (1, tokens), generator=drawn).to(model.device)
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)  # also warms up
    began_s = time.perf_counter()
    model.generate(prompt, max_new_tokens=1, do_sample=False).cpu()
    print(f"seconds to the first token of an answer about {tokens} tokens")
    print(f"{'without kvtier':<16} {time.perf_counter() - began_s:8.2f}")
    async with open_prefix_cache(model, config, most_tokens=max(8192, tokens)) as cache:
        await ask(cache, prompt, expected, "first time")
        await ask(cache, prompt, expected, "again")
    async with open_prefix_cache(model, config, most_tokens=max(8192, tokens)) as cache:
        await ask(cache, prompt, expected, "after a restart")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the files go")
    parser.add_argument(
        "--model",
        default="small",
        help="a model of transformers', or random weights: small, or 8b in bfloat16 [small]",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the document")
    parser.add_argument("--device", default="cpu", help="of torch: cpu, cuda, xpu")
    parser.add_argument("--memory", default="512MiB", help="host memory for KV [512MiB]")
    args = parser.parse_args()
    anyio.run(main, args.directory, make_model(args.model, args.device), args.tokens, args.memory)
