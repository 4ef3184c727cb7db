"""What a segment looks like on disk: heads, extents, the map of the dead, the footer. No I/O.

In blocks of 4096 bytes, all numbers little-endian::

    head | map of the dead, one byte a record | extent | extent | ... | footer

An extent is a block with a head and up to 31 seals, and the chunks' bytes behind it. The footer repeats
where the living chunks are, and their seals; it is missing where the writer died. The native helper
reads and writes the same (``kvtier/native/segments.c``).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import crc32c

from kvtier.keys import GROUP_BYTES, MAX_KEY_BYTES, OffloadKey
from kvtier.tiers import seal
from kvtier.tiers.fs.layout import BLOCK_BYTES

FOLDER: Final = "segments"
"""Where segments are, below an epoch's directory."""

EXTENT_RECORDS: Final = 31
HEAD_BYTES: Final = 128
MAX_MAP_BLOCKS: Final = 64
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sH2xIQ16sQQI64x")
_CRC: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct(f"<Q{seal.TRAILER_BYTES}s")
_NAME: Final = re.compile(r"[^./][^/]{0,90}\.seg")
assert _HEAD.size + _CRC.size == HEAD_BYTES


class Kind(Enum):
    """What a head belongs to."""

    SEGMENT = b"KVTSEG\x00\x01"
    EXTENT = b"KVTEXT\x00\x01"
    FOOTER = b"KVTEND\x00\x01"


