"""Which method copies best on this machine: measured once, byte for byte, and kept in a file.

The file is ``kvtier/copy-methods.json`` in the user's cache directory (``XDG_CACHE_HOME``, by default
``~/.cache``). It holds the choice by device, driver, torch and methods. Without it, or where it cannot be
read or written, the measurement is repeated at the next start.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier._device._methods import CASES, Case, Choice, Method, Size
from kvtier._device.plan import CopyPlan

logger = logging.getLogger("kvtier.device")

Measure = Callable[[Method, Case], float]
"""Makes the copies of a case with a method; returns seconds, or raises where the method cannot."""

_COPY_BYTES = {Size.TINY: 2 * 2**10, Size.SMALL: 16 * 2**10, Size.MIDDLE: 128 * 2**10, Size.LARGE: 2**20}
_MOST_COPIES = 256
_TOTAL_BYTES = 4 * 2**20
_ROUNDS = 5


def choose(methods: Mapping[str, Method], measure: Measure) -> dict[str, str]:
    """Measure every method in every case; return the names of the fastest, by case.

    A method that raises in a case, or copies wrongly, is not chosen for any.
    """
    usable: dict[str, list[float]] = {}
    for name, method in methods.items():
        try:
            usable[name] = [measure(method, case) for case in CASES]
        except Exception as error:  # a driver that is too old, say: the others remain
            logger.info("copy method %r not used: %s", name, error)
    if not usable:
        return {}
    return {str(case): min(usable, key=lambda name: usable[name][index]) for index, case in enumerate(CASES)}


def cached_choice(key: str, make: Callable[[], dict[str, str]], path: Path | None = None) -> Choice:
    """Return the choice that the file has under ``key``; where there is none, ``make`` and keep it.

    Args:
        key: all that the choice depends on.
        make: measures.
        path: of the file; default: in the user's cache directory.
    """
    path = path or _path()
    if (cached := _read(path).get(key)) is not None:
        return cached
    start_s = time.monotonic()
    made = make()
    logger.info("copy methods measured in %.1f s: %s", time.monotonic() - start_s, made)
    if made:
        try:
            _write(path, {**_read(path), key: made})
        except OSError as error:
            logger.info("the choice of copy methods cannot be kept in %s: %s", path, error)
    return made


def _path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvtier" / "copy-methods.json"


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Return the valid choices of the file; none where it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {key: it for key, it in found.items() if _is_choice(it)} if isinstance(found, dict) else {}


def _is_choice(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def _write(path: Path, content: Mapping[str, Choice]) -> None:
    """Replace the file in one step: workers of one engine, and other engines, write and read it, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Scratch:
    """A buffer on the device and one on the host to measure with; nothing else is touched.

    Args:
        device: where one of them is; the other is pinned unless this is the CPU.
        stream: torch's stream to copy on.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        noise = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 2 * _TOTAL_BYTES, np.uint8))
        pinned = device.type != "cpu"
        self._stream = stream
        self._noise = noise.pin_memory() if pinned else noise
        self._host = torch.zeros(2 * _TOTAL_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.empty(2 * _TOTAL_BYTES, dtype=torch.uint8, device=device)

    def measure(self, method: Method, case: Case) -> float:
        """Copy once and compare all bytes, then take the time of the best of a few rounds, in seconds.

        Raises:
            ValueError: wrong bytes were copied, or others were changed.
        """
        nbytes = _COPY_BYTES[case.size]
        noise = np.random.default_rng(2)
        sources, targets = _places(nbytes, noise), _places(nbytes, noise)
        source, target = (self._device, self._host) if case.is_store else (self._host, self._device)
        plan = CopyPlan(
            sources.astype(np.uint64) + np.uint64(source.data_ptr()),
            targets.astype(np.uint64) + np.uint64(target.data_ptr()),
            np.full(len(sources), nbytes, dtype=np.uint64),
            len(sources) * nbytes,
        )
        source.copy_(self._noise)
        target.zero_()
        if self._device.device.type != "cpu":  # the filling is work of another stream than the copies
            torch.accelerator.synchronize(self._device.device)
        method(plan, self._stream)
        self._stream.synchronize()
        content, expected = self._noise.numpy(), np.zeros(2 * _TOTAL_BYTES, dtype=np.uint8)
        for begin, origin in zip(targets.tolist(), sources.tolist(), strict=True):
            expected[begin : begin + nbytes] = content[origin : origin + nbytes]
        if not np.array_equal(target.cpu().numpy(), expected):
            raise ValueError(f"it copied wrong bytes ({case})")
        return min(self._rounds(method, plan))

    def _rounds(self, method: Method, plan: CopyPlan) -> Iterator[float]:
        for _ in range(_ROUNDS):
            start_s = time.perf_counter()
            method(plan, self._stream)
            self._stream.synchronize()
            yield time.perf_counter() - start_s


def _places(nbytes: int, noise: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the offsets of copies of so many bytes, scattered, with gaps between them."""
    count = min(_MOST_COPIES, _TOTAL_BYTES // nbytes)
    return noise.permutation(np.arange(count, dtype=np.int64) * 2 * nbytes)
