"""Whatever lies beside chunks was written by somebody: no bytes may do more than be refused in words."""

from __future__ import annotations

import json
import struct

import crc32c
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.errors import IdentityError
from kvtier.identity import Identity
from kvtier.keys import MAX_KEY_BYTES, pack_key
from kvtier.tiers import seal
from kvtier.tiers.seal import Verdict

IDENTITY = Identity.make("model", {"dtype": "float16", "groups": [{"block": 16}], "layers": 2})
KEY = pack_key(b"a" * 32, 1)
PAYLOAD = bytes(range(256)) * 4
DIGEST = IDENTITY.short_digest
MOST_CHARACTERS = 10_000  # of a message, whatever was found

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.text() | VALUES.map(json.dumps) | VALUES.map(lambda value: json.dumps({"groups": value})))
@example("[" * 100_000)
@example('{"groups":' * 900 + "1" + "}" * 900)
@example('{"groups":' + "[" * 700 + "]" * 700 + "}")
@example(json.dumps({"dtype": "x" * 1_000_000}))
@example(json.dumps({f"field{number}": number for number in range(10_000)}))
@example(json.dumps({"\x1b[2Jgone\n": "\n"}))
@example("1" * 10_000)
def test_a_manifest_that_anybody_wrote_is_refused_in_a_short_readable_message(text: str) -> None:
    with pytest.raises(IdentityError) as caught:
        IDENTITY.require(text, "here")
    message = str(caught.value)
    assert len(message) <= MOST_CHARACTERS
    assert message.isprintable()


def test_the_manifest_of_the_same_cache_is_accepted_however_it_is_laid_out() -> None:
    IDENTITY.require(json.dumps(json.loads(IDENTITY.manifest), indent=None), "here")


@given(st.binary(max_size=3 * seal.TRAILER_BYTES))
def test_a_trailer_of_any_bytes_proves_nothing(trailer: bytes) -> None:
    assert seal.check(trailer, KEY, memoryview(PAYLOAD), DIGEST) is Verdict.TORN


@given(
    key_bytes=st.integers(0, 0xFFFF),
    payload_bytes=st.integers(0, 2**64 - 1),
    key=st.binary(max_size=MAX_KEY_BYTES),
    digest=st.binary(min_size=16, max_size=16),
    checksum=st.integers(0, 2**32 - 1),
)
def test_a_trailer_made_with_care_proves_only_what_it_names(
    key_bytes: int, payload_bytes: int, key: bytes, digest: bytes, checksum: int
) -> None:
    """Its own checksum holds, and its lengths lie."""
    fields = (seal.MAGIC, seal.VERSION, key_bytes, checksum, payload_bytes, digest, key)
    body = struct.pack("<8sHHIQ16s68s16x", *fields)
    trailer = body + struct.pack("<I", crc32c.crc32c(body))
    expected = key_bytes == len(KEY) and key.ljust(68, b"\0")[:key_bytes] == KEY and digest == DIGEST
    good = expected and payload_bytes == len(PAYLOAD) and checksum == crc32c.crc32c(PAYLOAD)
    verdict = seal.check(trailer, KEY, memoryview(PAYLOAD), DIGEST)
    assert (verdict is Verdict.GOOD) is good
    assert verdict is not Verdict.TORN
