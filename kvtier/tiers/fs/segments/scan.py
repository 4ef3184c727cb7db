"""One segment read without an index and without a trace: for the tools."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Final

from kvtier.tiers import seal
from kvtier.tiers.fs.layout import BLOCK_BYTES, FILE_MODE
from kvtier.tiers.fs.proof import Buffer, Finding, Prover, opened
from kvtier.tiers.fs.segments import layout
from kvtier.tiers.fs.segments.layout import EXTENT_RECORDS, Kind, Record, Shape

_WRITABLE: Final = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def data_behind(fd: int, block: int) -> int:
    """Return the next block that may have been written, one beyond all blocks where there is none."""
    try:
        return max(block + 1, os.lseek(fd, (block + 1) * BLOCK_BYTES, os.SEEK_DATA) // BLOCK_BYTES)
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else block + 1


class NoSegmentError(Exception):
    """The file does not begin as a segment does: it was not finished, or is none."""


class Segment:
    """A segment, open for reading. A context manager.

    Args:
        root_fd: the root directory, open.
        path: the segment, relative to the root.

    Attributes:
        shape: the length of its chunks and the digest of their cache.

    Raises:
        OSError: it cannot be read.
        NoSegmentError: it is none.
    """

    def __init__(self, root_fd: int, path: str) -> None:
        self._root_fd = root_fd
        self._path = path
        self._buffer = Buffer()
        with ExitStack() as stack:
            self._fd = stack.enter_context(opened(root_fd, path))
            block = self._buffer.read(self._fd, 0, BLOCK_BYTES)
            shape = layout.shape_of(block)
            head = layout.parse_head(Kind.SEGMENT, shape, block) if shape is not None else None
            if shape is None or head is None or not 0 < head.count <= layout.MAX_MAP_BLOCKS:
                raise NoSegmentError(path)
            self.shape: Shape = shape
            self._map_blocks = head.count
            self._capacity = head.capacity
            length = head.count * BLOCK_BYTES
            self._dead = self._buffer.read(self._fd, BLOCK_BYTES, length).ljust(length, b"\0")
            self._closing = stack.pop_all()

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    @property
    def is_sealed(self) -> bool:
        """Whether it was ended in an orderly way. Else what is ill in it was perhaps never finished."""
        size = os.fstat(self._fd).st_size
        if size % BLOCK_BYTES or size < (2 + self._map_blocks) * BLOCK_BYTES:
            return False
        return self._head(Kind.FOOTER, size // BLOCK_BYTES - 1) is not None

    def records(self) -> Iterator[Record | seal.Verdict]:
        """Yield the chunks that were not discarded, and what is wrong with a seal in place of an ill one.

        Behind an extent that its writer has not finished, or could not write, others may follow.
        """
        at = 1 + self._map_blocks
        while at < self._capacity:
            block = self._buffer.read(self._fd, at * BLOCK_BYTES, BLOCK_BYTES)
            head = layout.parse_head(Kind.EXTENT, self.shape, block)
            if head is None or head.block != at or not 0 < head.count <= EXTENT_RECORDS:
                at = data_behind(self._fd, at)
                continue
            places = range(at + 1, self._capacity, self.shape.chunk_blocks)
            for place, record in zip(places, layout.parse_extent(self.shape, head, block), strict=False):
                if not self._dead[self._index(place)]:
                    yield record
            at += 1 + head.count * self.shape.chunk_blocks

    def living(self) -> Iterator[Record]:
        """Yield the chunks that were not discarded and whose seals are whole."""
        return (record for record in self.records() if isinstance(record, Record))

    def prove(self, record: Record, prover: Prover) -> Finding:
        """Say whether the bytes of a chunk are those that were put."""
        try:
            checksum = prover.checksum(self._fd, record.block * BLOCK_BYTES, self.shape.chunk_bytes)
        except OSError:
            return Finding.UNREADABLE
        if checksum is None:
            return Finding.TORN
        return Finding.SOUND if checksum == record.checksum else Finding.CHECKSUM

    def payload(self, record: Record) -> bytes:
        """Return the bytes of a chunk; fewer where the file ends before. OSError."""
        return self._buffer.read(self._fd, record.block * BLOCK_BYTES, self.shape.chunk_bytes)

    def trailer(self, record: Record) -> bytes:
        """Return what proves the bytes of a chunk outside of a segment."""
        return seal.pack(record.key, record.checksum, self.shape.chunk_bytes, self.shape.digest)

    def set_aside(self, record: Record, target: str) -> None:
        """Keep the bytes of an ill chunk in a file of their own, and discard the chunk. OSError.

        The segment's times stay what they were: they tell when it was written and used.
        """
        with suppress(OSError):
            flags = _WRITABLE | os.O_CREAT | os.O_EXCL
            with open(os.open(target, flags, FILE_MODE, dir_fd=self._root_fd), "wb") as file:
                file.write(self.payload(record))
                origin = f"from {self._path}, block {record.block}\n"
                file.write(origin.encode().ljust(BLOCK_BYTES, b"\0"))
        fd = os.open(self._path, _WRITABLE, dir_fd=self._root_fd)
        try:
            before = os.fstat(fd)
            os.pwrite(fd, b"\1", BLOCK_BYTES + self._index(record.block))
            with suppress(OSError):
                os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(fd)

    def _head(self, kind: Kind, block: int) -> layout.Head | None:
        return layout.parse_head(
            kind, self.shape, self._buffer.read(self._fd, block * BLOCK_BYTES, BLOCK_BYTES)
        )

    def _index(self, block: int) -> int:
        """Return which byte of the map stands for a record."""
        return (block - 1 - self._map_blocks) // self.shape.chunk_blocks
