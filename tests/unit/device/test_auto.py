from __future__ import annotations

import pytest
import torch

from kvtier.device.auto import open_transfer_engine
from kvtier.device.base import KVCaches, PageRef
from kvtier.device.cpu import CpuTransferEngine
from kvtier.errors import ConfigError
from kvtier.memory.layout import SlotLayout
from kvtier.memory.region import Region

LAYOUT = SlotLayout.make((64,), 1)


def caches(*devices: str) -> KVCaches:
    tensors = tuple(torch.zeros((4, 64), dtype=torch.int8, device=device) for device in devices)
    return KVCaches(tensors, (tuple(PageRef(index, 64) for index in range(len(tensors))),))


@pytest.mark.parametrize("name", [None, "cpu"])
def test_host_memory_has_the_cpu_backend(name: str | None) -> None:
    with Region.anonymous(2, LAYOUT.chunk_bytes) as region:
        engine = open_transfer_engine(caches("cpu"), LAYOUT, region, name)
        assert isinstance(engine, CpuTransferEngine)
        engine.close()


@pytest.mark.parametrize(
    ("devices", "name", "message"),
    [
        (("meta",), None, "of type 'meta'; this version of kvtier supports: cpu, cuda"),
        (("meta",), "cpu", "'cpu' cannot copy tensors on meta"),
        (("cpu",), "cuda", "'cuda' cannot copy tensors on cpu"),
        (("cpu", "meta"), None, r"2 types \(cpu, meta\)"),
        (("cpu",), "abacus", "no device backend named 'abacus'; there are: cpu, cuda"),
    ],
)
def test_what_cannot_be_is_refused_in_words(devices: tuple[str, ...], name: str | None, message: str) -> None:
    with Region.anonymous(2, LAYOUT.chunk_bytes) as region, pytest.raises(ConfigError, match=message):
        open_transfer_engine(caches(*devices), LAYOUT, region, name)


def test_rocm_which_torch_calls_cuda_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with (
        Region.anonymous(2, LAYOUT.chunk_bytes) as region,
        pytest.raises(ConfigError, match="ROCm, which is not supported yet"),
    ):
        open_transfer_engine(caches("cpu"), LAYOUT, region, "cuda")
