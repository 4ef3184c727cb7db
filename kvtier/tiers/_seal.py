"""The trailer of a chunk, which proves that its bytes are complete and belong to its key and identity.

Layout, little-endian, 128 bytes: magic (8), format version (u16), key length (u16), crc32c of the
payload (u32), payload length (u64), identity digest (16), key (68, zero-padded), zeros (16), crc32c
of the 124 bytes before it (u32). The native library writes and reads the same record.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

import crc32c

from kvtier.keys import MAX_KEY_BYTES, OffloadKey

MAGIC = b"KVTIER\x00\x01"
VERSION = 1
TRAILER_BYTES = 128
"""Size of the trailer that a tier keeps with each chunk, in bytes."""

DIGEST_BYTES = 16

_RECORD = struct.Struct(f"<8sHHIQ{DIGEST_BYTES}s{MAX_KEY_BYTES}s16x")
_CRC = struct.Struct("<I")
assert _RECORD.size + _CRC.size == TRAILER_BYTES


class Integrity(StrEnum):
    """The result of checking a chunk by its trailer; the value is the word in metrics and tables.

    ``check`` returns one of the first four; only operators' tools find the rest.
    """

    SOUND = "sound"
    TORN = "torn"  # the trailer is missing or damaged, or the bytes are cut off
    FOREIGN = "foreign"  # another key, another identity or another length
    CHECKSUM = "checksum"  # the payload changed
    UNVERIFIED = "unverified"  # neither name nor trailer identifies the chunk
    UNREADABLE = "unreadable"  # the file system fails
    GONE = "gone"  # the file was evicted or discarded meanwhile

    @property
    def is_corrupt(self) -> bool:
        """Whether the bytes must not be given to an engine, and can be set aside."""
        return self in (Integrity.TORN, Integrity.FOREIGN, Integrity.CHECKSUM)


def seal(key: OffloadKey, payload: memoryview, digest: bytes) -> bytes:
    """Return the trailer of one chunk. ``digest`` is the first 16 bytes of the identity's digest."""
    return pack(key, crc32c.crc32c(payload), payload.nbytes, digest)


def pack(key: OffloadKey, checksum: int, payload_bytes: int, digest: bytes) -> bytes:
    """Return the trailer of a chunk whose checksum is known."""
    body = _RECORD.pack(MAGIC, VERSION, len(key), checksum, payload_bytes, digest, key)
    return body + _CRC.pack(crc32c.crc32c(body))


@dataclass(frozen=True, slots=True)
class Sealed:
    """The fields of a valid trailer."""

    key: OffloadKey
    digest: bytes  # first 16 bytes of the identity's digest
    payload_bytes: int
    checksum: int  # CRC-32C of the payload


def read(trailer: bytes | memoryview) -> Sealed | None:
    """Return the fields of a trailer; None if it is damaged or cut off."""
    trailer = bytes(trailer[:TRAILER_BYTES])
    if len(trailer) < TRAILER_BYTES or _CRC.unpack(trailer[-4:])[0] != crc32c.crc32c(trailer[:-4]):
        return None
    magic, version, key_bytes, checksum, payload_bytes, digest, key = _RECORD.unpack(trailer[:-4])
    if magic != MAGIC or version != VERSION or key_bytes > MAX_KEY_BYTES:
        return None
    return Sealed(OffloadKey(key[:key_bytes]), digest, payload_bytes, checksum)


def check(trailer: bytes | memoryview, key: OffloadKey, payload: memoryview, digest: bytes) -> Integrity:
    """Check ``payload`` against ``trailer``, which may hold anything."""
    sealed = read(trailer)
    if sealed is None:
        return Integrity.TORN
    if sealed.key != key or sealed.digest != digest or sealed.payload_bytes != payload.nbytes:
        return Integrity.FOREIGN
    return Integrity.SOUND if crc32c.crc32c(payload) == sealed.checksum else Integrity.CHECKSUM
