"""The contract of a secondary tier, for fs and every third party's tier.

An author writes only the transport; kvtier adds deadlines, concurrency limits, checksums and metrics. A tier
is used from one event loop, from ``open`` to ``aclose``; several puts and gets can be in flight.

The most important rule: **when a put or get has returned or raised, cancellation included, nothing may touch
the batch's slots any more.** Other chunks take them at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import Field

from kvtier._core.tiers.write_admission import WritePolicy
from kvtier._identity import Identity
from kvtier._settings.quantities import Settings, Size
from kvtier.keys import OffloadKey


class Knowledge(IntEnum):
    """A tier's knowledge of a key, without asking its backend. It is a hint: a get may find otherwise.

    Attributes:
        UNKNOWN: the backend has to be asked, with ``contains``.
        ABSENT: the tier does not have the chunk.
        PRESENT: a get would probably find the chunk.
    """

    UNKNOWN = 0
    ABSENT = 1
    PRESENT = 2


class Status(IntEnum):
    """The result of a put or get for one chunk.

    Attributes:
        OK: put: the tier has the chunk; get: its bytes are in the slot.
        ABSENT: get: the tier does not have the chunk.
        CORRUPT: get: the stored bytes are damaged. If the tier ``verifies``, it has set them aside.
        REFUSED: put: the tier has no room.
        FAILED: the backend failed; ``Outcome.reasons`` contains the reason.
    """

    OK = 0
    ABSENT = 1
    CORRUPT = 2
    REFUSED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a put or a get.

    Attributes:
        statuses: one for each key of the batch, in the batch's order.
        reasons: number of chunks that are not OK, by a word such as ``"enospc"``, which becomes a metric
            label. Words that are neither in the metrics reference nor in ``SecondaryTier.reasons`` count as
            ``"error"``. ABSENT needs no reason.
    """

    statuses: Sequence[Status]
    reasons: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def all(status: Status, count: int, reason: str | None = None) -> Outcome:
        """Return an outcome of ``count`` chunks with the same status and reason."""
        return Outcome((status,) * count, Counter({reason: count}) if reason else {})


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is.

    Attributes:
        used_bytes: bytes that the tier occupies, overhead included; None if unknown.
        capacity_bytes: bytes that the tier may occupy; None if it has no such bound.
    """

    used_bytes: int | None
    capacity_bytes: int | None


class SlotMemory(Protocol):
    """The primary tier's memory: page-aligned slots of equal length.

    Attributes:
        slots: number of slots, including slots that have no memory yet and are in no batch.
    """

    slots: int

    @property
    def address(self) -> int:
        """Address of slot 0 in this process."""

    @property
    def chunk_bytes(self) -> int:
        """Length of a slot in bytes; slots follow each other without gaps."""

    def view(self, slot: int) -> memoryview:
        """Return the bytes of one slot: one-dimensional, format ``B``, ``chunk_bytes`` long."""


class SlotAuditor(Protocol):
    """The checksums that audited slots must have; implemented by ``kvtier._memory.slot_checksums``."""

    rate: float

    def audited(self, slots: Sequence[int]) -> list[int]:
        """Return the positions of the audited ones among ``slots``."""

    def are_intact(self, chunks: Sequence[tuple[OffloadKey, int]]) -> bool:
        """Return whether these slots have their recorded contents."""

    def record_checksums(self, slots: Sequence[int]) -> None:
        """Record the contents that these slots must have from now on."""


class Batch:
    """The chunks of one put or get: their keys, and the slots to read from or write to.

    Attributes:
        keys: offload keys, without duplicates.
        slots: index of each chunk's slot in ``memory``.
        memory: the primary tier's memory.
        trailers: proof of each chunk's bytes, ``TRAILER_BYTES`` long. A put must store them with the chunks;
            a get must fill in the stored ones. Unused if the tier ``verifies``.
    """

    __slots__ = ("_is_put", "_views", "keys", "memory", "slots", "trailers")

    def __init__(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        memory: SlotMemory,
        trailers: list[bytes] | None = None,
        *,
        is_put: bool = False,
    ) -> None:
        self._is_put = is_put
        self.keys = tuple(keys)
        self.slots = tuple(slots)
        self.memory = memory
        self.trailers = trailers if trailers is not None else [b""] * len(self.keys)
        self._views: tuple[memoryview, ...] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to replace keys or slots: kvtier checks them after the tier has had the batch."""
        if name in ("keys", "memory", "slots") and hasattr(self, name):
            raise AttributeError(f"{name} of a batch cannot be replaced")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def views(self) -> tuple[memoryview, ...]:
        """Bytes of the slots: a get writes them, a put may only read them."""
        if self._views is None:
            views = map(self.memory.view, self.slots)
            self._views = tuple(map(memoryview.toreadonly, views) if self._is_put else views)
        return self._views

    def part(self, indices: Sequence[int]) -> Batch:
        """Return a batch of the chunks at ``indices``, with copies of their trailers."""
        return Batch(
            [self.keys[index] for index in indices],
            [self.slots[index] for index in indices],
            self.memory,
            [self.trailers[index] for index in indices],
            is_put=self._is_put,
        )

    @property
    def nbytes(self) -> int:
        """Total bytes of the chunks, without trailers."""
        return len(self.keys) * self.memory.chunk_bytes


