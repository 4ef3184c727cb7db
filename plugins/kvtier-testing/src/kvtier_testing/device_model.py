"""Tensors and slots with known bytes, an engine over them, and a model of its transfers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import pytest
import torch

from kvtier import KVCaches, PageMapping, PageRef
from kvtier._device._engine import TransferEngine
from kvtier._device.backends.cpu import CopyFunction, CpuRuntime, HostStream
from kvtier._device.base import Blocks, CopyQueue
from kvtier._memory.layout import SlotLayout
from kvtier._memory.region import Region

EngineFactory = Callable[[KVCaches, SlotLayout, Region], TransferEngine]

GatedFactory = Callable[[float], EngineFactory]
"""Called with a deadline in seconds; makes engines whose copies pass the test's gate."""


class GivenCopies(CpuRuntime):
    """Host memory, with all copies made by one function."""

    def __init__(self, copy: CopyFunction) -> None:
        self._copy = copy

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> HostStream:  # noqa: ARG002
        return HostStream(self._copy)


class Compute:
    """The engine's computation, done by the tests on torch's current stream."""

    def run(self, work: Callable[[], object]) -> None:
        """Submit work to the device; it may still run when this returns."""
        work()

    def finish(self) -> None:
        """Block until all work is done."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


class Gate:
    """Holds copies in the threads of the queues. Each copy passes it before its first byte moves."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._opened = threading.Condition()

    def hold(self, *queues: CopyQueue) -> None:
        """Block copies of these queues from now on."""
        with self._opened:
            self._held.update(queues)

    def open(self) -> None:
        """Unblock all copies."""
        with self._opened:
            self._held.clear()
            self._opened.notify_all()

    def go_through(self) -> None:
        """Block while the queue of the calling thread is held."""
        name = threading.current_thread().name
        with self._opened:
            self._opened.wait_for(lambda: name not in self._held, 60)


@dataclass(frozen=True)
class Shape:
    """The tensors and slots of one test.

    Attributes:
        page_bytes: bytes of a block in each tensor.
        gaps: bytes between the rows of each tensor; missing ones are 0.
        groups: (tensor, used bytes) pairs of each group; by default one group uses all tensors whole.
        mappings: mapping of each tensor's pages to canonical pages; missing ones are None. A page with
            a mapping is used whole.
        num_blocks, slots: rows of each tensor, and slots of the region.
        blocks_per_chunk, rank, workers: as in ``SlotLayout.make``.
    """

    page_bytes: tuple[int, ...] = (512, 192)
    gaps: tuple[int, ...] = ()
    groups: tuple[tuple[tuple[int, int], ...], ...] = ()
    mappings: tuple[PageMapping | None, ...] = ()
    num_blocks: int = 48
    slots: int = 24
    blocks_per_chunk: int = 1
    rank: int = 0
    workers: int = 1

    @property
    def layout(self) -> SlotLayout:
        """The layout of the slots."""
        pages = [
            mapping.canonical_bytes if mapping is not None else page
            for page, mapping in zip_longest(self.page_bytes, self.mappings)
        ]
        return SlotLayout.make(pages, self.blocks_per_chunk, self.rank, self.workers)

    def page_refs(self) -> tuple[tuple[PageRef, ...], ...]:
        """The groups as ``KVCaches`` takes them."""
        groups = self.groups or (tuple(enumerate(self.page_bytes)),)
        mappings = dict(enumerate(self.mappings))
        return tuple(
            tuple(PageRef(tensor, used, mappings.get(tensor)) for tensor, used in group) for group in groups
        )


class TransferModel:
    """A plain model of the effects of transfers. Takes no part in copies.

    Attributes:
        rows: rows of each tensor, gaps included.
        slots: the slots' bytes.
    """

    def __init__(self, shape: Shape, rows: list[list[bytearray]], slots: list[bytearray]) -> None:
        self._layout = shape.layout
        self._groups = shape.page_refs()
        self.rows = rows
        self.slots = slots

    def store(self, blocks: Blocks, slots: Sequence[int]) -> None:
        """Apply ``submit_store`` to the model."""
        for ref, row, slot, page, turn in self._pages(blocks, slots):
            if ref.mapping is None or turn % ref.mapping.writers == ref.mapping.writer:
                for here, there, size in _pieces(ref):
                    slot[page + there : page + there + size] = row[here : here + size]

    def load(self, slots: Sequence[int], blocks: Blocks) -> None:
        """Apply ``submit_load`` to the model."""
        for ref, row, slot, page, _ in self._pages(blocks, slots):
            for here, there, size in _pieces(ref):
                row[here : here + size] = slot[page + there : page + there + size]

    def nbytes(self, blocks: Blocks) -> int:
        """Count the bytes that a load of ``blocks`` moves, or a store if this worker writes all."""
        return sum(
            size * sum(ref.page_bytes for ref in refs)
            for size, refs in zip(blocks.group_sizes, self._groups, strict=True)
        )

    def _pages(
        self, blocks: Blocks, slots: Sequence[int]
    ) -> Iterator[tuple[PageRef, bytearray, bytearray, int, int]]:
        """Yield the row, slot, offset in the slot, and number across all slots of each page."""
        ids, coming = iter(blocks.ids.tolist()), iter(slots)
        per_chunk = self._layout.blocks_per_chunk
        for refs, size, first in zip(self._groups, blocks.group_sizes, blocks.first_indices, strict=True):
            slot = 0
            for index in range(first, first + size):
                sub_block = index % per_chunk
                if index == first or sub_block == 0:
                    slot = next(coming)
                block = next(ids)
                for ref in refs:
                    page = self._layout.tensor_offsets[ref.tensor]
                    page += sub_block * self._layout.page_bytes[ref.tensor]
                    row = self.rows[ref.tensor][block]
                    yield ref, row, self.slots[slot], page, slot * per_chunk + sub_block


