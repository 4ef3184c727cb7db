from __future__ import annotations

import mmap

import pytest

from kvtier._memory.layout import SlotLayout


def test_pages_do_not_overlap() -> None:
    owners = [
        (layout.tensor_offsets[tensor] + block * size, size)
        for layout in (SlotLayout.make((96, 8, 33), 3, rank, 4) for rank in range(4))
        for tensor, size in enumerate(layout.page_bytes)
        for block in range(3)
    ]
    ends = [0] + [start + size for start, size in sorted(owners)]
    assert [start for start, _ in sorted(owners)] == ends[:-1]
    assert ends[-1] <= SlotLayout.make((96, 8, 33), 3, 0, 4).chunk_bytes


@pytest.mark.parametrize(
    ("page", "workers", "pages"), [(mmap.PAGESIZE, 1, 1), (mmap.PAGESIZE + 1, 1, 2), (1, 3, 1)]
)
def test_slot_is_whole_pages(page: int, workers: int, pages: int) -> None:
    assert SlotLayout.make((page,), 1, 0, workers).chunk_bytes == pages * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("pages", "per_chunk", "rank", "area_bytes", "message"),
    [
        ((), 1, 0, None, "one positive length for each tensor"),
        ((4, 0), 1, 0, None, "one positive length for each tensor"),
        ((4,), 0, 0, None, "blocks_per_chunk is 0"),
        ((4,), 1, 2, None, "rank is 2 of 2"),
        ((4,), 1, -1, None, "rank is -1 of 2"),
        ((100, 7), 4, 0, 427, "take 428 bytes of a slot, its area has 427"),
    ],
)
def test_refused(
    pages: tuple[int, ...], per_chunk: int, rank: int, area_bytes: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SlotLayout.make(pages, per_chunk, rank, 2, area_bytes)


def test_fewer_pages_leave_room() -> None:
    full, part = SlotLayout.make((100, 7), 4, 0, 2), SlotLayout.make((100,), 4, 1, 2, area_bytes=428)
    assert full.area_bytes == part.area_bytes
    assert full.chunk_bytes == part.chunk_bytes
    assert part.tensor_offsets == (428,)
