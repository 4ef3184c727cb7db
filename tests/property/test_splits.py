"""What the ranks of one split have written, the ranks of any other split read: each its own bytes.

A split divides the heads of the KV cache among tensor-parallel ranks; where there are more ranks than
heads several hold the same head, and a latent cache is held whole by all. The pages here are cut out of
one array that holds the whole cache, so that what a rank must read is known without any mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier._device.base import Blocks, KVCaches, PageMapping, PageRef, Run
from kvtier._device.cpu import CpuTransferEngine
from kvtier._device.plan import CopyPlan, CopyPlanner
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region
from tests.effort import effort

Bytes = npt.NDArray[np.int8]

BLOCKS = 24
SLOTS = 16
ORDERS = {
    "token, head, both": (2, 1, 0),
    "head, token, both": (1, 2, 0),
    "keys and values apart, token, head": (0, 2, 1),
    "keys and values apart, head, token": (0, 1, 2),
}
"""How the axes (keys and values, head, token) follow each other in a page, the outermost first."""


@dataclass(frozen=True)
class Layer:
    """A layer's cache as one worker alone would have it.

    Attributes:
        heads: number of heads; 0 for a latent that is not divided.
        tokens: tokens of a block.
        cell_bytes: bytes of one token and head, of keys or of values.
        order: of the axes in a page; one of ``ORDERS``.
        gap_bytes: between the pages of a rank's tensor.
    """

    heads: int
    tokens: int
    cell_bytes: int
    order: tuple[int, ...]
    gap_bytes: int

    def cells(self, heads: Sequence[int]) -> list[tuple[int, ...]]:
        """Return (keys or values, head, token) of each cell of a page with these heads, in its order."""
        sizes = (range(2), heads, range(self.tokens))
        ordered = product(*(sizes[axis] for axis in self.order))
        return [tuple(cell[self.order.index(axis)] for axis in range(3)) for cell in ordered]


@dataclass(frozen=True)
class Split:
    """The part of the heads that each of ``ranks`` ranks has."""

    ranks: int

    def heads(self, layer: Layer, rank: int) -> range:
        """Return the heads that a rank holds; a latent counts as one head."""
        total = max(layer.heads, 1)
        if layer.heads and self.ranks <= total:
            each = total // self.ranks
            return range(rank * each, (rank + 1) * each)
        holders = self.ranks // total
        return range(rank // holders, rank // holders + 1)

    def mapping(self, layer: Layer, rank: int) -> PageMapping:
        """Return where each cell of a rank's page is in the whole page: one run for each of them."""
        places = {cell: place for place, cell in enumerate(layer.cells(range(max(layer.heads, 1))))}
        heads = self.heads(layer, rank)
        size = layer.cell_bytes
        runs = tuple(
            Run(place * size, places[cell] * size, size) for place, cell in enumerate(layer.cells(heads))
        )
        holders = [other for other in range(self.ranks) if self.heads(layer, other) == heads]
        return PageMapping(len(places) * size, runs, len(holders), holders.index(rank))


def gathered(mapping: PageMapping) -> PageMapping:
    """Return the same with as few runs as a greedy walk finds: pieces at equal distances are one run."""
    runs: list[Run] = []
    for run in mapping.runs:
        last = runs[-1] if runs else None
        if last is not None and last.piece_bytes == run.piece_bytes:
            steps = run.local_offset - last.local_offset, run.canonical_offset - last.canonical_offset
            strides = last.local_stride * last.pieces, last.canonical_stride * last.pieces
            if min(steps) >= 0 and (last.pieces == 1 or steps == strides):
                first = steps if last.pieces == 1 else (last.local_stride, last.canonical_stride)
                last = replace(last, pieces=last.pieces + 1, local_stride=first[0], canonical_stride=first[1])
                runs[-1] = last
                continue
        runs.append(run)
    return replace(mapping, runs=tuple(runs))


class Rank:
    """One rank of a split over some layers, with tensors of its own."""

    def __init__(
        self, split: Split, rank: int, layers: Sequence[Layer], per_chunk: int, strided: bool
    ) -> None:
        mappings = [split.mapping(layer, rank) for layer in layers]
        if strided:
            mappings = [gathered(mapping) for mapping in mappings]
        pages = [2 * layer.tokens * layer.cell_bytes * len(split.heads(layer, rank)) for layer in layers]
        wholes = [
            torch.full((BLOCKS, page + layer.gap_bytes), 77, dtype=torch.int8)
            for page, layer in zip(pages, layers, strict=True)
        ]
        self.tensors = [whole[:, :page] for whole, page in zip(wholes, pages, strict=True)]
        refs = tuple(
            PageRef(index, page, mapping)
            for index, (page, mapping) in enumerate(zip(pages, mappings, strict=True))
        )
        self.caches = KVCaches(tuple(self.tensors), (refs,))
        self.layout = SlotLayout.make(self.caches.page_bytes, per_chunk)
        self._heads = [split.heads(layer, rank) for layer in layers]

    def expected(self, layers: Sequence[Layer], cache: Sequence[Bytes], block: int) -> Iterator[Bytes]:
        """Yield the page that this rank has of a block in each layer, cut from the whole cache."""
        for layer, heads, whole in zip(layers, self._heads, cache, strict=True):
            yield np.concatenate([whole[block][cell] for cell in layer.cells(heads)])


