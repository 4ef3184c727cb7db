"""The device backends of kvtier that a bench can run on this machine."""

from __future__ import annotations

import torch

from kvtier._device.auto import BACKENDS
from kvtier.errors import ConfigError


def missing(name: str) -> str | None:
    """Return why a backend cannot be used on this machine, or None if it can."""
    if name == "cpu":
        return None
    if name == "xpu":
        return None if torch.xpu.is_available() else "torch finds no Intel GPU, or is not built for them"
    if name == "rocm":
        if torch.version.hip is None:
            return "torch is not built for ROCm"
        return None if torch.cuda.is_available() else "torch finds no AMD GPU"
    if torch.version.hip is not None:
        return "torch is built for ROCm"
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no NVIDIA GPU"


def accelerator() -> str:
    """Return the backend of this machine's accelerator, or the CPU backend if it has none."""
    return next((name for name in reversed(BACKENDS) if missing(name) is None), "cpu")


def usable(name: str) -> str:
    """Return the name of a backend. Raise ConfigError if it does not exist or is unusable here."""
    if name not in BACKENDS:
        raise ConfigError(f"there is no device backend named {name!r}; {_possible()}")
    if (why := missing(name)) is not None:
        raise ConfigError(f"the device backend {name!r} cannot be used: {why}; {_possible()}")
    return name


def _possible() -> str:
    why = {name: missing(name) for name in BACKENDS}
    here = ", ".join(name for name, reason in why.items() if reason is None)
    others = "; ".join(f"{name}: {reason}" for name, reason in why.items() if reason is not None)
    return f"possible here: {here} ({others})"
