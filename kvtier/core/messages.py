"""What the core tells its owner to do (commands) and what the owner tells the core (events)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier.keys import OffloadKey


@dataclass(frozen=True, slots=True)
class Put:
    """Put chunks into a tier. Ends with ``PutEnded``."""

    id: int
    tier: int
    keys: Sequence[OffloadKey]
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Find chunks in a tier and get the leading ones. Ends with ``Fetched``.

    The key at each index belongs to the slot at that index; there are at most as many slots as keys.
    What is got is the run of found keys from the front, as far as the slots reach. Where ``located``
    is true the keys are known to be there and need not be looked for.
    """

    id: int
    tier: int
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    located: bool


@dataclass(frozen=True, slots=True)
class Touch:
    """Tell a tier that chunks were used which it may have. Nothing comes back."""

    tier: int
    keys: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True)
class Reset:
    """Make all that the tier has invisible for ever. Commands that follow wait for it."""

    tier: int
    epoch: int


Command = Put | Fetch | Touch | Reset


class Proof(IntEnum):
    """What a transfer that has ended says of its tier's health. Only real puts and gets say anything."""

    NONE = 0  # nothing: it was not begun, or the tier's index alone answered it
    GOOD = 1  # the backend did what it was asked for, or said why it would not
    BAD = 2  # it failed at most of it
    LATE = 3  # it did not end by its deadline


@dataclass(frozen=True, slots=True)
class PutEnded:
    """A put has ended: its slots are no longer read.

    Attributes:
        kept: for each key, whether the tier has it now.
        reasons: why chunks were not kept, counted.
        seconds: how long the tier took.
        proof: what it says of the tier.
        retry: what came of a second attempt, in a word of ``reasons.RETRY``; empty where there was no
            cause for one.
    """

    id: int
    kept: Sequence[bool]
    reasons: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    proof: Proof = Proof.NONE
    retry: str = ""


class Answer(IntEnum):
    """What a fetch says of one key."""

    MISSING = 0  # the tier does not have it, or could not give it
    LOCATED = 1  # the tier has it; it was not brought
    LANDED = 2  # its proven bytes are in its slot


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch has ended: its slots are no longer written.

    Attributes:
        answers: one for each key. Only keys that were given a slot can be LANDED.
        reasons: why keys that the tier has were not given, counted.
        seconds: how long the tier took.
        proof: what it says of the tier.
        retry: what came of a second attempt, in a word of ``reasons.RETRY``; empty where there was no
            cause for one.
    """

    id: int
    answers: Sequence[Answer]
    reasons: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    proof: Proof = Proof.NONE
    retry: str = ""


@dataclass(frozen=True, slots=True)
class TierDown:
    """A tier can not be used, for the reason given, until ``TierUp``."""

    tier: int
    reason: str


@dataclass(frozen=True, slots=True)
class TierUp:
    """A tier that was down can be used. It is open, and through with every reset it was told to do."""

    tier: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Chunks have left a tier without having been told to: evicted, expired or set aside."""

    tier: int
    keys: Sequence[OffloadKey]


@dataclass(frozen=True, slots=True)
class SlotsReady:
    """Slots of the primary tier may be used from now on.

    Attributes:
        slots: which.
        is_last: whether there will be no more of them.
    """

    slots: range
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of the tiers has ended, and not because it was told to.

    Attributes:
        reason: how, in a word of ``reasons.PROCESS_ENDED``.
    """

    reason: str


Event = PutEnded | Fetched | TierDown | TierUp | Removed | SlotsReady | ProcessEnded
