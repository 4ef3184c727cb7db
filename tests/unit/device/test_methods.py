"""Which way of copying is taken for a plan, and how plans are cut into rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.device._methods import (
    BATCH,
    CASES,
    EACH,
    GATHER,
    STRIDED,
    Case,
    Chooser,
    PinnedMemory,
    Rows,
    Size,
    case_of,
    find_rows,
    is_regular,
)
from kvtier.device._threaded import CopyQueue
from kvtier.device.plan import CopyPlan

HOST = 1 << 40
DEVICE = 1 << 44


def plan(src: Sequence[int], dst: Sequence[int], sizes: Sequence[int]) -> CopyPlan:
    starts, ends, lengths = (np.array(values, dtype=np.uint64) for values in (src, dst, sizes))
    return CopyPlan(starts, ends, lengths, sum(sizes))


def regular(count: int, nbytes: int, host: int = HOST) -> CopyPlan:
    """A load of so many copies at equal distances."""
    offsets = np.arange(count) * 2 * nbytes
    return plan((offsets + host).tolist(), (offsets + DEVICE).tolist(), [nbytes] * count)


def scattered(count: int, nbytes: int) -> CopyPlan:
    offsets = np.random.default_rng(3).permutation(count) * 2 * nbytes
    return plan(
        (np.arange(count) * 2 * nbytes + HOST).tolist(), (offsets + DEVICE).tolist(), [nbytes] * count
    )


def test_copies_at_equal_distances_are_one_call() -> None:
    assert find_rows(regular(5, 64)) == [Rows(HOST, DEVICE, 128, 128, 64, 5)]


def test_a_run_ends_where_a_distance_or_a_length_changes() -> None:
    it = plan([0, 10, 20, 35, 50, 60], [0, 100, 200, 300, 400, 500], [4, 4, 4, 4, 4, 9])
    assert find_rows(it) == [
        Rows(0, 0, 10, 100, 4, 3),
        Rows(35, 300, 15, 100, 4, 2),
        Rows(60, 500, 9, 9, 9, 1),
    ]


@pytest.mark.parametrize("step", [-64, 0, 32, 2**31])
def test_rows_that_overlap_run_backwards_or_lie_too_far_apart_are_calls_of_their_own(step: int) -> None:
    start = 1 << 40
    it = plan([start, start + step, start + 2 * step], [0, 64, 128], [64] * 3)
    assert [rows.count for rows in find_rows(it)] == [1, 1, 1]


def test_a_plan_without_copies_has_no_rows() -> None:
    assert find_rows(plan([], [], [])) == []


runs = st.lists(
    st.tuples(st.integers(1, 6), st.integers(-9, 20), st.integers(0, 20), st.integers(1, 12)), max_size=8
)


@settings(max_examples=200, deadline=None)
@given(runs)
def test_rows_are_the_copies_of_the_plan_in_its_order(runs: list[tuple[int, int, int, int]]) -> None:
    copies: list[tuple[int, int, int]] = []
    src = dst = 1000
    for count, src_step, dst_step, nbytes in runs:
        for _ in range(count):
            copies.append((src, dst, nbytes))
            src, dst = src + src_step, dst + dst_step
    columns = list(zip(*copies, strict=True)) or [(), (), ()]
    rows = find_rows(plan(*columns))
    spelled = [
        (it.src + row * it.src_pitch, it.dst + row * it.dst_pitch, it.nbytes)
        for it in rows
        for row in range(it.count)
    ]
    assert spelled == copies
    assert all(it.src_pitch >= it.nbytes <= it.dst_pitch for it in rows)
    if is_regular(plan(*columns)):
        assert len(copies) >= 4


@pytest.mark.parametrize(
    ("it", "answer"),
    [
        (regular(64, 512), True),
        (scattered(64, 512), False),
        (regular(3, 512), False),
        (regular(4, 512), True),
        (plan([0, 10, 20, 30, 100, 110, 120, 130], range(0, 64, 8), [4] * 8), True),
        (plan([0, 10, 31, 41, 100, 110, 135, 145], range(0, 64, 8), [4] * 8), False),
    ],
)
def test_a_plan_is_regular_when_few_calls_make_it(it: CopyPlan, answer: bool) -> None:
    assert is_regular(it) is answer


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (8, Size.TINY),
        (4096, Size.TINY),
        (4104, Size.SMALL),
        (32768, Size.SMALL),
        (65536, Size.MIDDLE),
        (2**18 + 8, Size.LARGE),
        (2**23, Size.LARGE),
    ],
)
def test_a_case_is_told_by_the_mean_length(nbytes: int, size: Size) -> None:
    assert case_of(regular(8, nbytes), is_store=False) == Case(False, size, True)
    assert case_of(scattered(8, nbytes), is_store=True) == Case(True, size, False)


def test_cases_have_names_of_their_own() -> None:
    assert len({str(case) for case in CASES}) == len(CASES) == 2 * len(Size) * 2


def pinned(*pieces: tuple[int, int]) -> PinnedMemory:
    memory = PinnedMemory()
    for address, nbytes in pieces:
        memory.add(address, nbytes)
    return memory


WHOLE = (HOST, 2**30)


def chooser(memory: PinnedMemory, way: CopyQueue = CopyQueue.LOAD, **choice: str) -> Chooser:
    """Choose by whether plans are scattered or regular, whatever their sizes and ways."""
    named = {str(case): choice["regular" if case.is_regular else "scattered"] for case in CASES}
    methods: dict[str, Any] = dict.fromkeys((EACH, BATCH, STRIDED), object())
    return Chooser(methods, named, way, memory)


def test_the_chosen_method_is_taken() -> None:
    it = chooser(pinned(WHOLE), scattered=BATCH, regular=STRIDED)
    assert [it.name(scattered(64, 512)), it.name(regular(64, 512))] == [BATCH, STRIDED]


def test_a_method_that_is_not_there_is_not_taken() -> None:
    assert chooser(pinned(WHOLE), scattered=GATHER, regular=GATHER).name(scattered(64, 512)) == EACH


def test_one_copy_needs_no_method() -> None:
    assert chooser(pinned(WHOLE), scattered=BATCH, regular=BATCH).name(regular(1, 512)) == EACH


@pytest.mark.parametrize(
    ("pieces", "name"),
    [
        ([], EACH),
        ([(HOST, 2**30)], BATCH),
        ([(HOST, 2**14), (HOST + 2**14, 2**20)], BATCH),
        ([(HOST, 2**14)], EACH),
        ([(HOST + 512, 2**30)], EACH),
        ([(HOST, 2**14), (HOST + 2**15, 2**20)], EACH),
    ],
)
@pytest.mark.parametrize("way", [CopyQueue.LOAD, CopyQueue.STORE])
def test_what_is_not_all_pinned_is_copied_one_by_one(
    pieces: list[tuple[int, int]], name: str, way: CopyQueue
) -> None:
    it = chooser(pinned(*pieces), way, scattered=BATCH, regular=BATCH)
    load = scattered(64, 512)
    assert (
        it.name(load if way is CopyQueue.LOAD else CopyPlan(load.dst, load.src, load.sizes, load.nbytes))
        == name
    )


def test_rows_in_two_pinned_pieces_are_copied_one_by_one() -> None:
    memory = pinned((HOST, 2**14), (HOST + 2**14, 2**20))
    it = chooser(memory, scattered=BATCH, regular=STRIDED)
    assert it.name(regular(64, 512)) == EACH
    assert it.name(regular(16, 512)) == STRIDED
    assert it.name(regular(16, 512, HOST + 2**14)) == STRIDED


def test_what_was_unpinned_is_not_taken_for_pinned() -> None:
    memory = pinned((HOST, 2**14), (HOST + 2**14, 2**20))
    memory.remove(HOST)
    it = chooser(memory, scattered=BATCH, regular=STRIDED)
    assert [it.name(scattered(64, 512)), it.name(regular(16, 512))] == [EACH, EACH]
