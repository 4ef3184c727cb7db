"""The measurement of copy methods, over host memory, and the file that keeps what it gave."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier._device._methods import CASES, Case, Size, case_of
from kvtier._device._probe import Scratch, cached_choice, choose
from kvtier._device.plan import CopyPlan


class Host:
    """A method over host memory that is slow, wrong or refuses as it is told."""

    def __init__(self, slow_s: float = 0.0, fault: str = "") -> None:
        self.slow_s = slow_s
        self.fault = fault
        self.plans: list[CopyPlan] = []

    def __call__(self, plan: CopyPlan, stream: Any) -> None:
        self.plans.append(plan)
        if self.fault == "refuse" and len(self.plans) > 3:
            raise OSError("the driver is too old")
        time.sleep(self.slow_s)
        copies = list(zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True))
        for source, target, size in copies[1:] if self.fault == "leave out" else copies:
            ctypes.memmove(target, source, size + (8 if self.fault == "too much" else 0))


@pytest.fixture
def scratch(played_torch: Any) -> Scratch:
    return Scratch(torch.device("cpu"), played_torch.Stream())


def test_the_fastest_is_chosen_for_every_case(scratch: Scratch) -> None:
    methods = {"slow": Host(slow_s=0.02), "quick": Host()}
    assert choose(methods, scratch.measure) == {str(case): "quick" for case in CASES}


def test_each_case_is_measured_with_copies_of_its_kind(scratch: Scratch) -> None:
    method = Host()
    for case in CASES:
        scratch.measure(method, case)
        plan = method.plans[-1]
        assert case_of(plan, case.is_store) == case
        assert len(plan.sizes) > 3


@pytest.mark.parametrize("fault", ["leave out", "too much", "refuse"])
def test_a_method_that_copies_wrongly_or_is_refused_is_never_chosen(scratch: Scratch, fault: str) -> None:
    methods = {"quick": Host(fault=fault), "slow": Host(slow_s=0.002)}
    assert set(choose(methods, scratch.measure).values()) == {"slow"}
    assert choose({"only": Host(fault=fault)}, scratch.measure) == {}


@pytest.mark.parametrize("is_store", [True, False])
def test_wrong_bytes_are_named(scratch: Scratch, is_store: bool) -> None:
    with pytest.raises(ValueError, match="it copied wrong bytes"):
        scratch.measure(Host(fault="leave out"), Case(is_store, Size.TINY))


def never() -> dict[str, str]:
    raise AssertionError("it was measured again")


def test_a_choice_is_kept_for_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "choice.json"
    assert cached_choice("here", dict, path) == {}  # nothing could be chosen: that is not kept
    assert cached_choice("here", lambda: {"case": "batch"}, path) == {"case": "batch"}
    assert cached_choice("here", never, path) == {"case": "batch"}
    assert cached_choice("there", lambda: {"case": "each"}, path) == {"case": "each"}
    assert cached_choice("here", never, path) == {"case": "batch"}
    assert [file.name for file in path.parent.iterdir()] == ["choice.json"]


def test_the_file_is_in_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached_choice("here", lambda: {"case": "batch"})
    assert (tmp_path / "kvtier" / "copy-methods.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"here": 3}', '{"here": {"case": 3}}', "\0\0"])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "choice.json"
    path.write_text(content)
    assert cached_choice("here", lambda: {"case": "batch"}, path) == {"case": "batch"}
    assert json.loads(path.read_text())["here"] == {"case": "batch"}


def test_a_place_that_cannot_be_written_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "choice.json"  # its directory cannot be made
    assert cached_choice("here", lambda: {"case": "batch"}, path) == {"case": "batch"}