@dataclass(frozen=True)
class Case:
    """Layers, two splits, and a transfer whose first and last chunk can be partial."""

    layers: tuple[Layer, ...]
    writing: Split
    reading: Split
    per_chunk: int
    first: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    slots: tuple[int, ...]
    strided: bool

    def ranks(self, split: Split) -> list[Rank]:
        """Make the ranks of a split."""
        return [Rank(split, rank, self.layers, self.per_chunk, self.strided) for rank in range(split.ranks)]

    def blocks(self, ids: Sequence[int]) -> Blocks:
        return Blocks.make(ids, (len(ids),), (self.first,))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads = st.sampled_from([0, 1, 2, 4, 8])
    layer = st.builds(
        Layer,
        heads,
        st.integers(1, 4),
        st.sampled_from([1, 8]),
        st.sampled_from(sorted(ORDERS.values())),
        st.sampled_from([0, 5]),
    )
    split = st.builds(Split, st.sampled_from([1, 2, 4, 8]))
    per_chunk = draw(st.sampled_from([1, 2, 3]))
    first = draw(st.integers(0, 4))
    count = draw(st.integers(1, 9))
    needed = -(-(first % per_chunk + count) // per_chunk)
    return Case(
        tuple(draw(st.lists(layer, min_size=1, max_size=3))),
        draw(split),
        draw(split),
        per_chunk,
        first,
        tuple(draw(st.permutations(range(BLOCKS)))[:count]),
        tuple(draw(st.permutations(range(BLOCKS)))[:count]),
        tuple(draw(st.permutations(range(SLOTS)))[:needed]),
        draw(st.booleans()),
    )


def whole_cache(case: Case) -> list[Bytes]:
    """Make the cache of all layers: for each, bytes by (block, keys or values, head, token, byte)."""
    noise = np.random.default_rng(1)
    return [
        noise.integers(-128, 128, (BLOCKS, 2, max(layer.heads, 1), layer.tokens, layer.cell_bytes), np.int8)
        for layer in case.layers
    ]


@settings(max_examples=effort(30, 150), deadline=None)
@given(case=cases())
def test_any_split_reads_what_any_other_has_written(case: Case) -> None:
    cache = whole_cache(case)
    writers, readers = case.ranks(case.writing), case.ranks(case.reading)
    layout = writers[0].layout
    assert {rank.layout for rank in writers + readers} == {layout}
    with Region.anonymous(SLOTS, layout.chunk_bytes) as region:
        for rank in writers:
            for block in case.sources:
                pages = rank.expected(case.layers, cache, block)
                for tensor, page in zip(rank.tensors, pages, strict=True):
                    tensor[block] = torch.from_numpy(page)
            engine = CpuTransferEngine(rank.caches, layout, region)
            engine.submit_store(1, case.blocks(case.sources), case.slots)
            engine.close()
        for rank in readers:
            engine = CpuTransferEngine(rank.caches, layout, region)
            engine.submit_load(1, case.slots, case.blocks(case.targets))
            engine.close()
    for rank in readers:
        for source, target in zip(case.sources, case.targets, strict=True):
            pages = rank.expected(case.layers, cache, source)
            for tensor, page in zip(rank.tensors, pages, strict=True):
                np.testing.assert_array_equal(tensor[target].numpy(), page)
        untouched = sorted({*range(BLOCKS)} - {*case.targets})
        assert all(bool((tensor[untouched] == 77).all()) for tensor in rank.tensors)


def spans(plans: Sequence[CopyPlan], address: int) -> list[tuple[int, int]]:
    """Return (offset in the slots, length) of all that plans write."""
    return sorted(
        (int(start) - address, int(size))
        for plan in plans
        for start, size in zip(plan.dst, plan.sizes, strict=True)
    )


@settings(max_examples=effort(20, 100), deadline=None)
@given(case=cases())
def test_each_byte_of_a_canonical_page_is_written_by_one_rank(case: Case) -> None:
    address = 1 << 40
    ranks = case.ranks(case.writing)
    layout = ranks[0].layout
    planners = [CopyPlanner(rank.caches, layout, address, SLOTS) for rank in ranks]
    written = spans([planner.store(case.blocks(case.sources), case.slots) for planner in planners], address)
    expected: set[int] = set()
    for number in range(len(case.sources)):
        chunk, block = divmod(case.first % case.per_chunk + number, case.per_chunk)
        for tensor, page in enumerate(layout.page_bytes):
            start = case.slots[chunk] * layout.chunk_bytes + layout.offset(tensor, block)
            expected |= {*range(start, start + page)}
    found = [byte for start, size in written for byte in range(start, start + size)]
    assert len(found) == len(set(found))
    assert set(found) == expected


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_with_the_same_bytes_share_the_writing(ranks: int) -> None:
    latent = Layer(0, 4, 8, (0, 1, 2), 0)
    case = Case((latent,), Split(ranks), Split(1), 1, 0, tuple(range(16)), (), tuple(range(16)), False)
    planners = [CopyPlanner(rank.caches, rank.layout, 1 << 40, SLOTS) for rank in case.ranks(case.writing)]
    stores = [planner.store(case.blocks(case.sources), case.slots).nbytes for planner in planners]
    assert stores == [16 * 64 // ranks] * ranks
    assert planners[0].load(case.slots, case.blocks(case.sources)).nbytes == 16 * 64
