"""What a secondary tier is: the contract that fs, dummy and every third party's tier fulfil.

An author writes the transport and nothing else. Deadlines, limits on concurrency, checksums and
counting are put around every tier by kvtier. A tier is driven by one event loop, from ``open`` to
``aclose``; several puts and gets of one tier can be under way at once.

The rule that matters most: **when a put or a get returns or raises, cancellation included, nothing
may touch the batch's slots any more.** They are given to other chunks right away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import Field

from kvtier._identity import Identity
from kvtier._quantities import Settings
from kvtier.keys import OffloadKey
from kvtier.tiers._seal import TRAILER_BYTES


class Knowledge(IntEnum):
    """What a tier knows about a key without asking its backend: before a transfer, and not proven."""

    UNKNOWN = 0
    ABSENT = 1
    PRESENT = 2


class Status(IntEnum):
    """How one chunk of a put or a get ended, as a tier says it. What the core learns is ``Answer``."""

    OK = 0  # put: it is there now (perhaps it was before); get: its bytes are in the slot
    ABSENT = 1  # get: the tier does not have it
    CORRUPT = 2  # get: what the tier has is not what was put; it was set aside
    REFUSED = 3  # put: the tier has no room for it, by its own bound or its backend's
    FAILED = 4  # the backend failed; ``Outcome.reasons`` says how


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a put or a get.

    Attributes:
        statuses: one for each key of the batch, in its order.
        reasons: why chunks did not end OK, counted by a short word such as ``"enospc"`` or
            ``"checksum"``; it becomes a label of a metric. ``kvtier._reasons.TRANSFER`` has the words
            that every tier may use, ``SecondaryTier.reasons`` this tier's own; any other becomes
            ``"error"``. What the tier does not have (ABSENT) needs no reason.
    """

    statuses: Sequence[Status]
    reasons: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def all(status: Status, count: int, reason: str | None = None) -> Outcome:
        """Make the outcome of ``count`` chunks that all ended alike."""
        return Outcome((status,) * count, Counter({reason: count}) if reason else {})


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is.

    Attributes:
        used_bytes: bytes that it keeps, what it needs beside the chunks' own included; None where unknown.
        capacity_bytes: bytes that it may keep; None where it is not bounded by bytes.
    """

    used_bytes: int | None
    capacity_bytes: int | None


class SlotMemory(Protocol):
    """The primary tier's bytes as a tier may see them. Slots are equally long and page-aligned."""

    @property
    def address(self) -> int:
        """Address of slot 0 in this process."""

    @property
    def chunk_bytes(self) -> int:
        """Length of one slot, and distance to the next, in bytes."""

    def view(self, slot: int) -> memoryview:
        """Return the bytes of one slot: one-dimensional, format ``B``, ``chunk_bytes`` long."""


class SlotChecksums(Protocol):
    """What audited slots must hold. ``kvtier._memory.slot_checksums`` is the one there is."""

    rate: float

    def audited(self, slots: Sequence[int]) -> list[int]:
        """Return the positions of those slots that are audited."""

    def are_intact(self, chunks: Sequence[tuple[OffloadKey, int]]) -> bool:
        """Return whether these slots hold what they must."""

    def take_over(self, slots: Sequence[int]) -> None:
        """Record what slots hold now as what they must hold from now on."""


class Batch:
    """Chunks that are put or got together: keys and the slots they are in or shall be in.

    Attributes:
        keys: the chunks' offload keys, without duplicates.
        slots: where each chunk is in ``memory``.
        memory: the primary tier's bytes.
        trailers: what proves a chunk's bytes, ``TRAILER_BYTES`` each. On a put they are given and
            must be kept beside the bytes; on a get the tier fills in what it kept. Left alone by
            tiers whose ``verifies`` is true.
    """

    __slots__ = ("_views", "keys", "memory", "slots", "trailers")

    def __init__(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        memory: SlotMemory,
        trailers: list[bytes] | None = None,
    ) -> None:
        self.keys = tuple(keys)
        self.slots = array("q", slots)
        self.memory = memory
        self.trailers = trailers if trailers is not None else [b""] * len(self.keys)
        self._views: tuple[memoryview, ...] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def views(self) -> tuple[memoryview, ...]:
        """The slots' bytes: to be read in a put, to be written in a get."""
        if self._views is None:
            self._views = tuple(self.memory.view(slot) for slot in self.slots)
        return self._views

    def part(self, indices: Sequence[int]) -> Batch:
        """Return a batch of the chunks at ``indices``, with their trailers as they are now."""
        return Batch(
            [self.keys[index] for index in indices],
            [self.slots[index] for index in indices],
            self.memory,
            [self.trailers[index] for index in indices],
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, trailers not counted."""
        return len(self.keys) * self.memory.chunk_bytes


class TierConfig(Settings):
    """Settings that every tier has. A tier's own model subclasses this one."""

    type: str = Field(description="Type of the tier: the name of its entry point in `kvtier.tiers`.")
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name in logs and metrics: letters, digits, `.`, `_` and `-`. Default: the type; a "
        "second tier of that type is `<type>-2`.",
    )
    deadline_s: float = Field(
        default=5.0,
        gt=0,
        le=86_400,
        description="Seconds after which a put or get, queueing included, is cancelled. The get is then a "
        "miss, the put is dropped.",
    )
    locality: Literal["LOCAL", "REMOTE"] | None = Field(
        default=None,
        description="Whether chunks are on this host or on another, for `kv_load_tiers` and KV events. "
        "Default: what the tier's type implies.",
    )
    max_concurrency: int = Field(
        default=8,
        ge=1,
        description="Maximum number of gets in flight; puts get half as many. Raise it for a tier with high "
        "latency and bandwidth to spare.",
    )
    breaker_failures: int = Field(
        default=5,
        ge=1,
        description="Consecutive failures that open a breaker. Puts and gets have one each.",
    )
    breaker_pause_s: float = Field(
        default=1.0,
        gt=0,
        le=86_400,
        description="Seconds from the opening of a breaker to its first probe. Each failed probe doubles the "
        "pause, up to 60 times this value.",
    )
    retry_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Retries allowed, as a share of first attempts. 0 disables retries.",
    )

    def own_directories(self) -> Sequence[Path]:
        """Return the directories that the tier writes into, which no other tier of an engine may share."""
        return ()


