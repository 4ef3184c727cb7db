from __future__ import annotations

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier_bench.backends import accelerator, missing, usable

POSSIBLE = (
    r"possible here: cpu \(cuda: torch finds no NVIDIA GPU; rocm: torch is not built for ROCm; "
    r"xpu: torch finds no Intel GPU, or is not built for them\)"
)


@pytest.fixture
def only_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine that has no accelerator but a CUDA build of torch."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    for api in (torch.cuda, torch.xpu):
        monkeypatch.setattr(api, "is_available", lambda: False)


@pytest.mark.usefixtures("only_cpu")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", f"'cuda' cannot be used: torch finds no NVIDIA GPU; {POSSIBLE}"),
        ("rocm", f"'rocm' cannot be used: torch is not built for ROCm; {POSSIBLE}"),
        ("xpu", f"'xpu' cannot be used: torch finds no Intel GPU, or is not built.*; {POSSIBLE}"),
        ("abacus", f"no device backend named 'abacus'; {POSSIBLE}"),
    ],
)
def test_impossible_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        usable(name)


@pytest.mark.usefixtures("only_cpu")
def test_default_is_cpu_without_accelerator() -> None:
    assert usable(accelerator()) == "cpu"


@pytest.mark.parametrize(
    ("hip", "built", "found", "expected"),
    [
        (None, None, False, ("torch is built without CUDA", "torch is not built for ROCm")),
        (None, "13.0", False, ("torch finds no NVIDIA GPU", "torch is not built for ROCm")),
        (None, "13.0", True, (None, "torch is not built for ROCm")),
        ("7.0", None, False, ("torch is built for ROCm", "torch finds no AMD GPU")),
        ("7.0", None, True, ("torch is built for ROCm", None)),
    ],
)
def test_cuda_is_two_backends(
    hip: str | None,
    built: str | None,
    found: bool,
    expected: tuple[str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    assert (missing("cuda"), missing("rocm")) == expected
