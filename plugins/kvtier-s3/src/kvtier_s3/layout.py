"""The names of objects.

    <prefix>/caches/<namespace>/config.json                     whose cache it is
    <prefix>/caches/<namespace>/epochs/<number>-<token>         one for each epoch, empty
    <prefix>/chunks/<namespace>/<number>-<token>/<hash>_g<group>  the chunks of one epoch

Chunks have a branch of their own, so that a lifecycle rule can expire them and nothing else.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

from kvtier.keys import OffloadKey, content_hash, group_index, pack_key

_CHUNK: Final = re.compile(r"([0-9a-f]{2,128})_g(\d{1,10})")
_MARKER: Final = re.compile(r"(\d{10})-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the objects of one cache are.

    Attributes:
        prefix: what the names of all objects begin with.
        namespace: the cache's name.
    """

    prefix: str
    namespace: str

    @property
    def manifest(self) -> str:
        """Name of the object that spells out the cache's identity."""
        return f"{self.prefix}/caches/{self.namespace}/config.json"

    @property
    def markers(self) -> str:
        """What the names of the epochs' markers begin with."""
        return f"{self.prefix}/caches/{self.namespace}/epochs"

    @property
    def all_chunks(self) -> str:
        """What the names of all chunks of all caches begin with."""
        return f"{self.prefix}/chunks"

    def place(self, epoch: Epoch) -> str:
        """What the names of the chunks of one epoch begin with."""
        return f"{self.prefix}/chunks/{self.namespace}/{epoch}"


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """An epoch: a number, and a token so that no two are ever called the same.

    The greatest one is the one that openers join.
    """

    number: int
    token: str

    @staticmethod
    def make(number: int) -> Epoch:
        """Make an epoch that nobody else has."""
        return Epoch(number, secrets.token_hex(8))

    @staticmethod
    def of_marker(path: str) -> Epoch | None:
        """Read the name of a marker; None where it is none."""
        found = _MARKER.fullmatch(path.rpartition("/")[2])
        return Epoch(int(found[1]), found[2]) if found else None

    def __str__(self) -> str:
        return f"{self.number:010d}-{self.token}"


def chunk_name(place: str, key: OffloadKey) -> str:
    """Name the object of one chunk."""
    return f"{place}/{content_hash(key).hex()}_g{group_index(key)}"


def key_of(path: str) -> OffloadKey | None:
    """Read the key from the name of a chunk's object; None where it is none."""
    found = _CHUNK.fullmatch(path.rpartition("/")[2])
    if found is None or len(found[1]) % 2:
        return None
    group = int(found[2])
    return pack_key(bytes.fromhex(found[1]), group) if group < 2**32 else None
