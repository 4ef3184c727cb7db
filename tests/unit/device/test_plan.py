"""Plans join neighbours, and their copies cover exactly the pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier import KVCaches, PageMapping, PageRef
from kvtier._device.base import Blocks, PieceRun
from kvtier._device.plan import CopyPlan, CopyPlanner, split
from kvtier._memory.layout import SlotLayout

HOST = 1 << 40


def planner(
    pages: Sequence[int], per_chunk: int, used: Sequence[int] | None = None, piece_slots: int | None = None
) -> CopyPlanner:
    tensors = tuple(torch.zeros((64, page), dtype=torch.int8) for page in pages)
    refs = tuple(PageRef(index, size) for index, size in enumerate(used or pages))
    layout = SlotLayout.make(pages, per_chunk)
    return CopyPlanner(KVCaches(tensors, (refs,)), layout, HOST, 32, piece_slots)


def blocks(ids: Sequence[int], first: int = 0) -> Blocks:
    return Blocks.make(ids, (len(ids),), (first,))


def test_blocks_of_a_chunk_join() -> None:
    plan = planner((512, 256), 4).store(blocks(range(8)), [3, 4])
    assert plan.sizes.tolist() == [2048, 2048, 1024, 1024]
    assert (plan.dst - HOST).tolist() == [3 * 4096, 4 * 4096, 3 * 4096 + 2048, 4 * 4096 + 2048]
    assert plan.nbytes == 8 * 768


def test_chunks_of_a_tensor_join() -> None:
    plan = planner((1024,), 4).load([3, 4, 6], blocks(range(10, 21), first=1))
    assert plan.sizes.tolist() == [7 * 1024, 4 * 1024]
    assert (plan.src - HOST).tolist() == [3 * 4096 + 1024, 6 * 4096]


def test_shared_pages_join_in_loads() -> None:
    latent = PageMapping(1024, (PieceRun(0, 0, 1024),), writers=2, writer=1)
    caches = KVCaches((torch.zeros((64, 1024), dtype=torch.int8),), ((PageRef(0, 1024, latent),),))
    plans = CopyPlanner(caches, SlotLayout.make((1024,), 4), HOST, 32)
    assert plans.load([3, 4, 6], blocks(range(10, 22))).sizes.tolist() == [8 * 1024, 4 * 1024]
    store = plans.store(blocks(range(10, 18)), [3, 4])
    assert (store.dst - HOST).tolist() == [3 * 4096 + (2 * turn + 1) * 1024 for turn in range(4)]
    assert store.sizes.tolist() == [1024] * 4


def test_copies_stay_in_a_piece() -> None:
    plan = planner((1024,), 4, piece_slots=3).load(range(1, 9), blocks(range(10, 37), first=3))
    assert (plan.src - HOST).tolist() == [4096 + 3 * 1024, 3 * 4096, 6 * 4096]
    assert plan.sizes.tolist() == [5 * 1024, 12 * 1024, 10 * 1024]
    assert (plan.dst - plan.dst[0]).tolist() == [0, 5 * 1024, 17 * 1024]


def test_padding_is_not_copied() -> None:
    plan = planner((512, 512), 2, used=(512, 500)).store(blocks(range(2)), [0])
    assert sorted(plan.sizes.tolist()) == [500, 500, 1024]


def test_doubled_tensor_copied_once() -> None:
    caches = KVCaches((torch.zeros((4, 64), dtype=torch.int8),), ((PageRef(0, 60), PageRef(0, 64)),))
    plan = CopyPlanner(caches, SlotLayout.make((64,), 1), HOST, 4).store(blocks([1]), [0])
    assert plan.sizes.tolist() == [64]


def test_group_without_layers_copies_nothing() -> None:
    """The group's layers belong to another pipeline stage, whose workers have its pages."""
    caches = KVCaches((torch.zeros((4, 64), dtype=torch.int8),), ((), (PageRef(0, 64),)))
    plans, both = (
        CopyPlanner(caches, SlotLayout.make((64,), 2), HOST, 8),
        Blocks.make([1, 2, 3], (2, 1), (0, 1)),
    )
    assert plans.load([6, 5], both).sizes.tolist() == [64]
    assert plans.store(Blocks.make([1, 2], (2, 0), (0, 0)), [6]).nbytes == 0


