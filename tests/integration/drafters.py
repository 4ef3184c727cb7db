"""Draft heads of tiny random models, which transformers cannot make. Called in a process of the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def add_eagle_head(llm: Any, directory: str, source: str) -> dict[str, Any]:
    """Make an EAGLE head from a one-layer Llama model; it also reads hidden states of the target."""
    import torch
    from safetensors.torch import load_file, save_file

    folder, original = Path(directory), Path(source)
    folder.mkdir(parents=True)
    weights = load_file(original / "model.safetensors")
    head = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith(("model.embed_tokens", "model.layers.0")) and "input_layernorm" not in name
    }
    hidden = head["embed_tokens.weight"].shape[1]
    head["fc.weight"] = torch.randn((hidden, 2 * hidden), generator=torch.Generator().manual_seed(1)) * 0.1
    save_file(head, folder / "model.safetensors")
    (folder / "config.json").write_text((original / "config.json").read_text())
    return {}
