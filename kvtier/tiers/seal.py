"""The seal of a chunk: a small trailer that proves whose bytes these are and that they are whole.

Layout, little-endian, 128 bytes: magic (8), format version (u16), key length (u16), crc32c of the
payload (u32), payload length (u64), identity digest (16), key (68, zero-padded), zeros (16), crc32c
of the 124 bytes before it (u32). The file tier's native helper writes and reads the same record.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import crc32c

from kvtier.keys import MAX_KEY_BYTES, OffloadKey

MAGIC = b"KVTIER\x00\x01"
VERSION = 1
TRAILER_BYTES = 128
DIGEST_BYTES = 16

_RECORD = struct.Struct(f"<8sHHIQ{DIGEST_BYTES}s{MAX_KEY_BYTES}s16x")
_CRC = struct.Struct("<I")
assert _RECORD.size + _CRC.size == TRAILER_BYTES


class Verdict(IntEnum):
    """What comes of checking bytes against a trailer."""

    GOOD = 0
    TORN = 1  # the trailer itself is missing or damaged
    FOREIGN = 2  # another key, another identity or another length
    CHECKSUM = 3  # the payload is not what was sealed


def seal(key: OffloadKey, payload: memoryview, digest: bytes) -> bytes:
    """Make the trailer of one chunk.

    Args:
        key: the chunk's offload key.
        payload: its bytes.
        digest: the first 16 bytes of the identity's digest.
    """
    body = _RECORD.pack(MAGIC, VERSION, len(key), crc32c.crc32c(payload), payload.nbytes, digest, key)
    return body + _CRC.pack(crc32c.crc32c(body))


def check(trailer: bytes | memoryview, key: OffloadKey, payload: memoryview, digest: bytes) -> Verdict:
    """Check ``payload`` against ``trailer``, which may hold anything at all."""
    trailer = bytes(trailer[:TRAILER_BYTES])
    if len(trailer) < TRAILER_BYTES or _CRC.unpack(trailer[-4:])[0] != crc32c.crc32c(trailer[:-4]):
        return Verdict.TORN
    magic, version, key_bytes, checksum, payload_bytes, sealed_digest, sealed_key = _RECORD.unpack(
        trailer[:-4]
    )
    if magic != MAGIC or version != VERSION:
        return Verdict.TORN
    if sealed_key[:key_bytes] != key or sealed_digest != digest or payload_bytes != payload.nbytes:
        return Verdict.FOREIGN
    return Verdict.GOOD if crc32c.crc32c(payload) == checksum else Verdict.CHECKSUM
