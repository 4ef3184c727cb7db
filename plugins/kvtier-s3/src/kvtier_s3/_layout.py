"""The names of objects.

    <prefix>/caches/<namespace>/config.json                     the cache's identity
    <prefix>/caches/<namespace>/epochs/<number>-<token>         one empty marker for each epoch
    <prefix>/chunks/<namespace>/<number>-<token>/<hash>_g<group>  the chunks of one epoch

Chunks have a separate branch, so that a lifecycle rule can expire them alone.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

from kvtier.keys import OffloadKey, content_hash, group_index, pack_key

_CHUNK: Final = re.compile(r"([0-9a-f]{2,128})_g(\d{1,10})")
_MARKER: Final = re.compile(r"(\d{10})-([0-9a-f]{16})")


class Layout:
    """The names of one cache's objects.

    Attributes:
        manifest: the object that holds the cache's identity.
        markers: prefix of the epochs' markers.
        all_chunks: prefix of the chunks of all caches.
    """

    def __init__(self, prefix: str, namespace: str) -> None:
        self.manifest = f"{prefix}/caches/{namespace}/config.json"
        self.markers = f"{prefix}/caches/{namespace}/epochs"
        self.all_chunks = f"{prefix}/chunks"
        self._namespace = namespace

    def chunks(self, epoch: EpochName) -> str:
        """Return the prefix of the chunks of one epoch."""
        return f"{self.all_chunks}/{self._namespace}/{epoch}"


@dataclass(frozen=True, slots=True, order=True)
class EpochName:
    """A number, and a token that makes the epoch unique. Tiers join the greatest one."""

    number: int
    token: str

    @staticmethod
    def make(number: int) -> EpochName:
        """Return a new epoch."""
        return EpochName(number, secrets.token_hex(8))

    @staticmethod
    def parse(path: str) -> EpochName | None:
        """Return the epoch of a marker's path; None if it is not one."""
        found = _MARKER.fullmatch(path.rpartition("/")[2])
        return EpochName(int(found[1]), found[2]) if found else None

    def __str__(self) -> str:
        return f"{self.number:010d}-{self.token}"


def chunk_path(prefix: str, key: OffloadKey) -> str:
    """Return the path of a chunk's object."""
    return f"{prefix}/{content_hash(key).hex()}_g{group_index(key)}"


def parse_key(path: str) -> OffloadKey | None:
    """Return the key of a chunk's path; None if it is not one."""
    found = _CHUNK.fullmatch(path.rpartition("/")[2])
    if found is None or len(found[1]) % 2:
        return None
    group = int(found[2])
    return pack_key(bytes.fromhex(found[1]), group) if group < 2**32 else None
