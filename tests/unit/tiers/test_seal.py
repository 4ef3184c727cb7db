"""The seal proves that bytes belong to a key and are complete; no input makes it raise."""

from __future__ import annotations

import struct

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers import TRAILER_BYTES
from kvtier.tiers._seal import MAGIC, Integrity, check, seal

KEY = pack_key(b"k" * 32, 1)
DIGEST = bytes(range(16))
PAYLOAD = memoryview(bytes(range(256)) * 16)


def resealed(trailer: bytearray) -> bytes:
    """Fix the trailer's own checksum after a field was changed."""
    return bytes(trailer[:-4]) + struct.pack("<I", crc32c.crc32c(bytes(trailer[:-4])))


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**32 - 1), st.binary(max_size=5000))
def test_sealed_is_good(hash_bytes, group, payload):
    key, view = pack_key(hash_bytes, group), memoryview(payload)
    trailer = seal(key, view, DIGEST)
    assert len(trailer) == TRAILER_BYTES
    assert check(trailer, key, view, DIGEST) is Integrity.SOUND
    assert check(memoryview(trailer), key, view, DIGEST) is Integrity.SOUND


def test_record_has_documented_layout():
    trailer = seal(KEY, PAYLOAD, DIGEST)
    assert trailer[:8] == MAGIC
    assert struct.unpack_from("<HHIQ", trailer, 8) == (1, 36, crc32c.crc32c(PAYLOAD), 4096)
    assert trailer[24:40] == DIGEST
    assert trailer[40:108] == KEY.ljust(68, b"\0")
    assert trailer[108:124] == bytes(16)
    assert struct.unpack("<I", trailer[124:]) == (crc32c.crc32c(trailer[:124]),)


@given(st.integers(0, TRAILER_BYTES * 8 - 1))
def test_flipped_trailer_bit_is_seen(bit):
    trailer = bytearray(seal(KEY, PAYLOAD, DIGEST))
    trailer[bit // 8] ^= 1 << bit % 8
    assert check(bytes(trailer), KEY, PAYLOAD, DIGEST) is Integrity.TORN


@given(st.integers(0, PAYLOAD.nbytes * 8 - 1))
def test_flipped_payload_bit_is_seen(bit):
    trailer = seal(KEY, PAYLOAD, DIGEST)
    payload = bytearray(PAYLOAD)
    payload[bit // 8] ^= 1 << bit % 8
    assert check(trailer, KEY, memoryview(payload), DIGEST) is Integrity.CHECKSUM


@pytest.mark.parametrize(
    "other",
    [pack_key(b"k" * 32, 2), pack_key(b"k" * 31 + b"j", 1), pack_key(b"k" * 31, 1), pack_key(b"k" * 33, 1)],
)
def test_other_key_is_foreign(other):
    assert check(seal(other, PAYLOAD, DIGEST), KEY, PAYLOAD, DIGEST) is Integrity.FOREIGN


def test_zero_padded_key_is_foreign():
    short, long = pack_key(b"k", 0), OffloadKey(pack_key(b"k", 0) + b"\0")
    assert check(seal(short, PAYLOAD, DIGEST), long, PAYLOAD, DIGEST) is Integrity.FOREIGN
    assert check(seal(long, PAYLOAD, DIGEST), short, PAYLOAD, DIGEST) is Integrity.FOREIGN


def test_other_identity_is_foreign():
    assert check(seal(KEY, PAYLOAD, bytes(16)), KEY, PAYLOAD, DIGEST) is Integrity.FOREIGN


@pytest.mark.parametrize("length", [0, 4095])
def test_other_length_is_foreign(length):
    assert check(seal(KEY, PAYLOAD, DIGEST), KEY, PAYLOAD[:length], DIGEST) is Integrity.FOREIGN


@pytest.mark.parametrize("offset", [0, 8])
def test_other_format_is_torn(offset):
    trailer = bytearray(seal(KEY, PAYLOAD, DIGEST))
    trailer[offset] ^= 2
    assert check(resealed(trailer), KEY, PAYLOAD, DIGEST) is Integrity.TORN


def test_long_key_does_not_match():
    trailer = bytearray(seal(KEY, PAYLOAD, DIGEST))
    struct.pack_into("<H", trailer, 10, 65535)
    assert check(resealed(trailer), KEY, PAYLOAD, DIGEST) is Integrity.TORN
