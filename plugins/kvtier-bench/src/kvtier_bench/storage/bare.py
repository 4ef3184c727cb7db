"""A tier's client library without the tier, with which ``kvtier bench tier`` compares the tier.

A distribution offers one through an entry point in the group ``kvtier.benchmarks``, under the tier's name in
``kvtier.tiers``:

    [project.entry-points."kvtier.benchmarks"]
    shelf = "kvtier_shelf.bare:BareShelf"

It is optional. Without it, the benchmark shows only the tier's figures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from kvtier.tiers._base import ConfigT


class BareClient(ABC, Generic[ConfigT]):
    """A tier's client library, used as its documentation recommends, at full speed.

    It moves bytes to and from memory as a user of the client would: without checksums, deadlines, or
    protection of slots after a cancellation. It chooses the number of its parallel transfers. Several calls
    may run at once.

    Args:
        config: the settings of the measured tier; the client talks to the same backend.
        chunk_bytes: length of every chunk.
    """

    def __init__(self, config: ConfigT, chunk_bytes: int) -> None:
        self.config = config
        self.chunk_bytes = chunk_bytes

    async def open(self) -> None:
        """Connect. ``aclose`` is called even if this raises."""

    @abstractmethod
    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Store chunks under unused names. Raise if one cannot be stored."""

    @abstractmethod
    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Fill ``chunks`` with the stored bytes. Raise if one is missing or incomplete."""

    @abstractmethod
    async def discard(self, names: Sequence[str]) -> None:
        """Remove what was stored."""

    async def aclose(self) -> None:
        """Give everything back."""


__all__ = ["BareClient"]
