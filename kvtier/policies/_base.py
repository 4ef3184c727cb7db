"""The interface of eviction policies, which order the chunks that may be evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvtier.keys import OffloadKey

_numbers = count(1)


@dataclass(slots=True, eq=False)
class Run:
    """A request's use of chunks. A chunk belongs to the run that used it last.

    Attributes:
        time: when the request used chunks last. The clock counts the uses of chunks by all requests.
        place: returns the place of one of the chunks in the prompt.
        number: names the run.
    """

    time: int = 0
    place: Callable[[OffloadKey], int] = lambda key: 0  # noqa: ARG005
    number: int = field(default_factory=_numbers.__next__)


class EvictionPolicy(ABC):
    """Chooses which chunks are evicted from the primary tier.

    kvtier calls ``add_run`` when a chunk becomes a candidate, ``pin`` when it stops being one for a while,
    and ``clear`` when all chunks go. Every candidate may be evicted, so ``evict`` never has to skip one. All
    calls come from one thread; each should take a few microseconds per key at most.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity

    def resize(self, capacity: int) -> None:
        """Set the number of slots in the primary tier."""
        self.capacity = capacity

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:  # noqa: ARG002
        """Make ``keys`` candidates as ``add`` does, and learn which run they belong to.

        A prompt is stored in several steps, and puts end in any order. So the chunks of a run come in several
        calls, in any order, and late: after a run that is more recent. The default calls ``add``.
        """
        self.add(keys, used=used)

    @abstractmethod
    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        """Make ``keys`` candidates; none of them is one already.

        Args:
            keys: in the order of their prompt. Evict the last of them first: a prompt without its front
                cannot be reused.
            used: whether a request has just loaded them; False if they are new, or a put of them has ended.
        """

    @abstractmethod
    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Remove ``keys`` from the candidates until they are added again."""

    @abstractmethod
    def evict(self, count: int) -> list[OffloadKey]:
        """Remove up to ``count`` candidates, in the order of eviction, and return them."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all candidates, and forget their history."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of candidates."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Return whether ``key`` is a candidate."""
