"""The Triton kernel, run by Triton's own interpreter over host memory: what it copies, not how fast."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import numpy as np
import torch

from kvtier._device import _gather as gather
from kvtier._device.plan import CopyPlan

noise = np.random.default_rng(1)
source = noise.integers(0, 256, 2**16, np.uint8)
target = np.zeros_like(source)
expected = np.zeros_like(source)
sizes = np.array([8, 16, 4096, 4104, 8, 12288, 0] + 40 * [24], dtype=np.uint64)
spans = np.cumsum(sizes + np.uint64(8)) - sizes - np.uint64(8)
places = noise.permutation(len(sizes))
starts = np.empty_like(spans)
starts[places] = np.cumsum(sizes[places] + np.uint64(16)) - sizes[places] - np.uint64(16)
for begin, origin, size in zip(starts.tolist(), spans.tolist(), sizes.tolist()):
    expected[begin : begin + size] = source[origin : origin + size]
plan = CopyPlan(
    spans + np.uint64(source.ctypes.data), starts + np.uint64(target.ctypes.data), sizes, int(sizes.sum())
)
gather.launch(plan, torch.device("cpu"))
assert np.array_equal(target, expected)
print("copied", plan.nbytes)
"""


def test_the_kernel_copies_the_ranges_and_nothing_else() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"copied {8 + 16 + 4096 + 4104 + 8 + 12288 + 40 * 24}\n"
