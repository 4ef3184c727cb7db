"""Show what a prefix cache saves: ``python examples/transformers_prefix_cache DIRECTORY``.

Asks a model about one long document: without kvtier, cold, with the KV in host memory, and with a new
manager, which has it from files. Run it again, and the first answer loads from the files of the run before.
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


def make_model(name: str | None, device: str) -> PreTrainedModel:
    """Load a model, or make a small one with random weights, the same in each run."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name).to(device).eval()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16384,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(device).eval()


async def ask(cache: PrefixCache, prompt: torch.Tensor, expected: torch.Tensor, when: str) -> None:
    """Print the seconds to the first token, and where its KV came from; end the program at a wrong token."""
    before = cache.loaded_chunks()
    began_s = time.perf_counter()
    await cache.generate(prompt, max_new_tokens=1, do_sample=False)
    took_s = time.perf_counter() - began_s
    by_tier = cache.loaded_chunks() - before
    loaded = ", ".join(f"{count} chunks from {tier}" for tier, count in by_tier.items())
    answer = await cache.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    same = torch.equal(answer, expected)
    print(f"{when:<16} {took_s:8.2f}  {loaded or 'nothing loaded'}; same tokens: {same}")
    if not same:
        raise SystemExit(1)


async def main(root: Path, model: PreTrainedModel, tokens: int) -> None:
    """Print a row for each way to the first token."""
    config = TieringConfig.from_mapping(
        {"cpu_bytes_to_use": "512MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
    )
    drawn = torch.Generator().manual_seed(2)
    prompt = torch.randint(1, model.config.vocab_size, (1, tokens), generator=drawn).to(model.device)
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)  # warms up as well
    began_s = time.perf_counter()
    model.generate(prompt, max_new_tokens=1, do_sample=False)
    print(f"seconds to the first token of an answer about {tokens} tokens")
    print(f"{'without kvtier':<16} {time.perf_counter() - began_s:8.2f}")
    async with open_prefix_cache(model, config) as cache:
        await ask(cache, prompt, expected, "first time")
        await ask(cache, prompt, expected, "again")
    async with open_prefix_cache(model, config) as cache:
        await ask(cache, prompt, expected, "after a restart")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the files go")
    parser.add_argument("--model", help="a model of transformers'; default: a small one with random weights")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the document")
    parser.add_argument("--device", default="cpu", help="of torch: cpu, cuda, xpu")
    args = parser.parse_args()
    anyio.run(main, args.directory, make_model(args.model, args.device), args.tokens)
