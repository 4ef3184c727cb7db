"""The models to draw from: tiny random ones of each kind of KV cache that vLLM runs on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.harness import Launcher
from tests.integration.test_models import (
    GEMMA4_MODEL,
    GEMMA_MODEL,
    GPT_OSS_MODEL,
    LLAMA4_MODEL,
    LLAMA_MODEL,
)
from tests.integration.test_speculation import draft_model, eagle, ngram

Class = tuple[str, str, Mapping[str, Any]]

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,
}
"""Needs an eighth of the time of other tests' models for a prompt, half of it for a token."""


@dataclass(frozen=True)
class Kind:
    """A family of models.

    Attributes:
        made_of: configuration, architecture and fields, for ``Launcher.make_model``.
        smaller: fields that differ, to keep it small.
        windows: whether it has windows of variable size in variable layers.
        drafts: whether other models can draft for it.
        adapters: whether it takes LoRA adapters.
    """

    made_of: Class
    windows: bool = False
    drafts: bool = False
    adapters: bool = False
    groups: int = 1
    smaller: Mapping[str, Any] = field(default_factory=dict)


KINDS: Mapping[str, Kind] = {
    "llama": Kind(LLAMA_MODEL, drafts=True, adapters=True, smaller={"num_hidden_layers": 2}),
    "gemma": Kind(GEMMA_MODEL, windows=True, drafts=True, smaller={"query_pre_attn_scalar": 32}),
    "gemma4": Kind(GEMMA4_MODEL, windows=True, smaller={"global_head_dim": 64}),
    "gpt_oss": Kind(GPT_OSS_MODEL, windows=True),
    "llama4": Kind(LLAMA4_MODEL, groups=2, smaller={"intermediate_size_mlp": 128}),
}
DRAFTS = ("ngram", "draft_model", "eagle")

_DRAFTERS: Mapping[str, Callable[[Launcher, Path], dict[str, Any]]] = {
    "ngram": ngram,
    "draft_model": draft_model,
    "eagle": eagle,
}
_LAYERS = {"s": "sliding_attention", "f": "full_attention"}
_RANK = 8


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        kind: one of ``KINDS``, or a model's directory.
        window: tokens of its sliding windows.
        layers: ``s`` for a layer with a window, ``f`` for one of full attention; empty for the default.
        draft: one of ``DRAFTS``.
        adapters: number of its LoRA adapters.
    """

    kind: str = "llama"
    window: int = 0
    layers: str = ""
    draft: str = ""
    adapters: int = 0

    @property
    def groups(self) -> int:
        """The approximate number of its KV cache groups."""
        if "s" not in self.layers:
            return KINDS[self.kind].groups if self.kind in KINDS else 1
        fewer = min(self.layers.count("f"), self.layers.count("s"))
        return -(-len(self.layers) // fewer)

    def make(self, launcher: Launcher, folder: Path) -> Path:
        """Make it in a folder; return its directory."""
        if self.kind not in KINDS:
            return Path(self.kind)
        config, architecture, fields = KINDS[self.kind].made_of
        fields = {**fields, **_SMALL, **KINDS[self.kind].smaller}
        if self.layers:
            fields = {**fields, "num_hidden_layers": len(self.layers)}
        if self.window:
            fields["layer_types"] = [_LAYERS[one] for one in self.layers]
            fields["sliding_window"] = self.window
        return launcher.make_model(folder / "model", config, architecture, fields)

    def arguments(self, launcher: Launcher, directory: Path) -> dict[str, Any]:
        """Make its draft model and adapters; return vLLM's arguments for them."""
        told: dict[str, Any] = {}
        if self.draft:
            drafter = _DRAFTERS[self.draft](launcher, directory)
            told["speculative_config"] = {**drafter, "num_speculative_tokens": 3}
        if self.adapters:
            told |= {"enable_lora": True, "max_loras": self.adapters, "max_lora_rank": _RANK}
            with launcher.fork() as maker:
                for number in range(1, self.adapters + 1):
                    path = adapter(directory, number)
                    maker.call("make_adapter", module=__name__, directory=str(path), model=str(directory))
        return told


def adapter(model: Path, number: int) -> Path:
    """Return the directory of an adapter of a model."""
    return model.with_name(f"adapter-{number}")


def make_adapter(llm: Any, directory: str, model: str) -> dict[str, Any]:
    """Make a random LoRA adapter. Runs in a process of the launcher."""
    import torch
    from safetensors.torch import save_file

    folder, shape = Path(directory), json.loads((Path(model) / "config.json").read_text())
    folder.mkdir()
    chance = torch.Generator().manual_seed(int(folder.name.rpartition("-")[2]))
    hidden, width = shape["hidden_size"], shape["num_key_value_heads"] * shape["head_dim"]
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name in ("k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn((_RANK, hidden), generator=chance) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn((width, _RANK), generator=chance) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    told = {"r": _RANK, "lora_alpha": _RANK, "target_modules": ["k_proj", "v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return {}
