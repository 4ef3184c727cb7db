from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier import KVCaches, PageRef
from kvtier._device.auto import open_transfer_engine
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from kvtier.errors import ConfigError

LAYOUT = SlotLayout.make((64,), 1)


def caches(*devices: str) -> KVCaches:
    tensors = tuple(torch.zeros((4, 64), dtype=torch.int8, device=device) for device in devices)
    return KVCaches(tensors, (tuple(PageRef(index, 64) for index in range(len(tensors))),))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("meta",), "on a device of type 'meta'; possible are cpu, cuda, rocm, xpu"),
        (("cpu", "meta"), r"several devices \(cpu, meta\)"),
    ],
)
def test_impossible_is_refused(devices: tuple[str, ...], message: str) -> None:
    with Region.anonymous(2, LAYOUT.chunk_bytes) as region, pytest.raises(ConfigError, match=message):
        open_transfer_engine(caches(*devices), LAYOUT, region)


class OnDevice:
    """Stands for tensors on a device that this machine lacks."""

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
    monkeypatch.setattr(module, "open_runtime", open_runtime)
    monkeypatch.setattr(torch.version, "hip", hip)
    fake: Any = SimpleNamespace(tensors=(OnDevice(kind),))
    with Region.anonymous(2, LAYOUT.chunk_bytes) as region, pytest.raises(OpenedError, match=name):
        open_transfer_engine(fake, LAYOUT, region)