@pytest.mark.parametrize(
    ("ids", "sizes", "firsts", "message"),
    [
        ([1, 2], (1,), (0,), "add up to 1, but there are 2 ids"),
        ([1], (1,), (0, 1), "1 group_sizes, but 2 first_indices"),
        ([1], (1,), (-1,), "negative"),
        ([1], (2, -1), (0, 0), "negative"),
    ],
)
def test_inconsistent_blocks(
    ids: list[int], sizes: tuple[int, ...], firsts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Blocks.make(ids, sizes, firsts)
    with pytest.raises(ValueError, match="int32"):
        Blocks(np.zeros(1, dtype=np.int32), (1,), (0,))


@pytest.mark.parametrize(
    ("tensor", "ref", "message"),
    [
        (torch.zeros((4, 64), dtype=torch.int16), PageRef(0, 64), "tensor 0 is not int8"),
        (torch.zeros((64, 4), dtype=torch.int8).t(), PageRef(0, 64), "contiguous rows"),
        (torch.zeros((4, 64), dtype=torch.int8), PageRef(1, 64), "refers to tensor 1 of 1"),
        (torch.zeros((4, 64), dtype=torch.int8), PageRef(0, 65), "uses 65 bytes"),
    ],
)
def test_impossible_caches(tensor: torch.Tensor, ref: PageRef, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCaches((tensor,), ((ref,),))


def test_neighbouring_pieces_join() -> None:
    apart = PageMapping(96, (PieceRun(0, 32, 8, 2, 8, 8), PieceRun(16, 48, 16), PieceRun(32, 80, 16)))
    assert apart.pieces().tolist() == [[0, 32, 32], [32, 80, 16]]


@pytest.mark.parametrize(
    ("canonical", "runs", "message"),
    [
        (64, (PieceRun(0, 0, 31),), "do not cover a page of 32 bytes"),
        (64, (PieceRun(1, 0, 32),), "do not cover a page of 32 bytes"),
        (64, (PieceRun(0, 0, 16), PieceRun(8, 32, 16)), "overlap in the page"),
        (64, (PieceRun(0, 0, 16), PieceRun(16, 8, 16)), "overlap in the canonical page"),
        (64, (PieceRun(0, 0, 16, 2, 16, 49),), "goes beyond the canonical page"),
    ],
)
def test_lossy_mapping(canonical: int, runs: tuple[PieceRun, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PageRef(0, 32, PageMapping(canonical, runs))


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 1, 0), (0, 0, 1, 2, -1)])
def test_impossible_run_or_writer(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a length of 1 or more and an offset"):
        PieceRun(*numbers)
    with pytest.raises(ValueError, match="writer is 2 of 2"):
        PageMapping(32, (PieceRun(0, 0, 32),), writers=2, writer=2)


def test_page_in_two_places() -> None:
    first, second = (PageMapping(128, (PieceRun(0, offset, 64),)) for offset in (0, 64))
    caches = KVCaches(
        (torch.zeros((4, 64), dtype=torch.int8),), ((PageRef(0, 64, first), PageRef(0, 64, second)),)
    )
    with pytest.raises(ValueError, match="maps its pages of tensor 0 in two ways"):
        CopyPlanner(caches, SlotLayout.make(caches.page_bytes, 1), HOST, 4)


@st.composite
def offers(draw: st.DrawFn) -> tuple[int, list[list[list[bool]]]]:
    """Draw blocks per chunk, and the blocks that an engine has of each chunk in each group."""
    width = draw(st.integers(1, 4))
    chunk = st.one_of(st.just([True] * width), st.lists(st.booleans(), min_size=width, max_size=width))
    group = st.lists(chunk, max_size=4)
    return width, draw(st.lists(group, min_size=1, max_size=3))


@given(offers(), st.data())
def test_only_complete_chunks_are_stored(
    offer: tuple[int, list[list[list[bool]]]], data: st.DataObject
) -> None:
    width, groups = offer
    ids, sizes, firsts, there = [], [], [], []
    for number, group in enumerate(groups):
        start = data.draw(st.integers(0, 3)) * width
        has = [has for chunk in group for has in chunk]
        own = [100 * number + index for index, is_there in enumerate(has) if is_there]
        ids += own
        sizes.append(len(own))
        firsts.append(start + has.index(True) if own else 0)
        there += [all(chunk) for chunk in group]
    chunks = [len(group) for group in groups]
    kept, whole = Blocks.make(ids, sizes, firsts).whole_chunks(chunks, width)

    assert all(there[place] for place, is_whole in enumerate(whole) if is_whole)
    assert all(kept.whole_chunks(kept.slots_needed(width), width)[1])
    assert sum(kept.slots_needed(width)) == sum(whole)
    names = [(number, at) for number, group in enumerate(groups) for at in range(len(group))]
    stored = [
        100 * number + at * width + block for number, at in compress(names, whole) for block in range(width)
    ]
    assert kept.ids.tolist() == stored
    if all(all(chunk) for group in groups for chunk in group):
        assert whole == there


@pytest.mark.parametrize(
    ("groups", "chunks", "per_chunk", "whole"),
    [
        ([(6, 0)], (2,), 3, [True, True]),
        ([(6, 3)], (2,), 3, [True, True]),
        ([(5, 7)], (5,), 1, [True] * 5),
        ([(4, 2)], (2,), 3, [False, True]),
        ([(4, 2), (3, 0)], (2, 1), 3, [False, True, True]),
        ([(1, 5)], (1,), 3, [False]),
        ([(0, 0), (3, 9), (0, 4)], (0, 1), 3, [True]),
        ([(5, 0)], (2,), 3, [False, False]),  # one block is missing, of an unknown chunk
        ([(3, 1)], (2,), 3, [False, False]),
        ([(3, 0)], (2,), 3, [False, False]),
        ([(3, 0), (2, 0)], (1, 1), 3, [True, False]),
        ([(0, 0), (3, 0)], (1, 1), 3, [False, True]),
        ([(6, 0)], (1,), 3, [False]),
    ],
)
def test_hole_costs_its_chunks(
    groups: list[tuple[int, int]], chunks: tuple[int, ...], per_chunk: int, whole: list[bool]
) -> None:
    sizes, firsts = zip(*groups, strict=True)
    assert Blocks.make(range(sum(sizes)), sizes, firsts).whole_chunks(chunks, per_chunk)[1] == whole


def test_states_need_last_block() -> None:
    offered = Blocks.make(range(5), (1, 4), (5, 2))
    kept, whole = offered.whole_chunks((1, 2), 3, state_groups={0})
    assert (kept.ids.tolist(), whole) == ([0, 2, 3, 4], [True, False, True])
    assert not all(kept.whole_chunks((1, 1), 3)[1])
    assert all(kept.whole_chunks((1, 1), 3, state_groups={0})[1])
    assert offered.whole_chunks((2, 2), 3, state_groups={0})[1] == [False, False, False, True]


@pytest.mark.parametrize(("size", "first"), [(3, 1), (3, 0), (1, 3), (4, 2)])
def test_unwritten_bytes_are_refused(size: int, first: int) -> None:
    plans, ids = planner((1024,), 4), blocks(range(size), first)
    slots = range(sum(ids.slots_needed(4)))
    assert plans.load(slots, ids).nbytes == size * 1024
    with pytest.raises(ValueError, match="a store needs all 4 blocks of each chunk"):
        plans.store(ids, slots)


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 300)), max_size=8),
    st.integers(1, 100),
)
def test_split_plan_copies_same_bytes(copies: list[tuple[int, int, int]], most: int) -> None:
    src, dst, sizes = np.array(copies, dtype=np.uint64).reshape(-1, 3).T.copy()
    plan = CopyPlan(src, dst, sizes)
    pieces = split(plan, most)

    def moved(plan: CopyPlan) -> list[tuple[int, int]]:
        rows = zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True)
        return [(source + at, target + at) for source, target, size in rows for at in range(size)]

    assert moved(pieces) == moved(plan)
    assert pieces.nbytes == plan.nbytes
    assert all(0 < size <= most for size in pieces.sizes.tolist())
