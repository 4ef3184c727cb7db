"""One segment read without an index and without a trace: for the tools."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cached_property
from types import TracebackType
from typing import Final

from kvtier.tiers import seal
from kvtier.tiers.fs.layout import BLOCK_BYTES, CAREFULLY, FILE_MODE
from kvtier.tiers.fs.locks import try_lock
from kvtier.tiers.fs.proof import Buffer, Finding, Prover, opened
from kvtier.tiers.fs.segments import layout
from kvtier.tiers.fs.segments.layout import EXTENT_RECORDS, Kind, Record, Shape

_WRITABLE: Final = os.O_WRONLY | CAREFULLY
_DISCARDED: Final = 1


def data_behind(fd: int, block: int) -> int:
    """Return the next block that may have been written, one beyond all blocks where there is none."""
    try:
        return max(block + 1, os.lseek(fd, (block + 1) * BLOCK_BYTES, os.SEEK_DATA) // BLOCK_BYTES)
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else block + 1


class NoSegmentError(Exception):
    """The file does not begin as a segment does: it was not finished, or is none.

    Attributes:
        is_torn: its first block was written, and its writer lives no more: it is damaged, or is none.
    """

    def __init__(self, path: str, *, is_torn: bool) -> None:
        super().__init__(path)
        self.is_torn = is_torn


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
            if shape is None or head is None or not _has_map(shape, head):
                is_held = any(block) and try_lock(self._fd, shared=True) is False
                raise NoSegmentError(path, is_torn=any(block) and not is_held)
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
        """Whether its footer is whole. Else what is ill in it was perhaps never finished."""
        return self._listed is not None

    def records(self) -> Iterator[Record | seal.Verdict]:
        """Yield the chunks that were not discarded, and what is wrong with a seal in place of an ill one.

        What the footer lists, as engines do: who has sealed the segment has left out what its writer had not
        finished. The extents are walked where there is no footer.
        """
        for record in self._walked() if self._listed is None else self._listed:
            if not isinstance(record, Record) or self._dead[self._index(record.block)] != _DISCARDED:
                yield record

    def living(self) -> Iterator[Record]:
        """Yield the chunks that an engine can be given, as far as map and seals say."""
        for record in self.records():
            if isinstance(record, Record) and not self.is_mark_torn(record):
                yield record

    def is_mark_torn(self, record: Record) -> bool:
        """Say whether the map tells neither that a chunk is there nor that it was discarded."""
        return self._dead[self._index(record.block)] not in (0, _DISCARDED)

    def prove(self, record: Record, prover: Prover) -> Finding | None:
        """Say whether the bytes of a chunk are those that were put; None where they never were."""
        if self.is_mark_torn(record):
            return Finding.TORN
        finding = self._proven(record, prover)
        # Without the footer its writer is at it, or has died: what is not whole was never a chunk.
        return finding if self.is_sealed or not finding.is_ill else None

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
            os.pwrite(fd, bytes([_DISCARDED]), BLOCK_BYTES + self._index(record.block))
            with suppress(OSError):
                os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(fd)

    @cached_property
    def _listed(self) -> list[Record | seal.Verdict] | None:
        """What the footer lists; None where there was no whole one when this was asked first."""
        size = os.fstat(self._fd).st_size
        last = size // BLOCK_BYTES - 1
        if size % BLOCK_BYTES or last <= self._map_blocks:
            return None
        head = self._head(Kind.FOOTER, last)
        length = layout.footer_entry_bytes(head) if head is not None else 0
        if head is None or head.block + layout.blocks_of(length) != last:
            return None
        entries = self._buffer.read(self._fd, head.block * BLOCK_BYTES, length)
        if (found := layout.parse_footer(self.shape, head, entries)) is None:
            return None
        end = min(head.block, self._capacity)
        return [one if self._fits(one, end) else seal.Verdict.TORN for one in found]

    def _walked(self) -> Iterator[Record]:
        """Yield what is in the extents.

        Behind an extent that its writer has not finished, or could not write, others may follow.
        """
        at = 1 + self._map_blocks
        while at < self._capacity:
            block = self._buffer.read(self._fd, at * BLOCK_BYTES, BLOCK_BYTES)
            head = layout.parse_head(Kind.EXTENT, self.shape, block)
            if head is None or head.block != at or not 0 < head.count <= EXTENT_RECORDS:
                at = data_behind(self._fd, at)
                continue
            for record in layout.parse_extent(self.shape, head, block):
                if isinstance(record, Record) and self._fits(record, self._capacity):
                    yield record
            at += 1 + head.count * self.shape.chunk_blocks

    def _fits(self, record: Record | seal.Verdict, end: int) -> bool:
        """Say whether a chunk is where chunks can be, before a block. Of an ill seal nothing is said."""
        if not isinstance(record, Record):
            return True
        return self._map_blocks < record.block <= end - self.shape.chunk_blocks

    def _proven(self, record: Record, prover: Prover) -> Finding:
        try:
            checksum = prover.checksum(self._fd, record.block * BLOCK_BYTES, self.shape.chunk_bytes)
        except OSError:
            return Finding.UNREADABLE
        if checksum is None:
            return Finding.TORN
        return Finding.SOUND if checksum == record.checksum else Finding.CHECKSUM

    def _head(self, kind: Kind, block: int) -> layout.Head | None:
        return layout.parse_head(
            kind, self.shape, self._buffer.read(self._fd, block * BLOCK_BYTES, BLOCK_BYTES)
        )

    def _index(self, block: int) -> int:
        """Return which byte of the map stands for a record."""
        return (block - 1 - self._map_blocks) // self.shape.chunk_blocks


def _has_map(shape: Shape, head: layout.Head) -> bool:
    """Say whether the map has a byte for each record that there can be."""
    return max(1, shape.map_blocks(head.capacity)) <= head.count <= layout.MAX_MAP_BLOCKS
