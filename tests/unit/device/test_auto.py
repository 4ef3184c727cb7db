from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier._device.auto import open_transfer_engine
from kvtier._device.backends import cuda, rocm
from kvtier._device.base import KVCaches, PageRef
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier.errors import ConfigError

LAYOUT = SlotLayout.make((64,), 1)


def caches(*devices: str) -> KVCaches:
    tensors = tuple(torch.zeros((4, 64), dtype=torch.int8, device=device) for device in devices)
    return KVCaches(tensors, (tuple(PageRef(index, 64) for index in range(len(tensors))),))


@pytest.fixture
def only_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any accelerator, with a torch for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    for api in (torch.cuda, torch.xpu):
        monkeypatch.setattr(api, "is_available", lambda: False)


POSSIBLE = (
    r"possible here: cpu \(cuda: torch finds no NVIDIA GPU; rocm: torch is not built for ROCm; "
    r"xpu: torch finds no Intel GPU, or is not built for them\)"
)


@pytest.mark.usefixtures("only_cpu")
@pytest.mark.parametrize(
    ("devices", "name", "message"),
    [
        (("meta",), None, f"on a device of type 'meta'; {POSSIBLE}"),
        (("meta",), "cpu", "'cpu' cannot copy tensors on meta"),
        (("cpu",), "cuda", f"'cuda' cannot be used: torch finds no NVIDIA GPU; {POSSIBLE}"),
        (("cpu",), "rocm", f"'rocm' cannot be used: torch is not built for ROCm; {POSSIBLE}"),
        (("cpu",), "xpu", f"'xpu' cannot be used: torch finds no Intel GPU, or is not built.*; {POSSIBLE}"),
        (("cpu", "meta"), None, r"several devices \(cpu, meta\)"),
        (("cpu", "meta"), "cpu", r"several devices \(cpu, meta\)"),
        (("cpu",), "abacus", f"no device backend named 'abacus'; {POSSIBLE}"),
    ],
)
def test_impossible_is_refused(devices: tuple[str, ...], name: str | None, message: str) -> None:
    with Region.anonymous(2, LAYOUT.chunk_bytes) as region, pytest.raises(ConfigError, match=message):
        open_transfer_engine(caches(*devices), LAYOUT, region, name)


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
    assert (cuda.missing(), rocm.missing()) == expected


class OnDevice:
    """Stands for tensors on a device that this machine has not got."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind, 0)


@pytest.mark.parametrize(
    ("kind", "hip", "name"),
    [("cpu", None, "cpu"), ("cuda", None, "cuda"), ("cuda", "7.0", "rocm"), ("xpu", None, "xpu")],
)
def test_tensors_choose_backend(
    kind: str, hip: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OpenedError(Exception):
        pass

    def open_runtime(tensors: object) -> None:
        raise OpenedError(name)

    module = import_module(f"kvtier._device.backends.{name}")
    monkeypatch.setattr(module, "missing", lambda: None)
    monkeypatch.setattr(module, "open_runtime", open_runtime)
    monkeypatch.setattr(torch.version, "hip", hip)
    fake: Any = SimpleNamespace(tensors=(OnDevice(kind),))
    with Region.anonymous(2, LAYOUT.chunk_bytes) as region, pytest.raises(OpenedError, match=name):
        open_transfer_engine(fake, LAYOUT, region)
