"""A tier's client without the tier: what ``kvtier bench tier`` measures the tier against.

A distribution offers one through an entry point in the group ``kvtier.benchmarks``, under the name that
its tier has in ``kvtier.tiers``:

    [project.entry-points."kvtier.benchmarks"]
    shelf = "kvtier_shelf.bare:BareShelf"

It is optional: without it the benchmark has figures of the tier, and nothing to compare them with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from kvtier.tiers._base import ConfigT


class BareClient(ABC, Generic[ConfigT]):
    """The client that a tier is built on, used as its own documentation says, as fast as it goes.

    It does what a user of the client would do who has bytes in memory and wants them there again: no
    checksums, no deadlines, no care for what a cancellation does to the bytes. As many transfers at once as
    suit it are its own choice. Several calls may be under way at once.

    Args:
        config: the settings of the tier that is measured; the client talks to the same backend.
        chunk_bytes: length of every chunk.
    """

    def __init__(self, config: ConfigT, chunk_bytes: int) -> None:
        self.config = config
        self.chunk_bytes = chunk_bytes

    async def open(self) -> None:
        """Connect. ``aclose`` is called even where this raises."""

    @abstractmethod
    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Store chunks under names that nothing is stored under yet. Raise where one could not be."""

    @abstractmethod
    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Fill ``chunks`` with what was stored. Raise where one could not be had whole."""

    @abstractmethod
    async def discard(self, names: Sequence[str]) -> None:
        """Remove what was stored."""

    async def aclose(self) -> None:
        """Give everything back."""


__all__ = ["BareClient"]
