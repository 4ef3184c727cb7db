"""Which method copies best on this machine: measured once, byte for byte, and kept in a file.

The file is ``kvtier/copy-methods.json`` in the user's cache directory (``XDG_CACHE_HOME``, by default
``~/.cache``). It holds the choice by device, driver, torch and methods. Without it, or where it cannot be
read or written, the measurement is made again at the next start.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.device._methods import CASES, Case, Choice, Method, Size
from kvtier.device.plan import CopyPlan

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
    seconds = {name: _all_cases(name, method, measure) for name, method in methods.items()}
    usable = {name: times for name, times in seconds.items() if times is not None}
    if not usable:
        return {}
    return {str(case): min(usable, key=lambda name: usable[name][index]) for index, case in enumerate(CASES)}


def _all_cases(name: str, method: Method, measure: Measure) -> list[float] | None:
    try:
        return [measure(method, case) for case in CASES]
    except Exception as error:  # a driver that is too old, say: the others remain
        logger.info("the copy method %r is not used: %s", name, error)
        return None


def kept_choice(key: str, make: Callable[[], dict[str, str]], path: Path | None = None) -> Choice:
    """Return the choice that is kept under ``key``; where there is none, ``make`` and keep it.

    Args:
        key: all that the choice depends on.
        make: measures.
        path: of the file; default: in the user's cache directory.
    """
    path = path or _path()
    kept = _read(path).get(key)
    if kept is not None:
        return kept
    start = time.monotonic()
    made = make()
    logger.info("copy methods measured in %.1f s: %s", time.monotonic() - start, made)
    if made:
        _write(path, {**_read(path), key: made})
    return made


def _path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvtier" / "copy-methods.json"


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Return what is kept, as far as it is what it should be."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: choice for key, choice in found.items() if _is_choice(choice)}


def _is_choice(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def _write(path: Path, content: Mapping[str, Choice]) -> None:
    """Replace the file in one step: workers of one engine, and other engines, write and read it, too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                json.dump(content, file, indent=1)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        logger.info("the choice of copy methods cannot be kept in %s: %s", path, error)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The copies of one case between two buffers: offsets in each, in the order of the copies."""

    host: np.ndarray[Any, Any]
    device: np.ndarray[Any, Any]
    nbytes: int


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
            ValueError: not the right bytes were copied, or others were changed.
        """
        trial = _trial(case)
        plan = self._plan(trial, case.is_store)
        self._check(method, case, trial, plan)
        return min(self._rounds(method, plan))

    def _plan(self, trial: _Trial, is_store: bool) -> CopyPlan:
        host = (trial.host + self._host.data_ptr()).astype(np.uint64)
        device = (trial.device + self._device.data_ptr()).astype(np.uint64)
        sizes = np.full(len(host), trial.nbytes, dtype=np.uint64)
        src, dst = (device, host) if is_store else (host, device)
        return CopyPlan(src, dst, sizes, int(sizes.sum()))

    def _check(self, method: Method, case: Case, trial: _Trial, plan: CopyPlan) -> None:
        source, target = (self._device, self._host) if case.is_store else (self._host, self._device)
        source.copy_(self._noise)
        target.zero_()
        self._wait()
        method.copy(plan, self._stream)
        self._stream.synchronize()
        there, here = (trial.host, trial.device) if case.is_store else (trial.device, trial.host)
        noise, expected = self._noise.numpy(), np.zeros(2 * _TOTAL_BYTES, dtype=np.uint8)
        for begin, origin in zip(there.tolist(), here.tolist(), strict=True):
            expected[begin : begin + trial.nbytes] = noise[origin : origin + trial.nbytes]
        if not np.array_equal(target.cpu().numpy(), expected):
            raise ValueError(f"it copied wrong bytes ({case})")

    def _wait(self) -> None:
        """The filling is work of the current stream, the copies of another one."""
        if self._device.device.type != "cpu":
            torch.accelerator.synchronize(self._device.device)

    def _rounds(self, method: Method, plan: CopyPlan) -> Iterator[float]:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            method.copy(plan, self._stream)
            self._stream.synchronize()
            yield time.perf_counter() - start


def _trial(case: Case) -> _Trial:
    """Lay copies out with gaps between them: in order, or shuffled on either side."""
    nbytes = _COPY_BYTES[case.size]
    count = min(_MOST_COPIES, _TOTAL_BYTES // nbytes)
    places = np.arange(count, dtype=np.int64) * 2 * nbytes
    if case.is_regular:
        return _Trial(places, places.copy(), nbytes)
    noise = np.random.default_rng(2)
    return _Trial(noise.permutation(places), noise.permutation(places), nbytes)
