"""Work on segments by the native helper: one foreign call a batch, without the interpreter lock."""

from __future__ import annotations

import ctypes
import os
from array import array
from typing import Final

from kvtier.keys import OffloadKey
from kvtier.tiers.fs.call import FileCall, Place, StopFlag, Verb
from kvtier.tiers.fs.native_files import NativeFiles, begin_in_pool, do_in_pool, ended_in_pool
from kvtier.tiers.fs.segments.layout import EXTENT_RECORDS, FOLDER
from kvtier.tiers.fs.segments.store import MOST_OPEN, SegmentInfo, Segments, ShelfCounts, Shelved, State

PUT_BYTES: Final = 2 * 2**20
"""What a thread writes at once."""

GET_BYTES: Final = 1 * 2**20
"""What a thread reads at once."""

_NAME_BYTES: Final = 96


class _Info(ctypes.Structure):
    """``struct segment_info`` of segments.c."""

    _fields_ = (
        ("number", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("records", ctypes.c_uint32),
        ("live", ctypes.c_uint32),
        ("bytes", ctypes.c_int64),
        ("used_ms", ctypes.c_uint64),
        ("made_ms", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
    )


class NativeShelf:
    """``Shelf`` in C.

    Args:
        library: ``kvtier.native.library``, not None.
        place: the epoch.
        writer: a name that no other writer has or had.
        segment_bytes: length of new segments.
    """

    def __init__(self, library: ctypes.CDLL, place: Place, writer: str, segment_bytes: int) -> None:
        self._library = library
        path = f"{place.data_dir}/{FOLDER}".encode()
        self.address = library.kvt_segments_open(
            place.root_fd,
            path,
            writer.encode(),
            place.digest,
            place.chunk_bytes,
            segment_bytes,
            place.flags,
            MOST_OPEN,
        )
        if not self.address:
            raise MemoryError("no memory for an index of segments")

    def load(self, stop: StopFlag) -> int:
        """See ``Shelf.load``."""
        return int(self._library.kvt_segments_load(self.address, stop.address))

    def segments(self) -> list[SegmentInfo]:
        """See ``Shelf.segments``."""
        infos = (_Info * 64)()
        while (count := self._library.kvt_segments_list(self.address, infos, len(infos))) > len(infos):
            infos = (_Info * (2 * count))()
        return [_info(info) for info in infos[:count]]

    def keys(self, number: int) -> list[OffloadKey]:
        """See ``Shelf.keys``."""
        buffer = ctypes.create_string_buffer(1 << 16)
        get = self._library.kvt_segments_keys
        while (needed := get(self.address, number, buffer, len(buffer))) > len(buffer):
            buffer = ctypes.create_string_buffer(2 * needed)
        return _split_keys(buffer.raw[:needed])

    def marks(self, number: int) -> array[int]:
        """See ``Shelf.marks``."""
        marks = array("Q", bytes(8 * 1024))
        get = self._library.kvt_segments_marks
        while (count := get(self.address, number, marks.buffer_info()[0], len(marks))) > len(marks):
            marks = array("Q", bytes(8 * 2 * count))
        return marks[:count]

    def take_lost(self) -> list[OffloadKey]:
        """See ``Shelf.take_lost``."""
        buffer = ctypes.create_string_buffer(1 << 16)
        take = self._library.kvt_segments_lost
        while (found := take(self.address, buffer, len(buffer))) > len(buffer):
            buffer = ctypes.create_string_buffer(found)
        return _split_keys(buffer.raw[:found])

    def kill(self, number: int, block: int) -> None:
        """See ``Shelf.kill``."""
        _require(self._library.kvt_segments_kill(self.address, number, block))

    def drop(self, number: int) -> int:
        """See ``Shelf.drop``."""
        return _require(self._library.kvt_segments_drop(self.address, number))

    def forget(self, number: int) -> None:
        """See ``Shelf.forget``."""
        self._library.kvt_segments_forget(self.address, number)

    def copy(self, number: int, stop: StopFlag) -> tuple[int, int]:
        """See ``Shelf.copy``."""
        added = ctypes.c_int64(0)
        copied = self._library.kvt_segments_copy(self.address, number, stop.address, ctypes.byref(added))
        return _require(copied), added.value

    def adopt(self, stop: StopFlag) -> int:
        """See ``Shelf.adopt``."""
        return int(self._library.kvt_segments_adopt(self.address, stop.address))

    def finish(self) -> int:
        """See ``Shelf.finish``."""
        return int(self._library.kvt_segments_finish(self.address))

    def counts(self) -> ShelfCounts:
        """See ``Shelf.counts``."""
        counts = array("Q", bytes(8 * 4))
        self._library.kvt_segments_counts(self.address, counts.buffer_info()[0])
        return ShelfCounts(*counts)

    def close(self) -> None:
        """See ``Shelf.close``."""
        self._library.kvt_segments_close(self.address)
        self.address = None


class NativeSegments(Segments[NativeShelf]):
    """``Store`` of segments in C.

    Args:
        library: ``kvtier.native.library``, not None.
        max_bytes: see ``Segments``.
    """

    is_native: Final = True

    def __init__(self, library: ctypes.CDLL, max_bytes: int | None = None) -> None:
        super().__init__(max_bytes)
        self._library = library
        self._files = NativeFiles(library)
        self.open_pool = self._files.open_pool
        self.close_pool = self._files.close_pool
        self.pool_fd = self._files.pool_fd
        self._begun: dict[int, Shelved[NativeShelf]] = {}
        self.tree_bytes = self._files.tree_bytes
        self.tree_remove = self._files.tree_remove

    def open_shelf(self, place: Place, writer: str, segment_bytes: int) -> NativeShelf:
        """See ``Segments.open_shelf``."""
        return NativeShelf(self._library, place, writer, segment_bytes)

    def begin(self, call: FileCall, verb: Verb, token: int) -> bool:
        """See ``FileWork.begin``."""
        reading = verb is Verb.GET
        part = _get_part(call) if reading else _even_part(call, 0, len(call))
        found = self.take_shelf(call.place)
        call.use_segments(found.shelf.address)
        work = "kvt_segments_get" if reading else "kvt_segments_put"
        if not begin_in_pool(self._library, work, call, part, token, reading=reading):
            self.give_back(found)
            return False
        self._begun[token] = found
        return True

    def ended(self, pool: int) -> list[tuple[int, int]]:
        """See ``FileWork.ended``."""
        ended = ended_in_pool(pool)
        for token, _ in ended:
            self.give_back(self._begun.pop(token))
        return ended

    def put(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.put``."""
        return self._do("kvt_segments_put", call, first, end, _even_part(call, first, end), reading=False)

    def get(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.get``."""
        self._do("kvt_segments_get", call, first, end, _get_part(call), reading=True)

    def contains(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.contains``."""
        self._do("kvt_segments_contains", call, first, end)

    def discard(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.discard``: bytes are freed when segments are compacted or removed."""
        self._do("kvt_segments_discard", call, first, end)
        return 0

    def touch(self, call: FileCall, first: int, end: int) -> None:
        """See ``Store.touch``."""
        self._do("kvt_segments_touch", call, first, end)

    def _do(
        self, work: str, call: FileCall, first: int, end: int, part: int = 0, *, reading: bool = True
    ) -> int:
        with self.shelf(call.place) as shelf:
            call.use_segments(shelf.address)
            if part and call.pool:
                return do_in_pool(self._library, work, call, first, end, part, reading=reading)
            return getattr(self._library, work)(call.address, first, end) or 0


def _get_part(call: FileCall) -> int:
    return max(1, GET_BYTES // call.place.chunk_bytes)


def _even_part(call: FileCall, first: int, end: int) -> int:
    """Return how many chunks a thread writes at once: such that all threads write alike."""
    most = max(1, min(EXTENT_RECORDS, PUT_BYTES // call.place.chunk_bytes))
    return max(1, -(-(end - first) // max(1, -(-(end - first) // most))))


def _info(info: _Info) -> SegmentInfo:
    name, state = info.name.decode(), State(info.state)
    return SegmentInfo(info.number, name, state, info.records, info.live, info.bytes)


def _split_keys(packed: bytes) -> list[OffloadKey]:
    keys, at = [], 0
    while at < len(packed):
        end = at + 1 + packed[at]
        keys.append(OffloadKey(packed[at + 1 : end]))
        at = end
    return keys


def _require(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return int(result)


__all__ = ["NativeSegments", "NativeShelf"]
