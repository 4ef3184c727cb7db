"""Offload keys: packing, unpacking and unpackable values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.keys import MAX_KEY_BYTES, content_hash, group_index, pack_key


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**32 - 1))
def test_both_parts_round_trip(hash_bytes, group):
    key = pack_key(hash_bytes, group)
    assert content_hash(key) == hash_bytes
    assert group_index(key) == group
    assert len(key) <= MAX_KEY_BYTES


def test_packing_matches_engine():
    assert pack_key(b"\xaa\xbb", 258) == b"\xaa\xbb\x00\x00\x01\x02"
    assert pack_key(b"\xaa") == b"\xaa\x00\x00\x00\x00"


@pytest.mark.parametrize("length", [0, 65])
def test_impossible_hash_length(length):
    with pytest.raises(ValueError, match=f"content_hash has {length} bytes"):
        pack_key(b"x" * length)


@pytest.mark.parametrize("group", [-1, 2**32])
def test_group_out_of_range(group):
    with pytest.raises(ValueError, match=f"group is {group}"):
        pack_key(b"hash", group)
