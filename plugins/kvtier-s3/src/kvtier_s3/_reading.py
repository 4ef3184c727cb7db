"""Reads objects as chunks: their trailers, and a check whether the store itself has damaged bytes."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING, Final

import obstore

from kvtier.tiers import TRAILER_BYTES, Batch, Status, in_thread
from kvtier_s3._store import Store

if TYPE_CHECKING:
    from obstore import GetResult

METADATA: Final = "kvtier"
"""Name of the attribute that holds an object's trailer, base64."""

_MOST_READ: Final = 2  # Limit in multiples of a chunk's length. Longer objects are not read to identify them.


def trailer_of(result: GetResult) -> bytes:
    """Return the trailer of an object, or empty bytes if it has none. kvtier's check then fails."""
    try:
        return base64.b64decode(result.attributes.get(METADATA, ""), validate=True)
    except (binascii.Error, ValueError):
        return b""


async def read_as_stored(store: Store, path: str, batch: Batch, index: int) -> Status:
    """Get one chunk of a batch, and prove that the store has these bytes.

    Returns:
        OK. CORRUPT if the object has another length. FAILED without proof: the ETag is not the MD5 of the
        bytes, or the trailer is missing. A gateway may have answered, and some stores have other ETags.
    """
    view = batch.views[index]
    try:
        result = await obstore.get_async(store, path)
        if result.meta["size"] > _MOST_READ * view.nbytes:
            return Status.FAILED
        content = memoryview(await result.bytes_async())
    except Exception:
        return Status.FAILED
    trailer, etag = trailer_of(result), (result.meta["e_tag"] or "").strip('"')
    if len(trailer) != TRAILER_BYTES or etag != await in_thread(_md5, content):
        return Status.FAILED
    if content.nbytes != view.nbytes:
        return Status.CORRUPT
    view[:], batch.trailers[index] = content, trailer
    return Status.OK


def _md5(content: memoryview) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