def _pieces(ref: PageRef) -> Iterator[tuple[int, int, int]]:
    """Yield the offsets of each piece of a page in the row and in the slot's page, and its length."""
    if ref.mapping is None:
        yield 0, 0, ref.page_bytes
        return
    for run in ref.mapping.runs:
        for number in range(run.pieces):
            here = run.local_offset + number * run.local_stride
            yield here, run.canonical_offset + number * run.canonical_stride, run.piece_bytes


class Rig:
    """An engine over patterned tensors and slots, with its model.

    Attributes:
        shape: the tensors and slots.
        caches: the tensors as the engine has them.
        model: the expected bytes.
    """

    def __init__(self, factory: EngineFactory, shape: Shape, device: str = "cpu") -> None:
        noise = random.Random(1)
        self.shape = shape
        self.region = Region.anonymous(shape.slots, shape.layout.chunk_bytes)
        gaps = shape.gaps + (0,) * (len(shape.page_bytes) - len(shape.gaps))
        widths = [page + gap for page, gap in zip(shape.page_bytes, gaps, strict=True)]
        rows = [[bytearray(noise.randbytes(width)) for _ in range(shape.num_blocks)] for width in widths]
        slots = [bytearray(noise.randbytes(shape.layout.chunk_bytes)) for _ in range(shape.slots)]
        self._whole = [_tensor(table, device) for table in rows]
        for slot, content in enumerate(slots):
            self.region.view(slot)[:] = content
        tensors = tuple(whole[:, :page] for whole, page in zip(self._whole, shape.page_bytes, strict=True))
        self.caches = KVCaches(tensors, shape.page_refs())
        self.model = TransferModel(shape, rows, slots)
        self.engine = factory(self.caches, shape.layout, self.region)

    def store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        """Submit a store, and apply it to the model."""
        self.engine.submit_store(transfer_id, blocks, slots)
        self.model.store(blocks, slots)

    def load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        """Submit a load, and apply it to the model."""
        self.engine.submit_load(transfer_id, slots, blocks, expedited=expedited)
        self.model.load(slots, blocks)

    def check_there_and_back(self, number: int, blocks: Blocks, slots: Sequence[int], target: Blocks) -> None:
        """Store blocks, load them into others, and check all bytes after each. Uses two transfer ids."""
        self.store(number, blocks, slots)
        self.check()
        self.load(number + 1, slots, target)
        self.check()

    def paint(self, compute: Compute, block: int, value: int) -> None:
        """Compute all bytes of a block on the device, and write them in the model."""
        pages = self.caches.tensors
        compute.run(partial(_fill, [tensor[block] for tensor in pages], value))
        for tensor, rows in zip(pages, self.model.rows, strict=True):
            width = tensor.shape[1]
            rows[block][:width] = bytes([value]) * width

    def check(self) -> None:
        """Wait for all transfers and compare all bytes with the model."""
        self.engine.drain()
        for index, (whole, rows) in enumerate(zip(self._whole, self.model.rows, strict=True)):
            for block, (found, expected) in enumerate(zip(whole.cpu(), rows, strict=True)):
                assert found.numpy().tobytes() == expected, f"tensor {index}, block {block}"
        for slot, expected in enumerate(self.model.slots):
            assert self.region.view(slot) == expected, f"slot {slot}"

    def close(self) -> None:
        """Close engine and region."""
        self.engine.close()
        self.region.close()


@contextmanager
def rig(factory: EngineFactory, shape: Shape | None = None, device: str = "cpu") -> Iterator[Rig]:
    """Make a ``Rig`` and close it at the end."""
    made = Rig(factory, shape or Shape(), device)
    try:
        yield made
    finally:
        made.close()


def _fill(pages: Sequence[torch.Tensor], value: int) -> None:
    for page in pages:
        page.fill_(value)


def _tensor(rows: list[bytearray], device: str) -> torch.Tensor:
    flat = torch.frombuffer(bytearray().join(rows), dtype=torch.int8)
    return flat.reshape(len(rows), -1).to(device)


def neighbours(first_id: int, count: int, first_index: int = 0) -> Blocks:
    """Return adjacent blocks of one group, from ``first_id`` on."""
    return Blocks.make(range(first_id, first_id + count), (count,), (first_index,))


class DeviceSetup:
    """The fixtures and the device that a backend's author supplies to ``DeviceConformance``.

    Attributes:
        device: torch device of the tensors.
    """

    device = "cpu"

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        """Return a factory of engines for given tensors, layout and region."""
        raise NotImplementedError("a conformance test needs the fixture engine_factory")

    @pytest.fixture
    def compute(self) -> Compute:
        """Return the computation that runs concurrently with the engine."""
        return Compute()

    @pytest.fixture
    def gate(self) -> Iterator[Gate]:
        """Return a gate for copies, which opens at the end of the test."""
        gate = Gate()
        yield gate
        gate.open()

    @pytest.fixture
    def gated_factory(self, gate: Gate) -> GatedFactory:
        """Return a factory of engines whose copies pass ``gate``."""
        raise NotImplementedError("a conformance test needs the fixture gated_factory")
