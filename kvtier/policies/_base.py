"""What an eviction policy is: it orders the chunks that may be evicted, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvtier.keys import OffloadKey


class EvictionPolicy(ABC):
    """Chooses which chunks leave the primary tier.

    A policy is told when a chunk becomes a candidate (``add``), when it stops being one for a while
    (``pin``) and when all go for another reason than eviction (``clear``). Only
    candidates may be evicted, so ``evict`` never has to skip. All calls come from one thread, and
    each should cost well under a microsecond a key.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity

    def resize(self, capacity: int) -> None:
        """Set how many chunks the primary tier has room for."""
        self.capacity = capacity

    @abstractmethod
    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        """Make ``keys`` candidates; none of them is one.

        They are in the order of their prefix. A prompt whose front is gone serves nobody, so of keys
        added together the last should be evicted first. ``used`` says that a request has read them;
        otherwise they are new, or only a copy to another tier has ended.
        """

    @abstractmethod
    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Stop considering these candidates until they are added again."""

    @abstractmethod
    def evict(self, count: int) -> list[OffloadKey]:
        """Choose up to ``count`` candidates, forget them as such, and return them."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of candidates."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether ``key`` is a candidate."""
