"""A prefix cache for Hugging Face transformers: KV of long shared prompts from host memory and files.

``generate()`` computes the KV of each prompt from its first token on. Here the KV of a known prefix is loaded
from kvtier instead: from any tier, also after a restart or in another process.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import crc32c
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvtier import (
    DeviceStuckError,
    Identity,
    KVCaches,
    OffloadKey,
    PageRef,
    TieringConfig,
    TieringManager,
    TransferError,
    open_manager,
    pack_key,
)

logger = logging.getLogger("prefix_cache")

SETTINGS = frozenset(
    {
        "do_sample",
        "eos_token_id",
        "logits_processor",
        "max_new_tokens",
        "min_new_tokens",
        "pad_token_id",
        "repetition_penalty",
        "stopping_criteria",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Settings of ``generate`` that choose tokens, and leave the KV of given tokens as it is."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Position embeddings that do not depend on a prompt's length."""


class PrefixCache:
    """Generates with a model, and loads KV from kvtier instead of computing it.

    Made by ``open_prefix_cache``.
    """

    def __init__(
        self, model: PreTrainedModel, manager: TieringManager, pool: list[torch.Tensor], chunk_tokens: int
    ) -> None:
        self._model = model
        self._manager = manager
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._lock = anyio.Lock()  # the pool holds one prompt

    async def generate(self, input_ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        """Return the result of ``model.generate``, of shape (1, tokens), for one prompt.

        Args:
            input_ids: the prompt, of shape (1, tokens).
            settings: for ``model.generate``; only ``SETTINGS`` are allowed. The keys would not distinguish
                beams, or inputs other than tokens, from a plain prompt.

        Raises:
            ValueError: there is more than one prompt, or another setting.
            DeviceStuckError: a copy to the device hangs and may still write.
        """
        if input_ids.shape[0] != 1:
            raise ValueError(f"input_ids has {input_ids.shape[0]} prompts: give one at a time")
        if others := settings.keys() - SETTINGS:
            raise ValueError(f"{sorted(others)} cannot be given here: known are {sorted(SETTINGS)}")
        async with self._lock:
            keys = self._keys(input_ids[0, :-1])  # The model continues after the last loaded token.
            loaded = await self._load(keys)
            cache = self._unpack(loaded)
            run = partial(
                self._model.generate,
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                past_key_values=cache,
                return_dict_in_generate=True,
                num_beams=1,
                num_return_sequences=1,
                **settings,
            )
            tokens: torch.Tensor = (await anyio.to_thread.run_sync(run)).sequences
            await self._store(cache, tokens[0, : cache.get_seq_length()], loaded)
        return tokens

    async def _load(self, keys: list[OffloadKey]) -> int:
        """Load the leading stored chunks into the pool; return their number."""
        try:
            return await self._manager.load(keys, range(len(keys)))
        except DeviceStuckError:
            raise
        except TransferError as error:
            logger.warning("prefix of %d chunks not loaded: %s; it is computed", len(keys), error)
            return 0

    async def _store(self, cache: DynamicCache, tokens: torch.Tensor, loaded: int) -> None:
        keys = self._keys(tokens)
        self._pack(cache, loaded, len(keys))
        try:
            await self._manager.store(keys, range(len(keys)))
        except TransferError as error:
            logger.warning("%d chunks not stored: %s", len(keys) - loaded, error)

    def loaded_chunks(self) -> Counter[str]:
        """Return the number of chunks loaded so far from each tier."""
        counts = self._manager.statistics().counts
        return Counter({name[1]: int(count) for name, count in counts.items() if name[0] == "loaded"})

    def _keys(self, tokens: torch.Tensor) -> list[OffloadKey]:
        """Return a key for each full chunk that fits into the pool.

        It is a hash of all tokens up to the chunk's end.
        """
        chunks = min(len(tokens) // self._chunk_tokens, len(self._pool[0]))
        running = hashlib.sha256()
        keys = []
        for chunk in tokens[: chunks * self._chunk_tokens].cpu().view(chunks, -1):
            running.update(chunk.numpy().tobytes())
            keys.append(pack_key(running.digest()))
        return keys

    def _unpack(self, chunks: int) -> DynamicCache:
        """Return a transformers cache with the first chunks of the pool."""
        cache = DynamicCache(config=self._model.config)
        for layer, pages in enumerate(self._pool):
            if chunks:
                keys, values = pages[:chunks].permute(1, 2, 0, 3, 4).flatten(2, 3)  # (2, heads, tokens, dim)
                cache.update(keys.unsqueeze(0), values.unsqueeze(0), layer)
        return cache

    def _pack(self, cache: DynamicCache, first: int, end: int) -> None:
        """Copy chunks of a transformers cache into the pool, each to the block with its number."""
        tokens = slice(first * self._chunk_tokens, end * self._chunk_tokens)
        for pages, layer in zip(self._pool, cache.layers, strict=True):
            both = torch.stack((layer.keys[0, :, tokens], layer.values[0, :, tokens]))
            pages[first:end] = both.unflatten(2, (end - first, self._chunk_tokens)).permute(2, 0, 1, 3, 4)


@asynccontextmanager
async def open_prefix_cache(
    model: PreTrainedModel, config: TieringConfig, *, chunk_tokens: int = 64, most_tokens: int = 8192
) -> AsyncIterator[PrefixCache]:
    """Open a prefix cache for a model. Its weights, adapters and device must not change meanwhile.

    Args:
        model: a decoder whose layers all have full attention, on any device that kvtier can copy from.
        config: kvtier's settings. A block is a chunk here, so omit ``blocks_per_chunk``.
        chunk_tokens: tokens per chunk; a prefix is loaded in steps of this size.
        most_tokens: maximum number of tokens kept per prompt; the device holds them a second time.

    Raises:
        ValueError: the KV of a token depends on more than the tokens up to it, or a layer keeps another
            state than the keys and values of all tokens.
    """
    if config.blocks_per_chunk not in (None, 1):
        raise ValueError(f"blocks_per_chunk is {config.blocks_per_chunk}: set chunk_tokens instead")
    _require_text_alone(model)
    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"layer {number} keeps a {type(layer).__name__}: only full attention is supported"
            )
    decoder = model.config.get_text_config(decoder=True)
    dim = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    heads = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
    shape = (most_tokens // chunk_tokens, 2, heads, chunk_tokens, dim)
    pool = [
        torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(decoder.num_hidden_layers)
    ]
    pages = tuple(tensor.flatten(1).view(torch.int8) for tensor in pool)
    group = tuple(PageRef(layer, page.shape[1]) for layer, page in enumerate(pages))
    identity = identity_of(model, chunk_tokens)
    async with open_manager(config, identity, KVCaches(pages, (group,))) as manager:
        yield PrefixCache(model, manager, pool, chunk_tokens)


def _require_text_alone(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder or model.config.get_text_config(decoder=True) is not model.config:
        raise ValueError(f"{type(model).__name__} takes more than tokens: only decoders of text are cached")
    rope = getattr(model.config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (kind := one.get("rope_type", "default")) not in ROPE_TYPES:
            raise ValueError(f"position embeddings of type {kind!r} may depend on a prompt's length")


def identity_of(model: PreTrainedModel, chunk_tokens: int) -> Identity:
    """Return the identity of a model's KV: its configuration, its weights, and the software used."""
    name = model.config.name_or_path or type(model).__name__
    fields = {
        "class": type(model).__name__,
        "config": {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"},
        "weights": _weights_digest(model),
        "dtype": model.dtype,
        "device": model.device.type,
        "attention": model.config._attn_implementation,
        "chunk_tokens": chunk_tokens,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return Identity.make(name, fields)


def _weights_digest(model: PreTrainedModel) -> str:
    """Return a digest of all weights and buffers. Reads each byte: about a second for two gigabytes."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {crc32c.crc32c(content):08x}\n".encode())
    return digest.hexdigest()
