"""Any transfer matches the plain model, with and without the native helper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import _native as native
from kvtier._device.auto import open_transfer_engine
from kvtier._device.base import Blocks
from kvtier_testing.device import Shape, rig
from tests.effort import effort

BLOCKS = 48


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    pages = draw(st.lists(st.sampled_from([1, 24, 512, 4096]), min_size=1, max_size=3))
    gaps = draw(st.lists(st.sampled_from([0, 8, 33]), min_size=len(pages), max_size=len(pages)))
    refs = st.integers(0, len(pages) - 1).flatmap(
        lambda tensor: st.tuples(st.just(tensor), st.sampled_from([pages[tensor], (pages[tensor] + 1) // 2]))
    )
    group = st.lists(refs, min_size=1, max_size=len(pages), unique_by=lambda ref: ref[0]).map(tuple)
    workers = draw(st.integers(1, 2))
    return Shape(
        page_bytes=tuple(pages),
        gaps=tuple(gaps),
        groups=tuple(draw(st.lists(group, min_size=1, max_size=3))),
        num_blocks=BLOCKS,
        blocks_per_chunk=draw(st.sampled_from([1, 2, 3, 4])),
        rank=draw(st.integers(0, workers - 1)),
        workers=workers,
    )


@pytest.mark.parametrize("helper", ["native", "fallback"])
@settings(max_examples=effort(20, 100), deadline=None)
@given(shape=shapes(), data=st.data())
def test_device_matches_model(helper: str, shape: Shape, data: st.DataObject) -> None:
    groups = len(shape.groups)
    width = shape.blocks_per_chunk
    counts = data.draw(st.lists(st.integers(0, 7 // width), min_size=groups, max_size=groups))
    firsts = [width * data.draw(st.integers(0, 3)) for _ in counts]
    sizes = [count * width for count in counts]
    ids = data.draw(st.one_of(st.just(range(BLOCKS)), st.permutations(range(BLOCKS))))
    total = sum(sizes)
    source = Blocks.make(ids[:total], sizes, firsts)
    skips = [data.draw(st.integers(0, width - 1)) if count else 0 for count in counts]
    lefts = [data.draw(st.integers(0, width - 1)) if count > 1 else 0 for count in counts]
    sizes = [size - skip - left for size, skip, left in zip(sizes, skips, lefts, strict=True)]
    firsts = [first + skip for first, skip in zip(firsts, skips, strict=True)]
    target = Blocks.make(ids[total : total + sum(sizes)], sizes, firsts)
    slots = data.draw(st.one_of(st.just(range(shape.slots)), st.permutations(range(shape.slots))))
    slots = slots[: sum(counts)]
    with pytest.MonkeyPatch.context() as patch, rig(open_transfer_engine, shape) as it:
        if helper == "fallback":
            patch.setattr(native, "library", None)
        it.store(1, source, slots)
        it.check()
        it.load(2, slots, target)
        it.check()
        moved = [it.model.nbytes(blocks) for blocks in (source, target)]
        assert [end.nbytes for end in it.engine.finished()] == moved