@dataclass(frozen=True, slots=True)
class Shape:
    """What all segments of one epoch have in common.

    Attributes:
        chunk_bytes: length of every chunk, whole blocks.
        digest: 16 bytes that tell the identity.
    """

    chunk_bytes: int
    digest: bytes

    @property
    def chunk_blocks(self) -> int:
        """Blocks of one chunk."""
        return self.chunk_bytes // BLOCK_BYTES

    def map_blocks(self, capacity: int) -> int:
        """Return the blocks of the map of a segment that may have ``capacity`` blocks."""
        return blocks_of(capacity // self.chunk_blocks)

    def data_end(self, capacity: int) -> int:
        """Return the block that no extent goes beyond: behind it there is room for the footer."""
        most = (capacity - 1 - self.map_blocks(capacity)) // self.chunk_blocks
        return capacity - footer_blocks(most)

    def extent_blocks(self, records: int) -> int:
        """Return the blocks that so many records take, written at once."""
        return -(-records // EXTENT_RECORDS) + records * self.chunk_blocks

    def block_of(self, start: int, i: int) -> int:
        """Return where record ``i`` is of those that were written at once, from block ``start`` on."""
        return start + i // EXTENT_RECORDS + 1 + i * self.chunk_blocks


@dataclass(frozen=True, slots=True)
class Head:
    """A head that was read and is whole.

    Attributes:
        count: blocks of a segment's map, records of an extent, entries of a footer.
        block: where the extent is, or where the footer begins.
        capacity: blocks that a segment may have.
        checksum: of a footer's entries.
    """

    count: int
    block: int
    capacity: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Record:
    """One chunk in a segment.

    Attributes:
        key: its offload key.
        block: where its bytes begin.
        checksum: crc32c of them.
    """

    key: OffloadKey
    block: int
    checksum: int


def blocks_of(nbytes: int) -> int:
    """Return how many blocks so many bytes fill."""
    return -(-nbytes // BLOCK_BYTES)


def footer_blocks(records: int) -> int:
    """Return the blocks of a footer."""
    return blocks_of(records * _ENTRY.size) + 1


def is_segment_name(name: str) -> bool:
    """Say whether a file in ``FOLDER`` is a segment by its name."""
    return _NAME.fullmatch(name) is not None


def pack_head(kind: Kind, shape: Shape, head: Head) -> bytes:
    """Make a head of ``HEAD_BYTES``."""
    size, digest = shape.chunk_bytes, shape.digest
    body = _HEAD.pack(
        kind.value, _VERSION, head.count, size, digest, head.block, head.capacity, head.checksum
    )
    return body + _CRC.pack(crc32c.crc32c(body))


def parse_head(kind: Kind, shape: Shape, block: bytes) -> Head | None:
    """Return the head at the start of ``block``; None where it is none, or not of this shape."""
    if len(block) < HEAD_BYTES:
        return None
    body = block[: _HEAD.size]
    magic, version, count, chunk_bytes, digest, at, capacity, checksum = _HEAD.unpack(body)
    if (magic, version) != (kind.value, _VERSION) or Shape(chunk_bytes, digest) != shape:
        return None
    if _CRC.unpack_from(block, _HEAD.size)[0] != crc32c.crc32c(body):
        return None
    return Head(count, at, capacity, checksum)


def shape_of(block: bytes) -> Shape | None:
    """Return the shape of the segment that begins with ``block``, whosever it is; None where none does."""
    if len(block) < HEAD_BYTES:
        return None
    _, _, _, chunk_bytes, digest, *_ = _HEAD.unpack(block[: _HEAD.size])
    if chunk_bytes <= 0 or chunk_bytes % BLOCK_BYTES:
        return None
    shape = Shape(chunk_bytes, digest)
    return shape if parse_head(Kind.SEGMENT, shape, block) is not None else None


def make_extent_head(shape: Shape, start: int, records: Sequence[Record]) -> bytes:
    """Make the first block of an extent at block ``start``."""
    head = pack_head(Kind.EXTENT, shape, Head(len(records), start, 0, 0))
    seals = b"".join(_seal(shape, record) for record in records)
    return (head + seals).ljust(BLOCK_BYTES, b"\0")


def make_footer(shape: Shape, start: int, records: Sequence[Record]) -> bytes:
    """Make a footer at block ``start``: entries, filled up to whole blocks, and the block that ends it."""
    entries = b"".join(_ENTRY.pack(record.block, _seal(shape, record)) for record in records)
    head = pack_head(Kind.FOOTER, shape, Head(len(records), start, 0, crc32c.crc32c(entries)))
    return entries.ljust(blocks_of(len(entries)) * BLOCK_BYTES, b"\0") + head.ljust(BLOCK_BYTES, b"\0")


def parse_extent(shape: Shape, head: Head, block: bytes) -> Iterator[Record | seal.Verdict]:
    """Yield the records of an extent; what is wrong with a seal in place of one that is not ours."""
    for i in range(head.count):
        at = HEAD_BYTES + i * seal.TRAILER_BYTES
        trailer = block[at : at + seal.TRAILER_BYTES]
        yield _record(shape, head.block + 1 + i * shape.chunk_blocks, trailer)


def parse_footer(shape: Shape, head: Head, entries: bytes) -> Iterator[Record | seal.Verdict] | None:
    """Return what a footer lists, as ``parse_extent`` does; None where it is damaged."""
    entries = entries[: head.count * _ENTRY.size]
    if len(entries) < head.count * _ENTRY.size or crc32c.crc32c(entries) != head.checksum:
        return None
    return (_record(shape, block, trailer) for block, trailer in _ENTRY.iter_unpack(entries))


def footer_entry_bytes(head: Head) -> int:
    """Return the bytes of a footer's entries."""
    return head.count * _ENTRY.size


def _seal(shape: Shape, record: Record) -> bytes:
    return seal.pack(record.key, record.checksum, shape.chunk_bytes, shape.digest)


def _record(shape: Shape, block: int, trailer: bytes) -> Record | seal.Verdict:
    found = seal.read(trailer)
    if found is None or not GROUP_BYTES < len(found.key) <= MAX_KEY_BYTES:
        return seal.Verdict.TORN
    if found.digest != shape.digest or found.payload_bytes != shape.chunk_bytes:
        return seal.Verdict.FOREIGN
    return Record(found.key, block, found.checksum)