class TierConfig(Settings):
    """Settings that every tier has. A tier subclasses it for its own settings."""

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
        default=5, ge=1, description="Consecutive failures that open a breaker. Puts and gets have one each."
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

    write_policy: WritePolicy = Field(
        default="all",
        description="Which chunks are put into the tier. `all`: every chunk. `reused`: chunks requested a "
        "second time. `adaptive`: as `reused` while less than one chunk in fifty is requested again, else as "
        "`all`.",
    )
    write_bytes_per_day: Annotated[Size, Field(gt=0)] | None = Field(
        default=None,
        description="Maximum bytes put into the tier per day, to limit the wear of an SSD; an hour's share "
        "may be used at once. While less than half of that is left, only chunks requested a second time are "
        "put. Default: no limit.",
    )

    def own_directories(self) -> Sequence[Path]:
        """Return the directories that only this tier of an engine may write into."""
        return ()

    def peer_address(self) -> str | None:
        """Return this tier's address for other engines, as their settings spell it; None if it has none.

        A prefill engine sends it to the decode engine, whose tier gets it in ``contains_at``.
        """
        return None

    def peer_addresses(self) -> Sequence[str]:
        """Return the addresses of other engines' tiers that this tier may ask, as its settings spell them."""
        return ()


def ignore(*details: object) -> None:
    """Do nothing. This is a callback for callers that need none."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """The facts that kvtier passes to a tier's ``open``.

    Attributes:
        name: the tier's name in logs and metrics.
        identity: the cache that the chunks belong to. Never return chunks of another identity.
        chunk_bytes: length of every chunk.
        removed: callback for the keys of chunks that left the tier without ``discard``: evicted, expired or
            set aside. KV events announce their removal. Unknown keys are ignored. Any thread may call it.
        lost: callback for the reason why the tier must be opened again, such as a lost mount or lease. When
            its transfers have ended, the tier is closed and a new object opened. Any thread may call it.
    """

    name: str
    identity: Identity
    chunk_bytes: int
    removed: Callable[[Sequence[OffloadKey]], None] = ignore
    lost: Callable[[str], None] = ignore


ConfigT = TypeVar("ConfigT", bound=TierConfig)


class SecondaryTier(ABC, Generic[ConfigT]):
    """Storage for chunks behind the primary tier: files, an object store, a server, a peer.

    A subclass names its settings' class in ``Config``, and an entry point in ``kvtier.tiers`` names the
    subclass. The constructor only keeps the settings; connect in ``open``.
    """

    Config: ClassVar[type[TierConfig]]

    verifies: ClassVar[bool] = False
    """Whether the tier itself proves that a get returns the bytes of the put. If False, kvtier passes a
    trailer to each put and checks it after each get."""

    medium: ClassVar[Literal["memory", "disk", "remote"]] = "remote"
    """Kind of storage, for metrics of hits by source and for ``kv_load_tiers``."""

    reasons: ClassVar[Mapping[str, str]] = {}
    """The tier's own reasons, each with its meaning, in addition to the reasons of every tier."""

    transient: ClassVar[Collection[str]] = ()
    """Reasons worth a retry, such as a busy server, in addition to ``"timeout"`` and ``"connection"``. kvtier
    retries chunks that FAILED for them once, if time is left. A tier does not retry by itself."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    async def open(self, context: TierContext) -> None:
        """Connect, create directories, start threads. Raise TierError if the tier cannot work.

        If it raises or takes longer than a minute, kvtier drops this object and later opens another one;
        release everything before raising.
        """

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return the tier's knowledge of each key. Must not block. Any thread may call it."""
        return (Knowledge.UNKNOWN,) * len(keys)

    def usage(self) -> Usage | None:
        """Return how full the tier is, or None if unknown. Must not block: called about once a second."""
        return None

    @abstractmethod
    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return for each key whether a get would probably find it.

        Raise if the backend failed for most keys, as ``kvtier.tiers.require_answers`` does. False counts as a
        good answer, so the breaker would stay closed and every request would wait for a failed backend.
        """

    async def contains_at(
        self,
        keys: Sequence[OffloadKey],
        addresses: Sequence[str],  # noqa: ARG002
    ) -> Sequence[bool]:
        """Return the same as ``contains``; kvtier calls this method.

        A client claims that engines at ``addresses``, which may be empty, have the keys. A tier may ask them
        first. Do not trust them: they may be wrong, so connect only to addresses that the settings name.
        """
        return await self.contains(keys)

    @abstractmethod
    async def put(self, batch: Batch) -> Outcome:
        """Store the chunks, each whole or not at all. Puts and gets are cancelled after ``deadline_s``."""

    @abstractmethod
    async def get(self, batch: Batch) -> Outcome:
        """Write the chunks into their slots. A slot whose status is not OK may have any contents."""

    async def reread(self, batch: Batch) -> Outcome:
        """Get chunks whose first get was damaged, past caches and over a new connection if possible.

        kvtier discards a chunk, for all engines that share it, only if both gets returned the same damaged
        bytes or CORRUPT. Return FAILED if the network may have damaged the bytes, or kvtier did not put them.
        """
        return await self.get(batch)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record that ``keys`` were just loaded from the primary tier. For tiers that evict by recency.

        Keys are in prompt order: evict the last key of a call first. The tier may lack some. A get counts as
        a use itself; no touch follows it.
        """

    @abstractmethod
    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove ``keys``. Absent ones are not an error."""

    @abstractmethod
    async def reset(self) -> None:
        """Hide everything put so far, puts in flight included, permanently and also after reopening.

        Only this instance may see chunks put afterwards: a reset follows new weights, and an instance that
        opens later may have the old ones. If it raises, kvtier closes this object, opens another and resets
        that one; until it succeeds, the tier is unused.
        """

    async def aclose(self) -> None:
        """Release everything. No other call is in flight, and none follows."""