def ignore_removed(keys: Sequence[OffloadKey]) -> None:
    """Ignore which keys have left a tier."""


def ignore_lost(why: str) -> None:
    """Ignore that a tier has to be opened again."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is given when it is opened.

    Attributes:
        name: the tier's name in logs and metrics.
        identity: which cache the chunks belong to. Chunks of another identity are not to be given.
        chunk_bytes: length of every chunk.
        removed: to be called, from any thread, with keys that have left the tier without a call of
            ``discard``: evicted, expired, set aside. Whoever counts on them is notified. Keys that the tier
            did not have do no harm.
        lost: to be called, from any thread, with the reason, when what ``open`` has opened is of no use any
            more and another ``open`` would help. The tier is closed when nothing of it is under way, and
            another object of its class is opened.
    """

    name: str
    identity: Identity
    chunk_bytes: int
    removed: Callable[[Sequence[OffloadKey]], None] = ignore_removed
    lost: Callable[[str], None] = ignore_lost


ConfigT = TypeVar("ConfigT", bound=TierConfig)


class SecondaryTier(ABC, Generic[ConfigT]):
    """Something behind the primary tier that keeps chunks: files, an object store, a peer.

    A subclass names its settings in ``Config`` and is found through an entry point in the group
    ``kvtier.tiers``. It is constructed with its settings; all else happens in ``open``.
    """

    Config: ClassVar[type[TierConfig]]

    verifies: ClassVar[bool] = False
    """Whether a get proves by itself that the bytes are those of the put. Where it is false, kvtier
    gives each put a trailer and checks it after each get."""

    medium: ClassVar[Literal["memory", "disk", "remote"]] = "remote"
    """Where the chunks are kept, for an engine that reports where hits came from."""

    reasons: ClassVar[Mapping[str, str]] = {}
    """Words of this tier's own for why chunks did not end OK, and what each of them means."""

    transient: ClassVar[Collection[str]] = ()
    """Those of ``reasons`` that may be over a moment later, such as a server that is busy: chunks that
    FAILED for them, or for ``"timeout"`` and ``"connection"``, are tried a second time where there is
    time left. A tier does not retry by itself."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    async def open(self, context: TierContext) -> None:
        """Connect, make directories, start what must run. Raise TierError when it cannot work.

        Where it raises, or takes longer than a minute, it is tried again later with another object of the
        class, and this one is forgotten: what was begun must be given back before.
        """

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return what is known of ``keys``, without waiting for anything. Called from any thread."""
        return (Knowledge.UNKNOWN,) * len(keys)

    def usage(self) -> Usage | None:
        """Return how full the tier is, or None where it does not know.

        Called on the event loop about once a second: it must neither wait nor count.
        """
        return None

    @abstractmethod
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return for each key whether a get would probably succeed."""

    @abstractmethod
    async def put(self, batch: Batch) -> Outcome:
        """Keep the chunks of ``batch``. A chunk appears whole or not at all.

        It is cancelled when its ``deadline_s`` is over, as a get is.
        """

    @abstractmethod
    async def get(self, batch: Batch) -> Outcome:
        """Fill the slots of ``batch``. A slot whose status is not OK may hold anything."""

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note that ``keys`` were loaded just now from the primary tier. For tiers that evict by recency.

        They are in the order of their prompts; of those in one call the last should be evicted first.
        The tier may have none of them. A get is not followed by a touch.
        """

    @abstractmethod
    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Forget ``keys``; those that are not there are no error."""

    @abstractmethod
    async def reset(self) -> None:
        """Make everything put so far invisible, for ever: after reopening too.

        That goes for puts under way as well: what one of them began before must not appear after it.
        What is put after it is for this opener alone: whoever opens later must not be given it. A reset
        comes with new weights, which this process may have got from a trainer, and the next one not.

        Where it raises the tier is not asked for anything until a later reset has succeeded.
        """

    async def aclose(self) -> None:
        """Give everything back. No other call is under way and none follows."""


__all__ = [
    "TRAILER_BYTES",
    "Batch",
    "Knowledge",
    "Outcome",
    "SecondaryTier",
    "SlotMemory",
    "Status",
    "TierConfig",
    "TierContext",
    "Usage",
]
