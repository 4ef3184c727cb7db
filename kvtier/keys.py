"""Offload keys, which name a chunk everywhere: a content hash followed by the index of the KV cache group.

The packing is vLLM's (``vllm.v1.kv_offload.base``): the hash, then the index as four big-endian bytes. Keys
are bytes and not tuples, because a million of them would burden the garbage collector.
"""

from __future__ import annotations

from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)
"""The name of a chunk in the engine and in every tier."""

GROUP_BYTES = 4
MAX_KEY_BYTES = 68  # a 64-byte hash and the group: a trailer has room for no more


def pack_key(content_hash: bytes, group: int = 0) -> OffloadKey:
    """Return the offload key of one chunk.

    Args:
        content_hash: hash of the tokens up to the end of the chunk, 1 to 64 bytes.
        group: index of the KV cache group, 0 to 2**32 - 1.

    Raises:
        TypeError, ValueError: the hash is empty, too long or not bytes, or the group is out of range.
    """
    if type(content_hash) is not bytes or not isinstance(group, int):
        kinds = f"{type(content_hash).__name__}, {type(group).__name__}"
        raise TypeError(f"pack_key({kinds}): content_hash must be bytes, and group an integer")
    if not 0 < len(content_hash) <= MAX_KEY_BYTES - GROUP_BYTES:
        raise ValueError(f"content_hash has {len(content_hash)} bytes; it must have 1 to 64")
    if not 0 <= group < 2**32:
        raise ValueError(f"group is {group}; it must be 0 to 2**32 - 1")
    return OffloadKey(content_hash + group.to_bytes(GROUP_BYTES, "big"))


def content_hash(key: OffloadKey) -> bytes:
    """Return the hash part of ``key``."""
    return key[:-GROUP_BYTES]


def group_index(key: OffloadKey) -> int:
    """Return the group part of ``key``."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")
