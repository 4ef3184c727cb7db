"""The messages between the core and its owner: commands say what to do, events what has happened.

Commands and the events of tiers travel as they are, in a thread and over the socket of the tier process.
The bounds that are given here are checked where a message is decoded, not where it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from kvtier.keys import MAX_KEY_BYTES, OffloadKey

MAX_TEXT = 16_384
MAX_ADDRESS = 300
MAX_ADDRESSES = 16

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Key = Annotated[OffloadKey, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Word = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS)]


class Put(Struct, array_like=True, frozen=True, gc=False, tag=1):
    """Put chunks into a tier. Ends with ``PutEnded``."""

    id: Number
    tier: Number
    keys: Sequence[Key]
    slots: Sequence[Number]


class Get(Struct, array_like=True, frozen=True, gc=False, tag=2):
    """Find chunks in a tier and get the leading ones. Ends with ``GetEnded``.

    The key at each index belongs to the slot at that index; there are at most as many slots as keys.
    What is got is the run of found keys from the front, as far as the slots reach. Where ``located``
    is true the keys are known to be there and need not be looked for. ``addresses`` are where a client says
    that engines have them: see ``SecondaryTier.contains_at``.
    """

    id: Number
    tier: Number
    keys: Sequence[Key]
    slots: Sequence[Number]
    located: bool
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()


class Touch(Struct, array_like=True, frozen=True, gc=False, tag=3):
    """Note the use of chunks that a tier may have. Nothing comes back."""

    tier: Number
    keys: Sequence[Key]


class Reset(Struct, array_like=True, frozen=True, gc=False, tag=4):
    """Make all that the tier has invisible for ever. Commands that follow wait for it."""

    tier: Number
    epoch: Number


Command = Put | Get | Touch | Reset


class TransferHealth(IntEnum):
    """What a transfer that has ended says of its tier's health. Only real puts and gets say anything."""

    NONE = 0  # nothing: it was not begun, or the tier's index alone answered it
    GOOD = 1  # the backend did what it was asked for, or said why it would not
    BAD = 2  # it failed at most of it
    LATE = 3  # it did not end by its deadline


class PutEnded(Struct, array_like=True, frozen=True, gc=False, tag=1):
    """A put has ended: its slots are no longer read."""

    id: Number
    kept: Sequence[bool]  # for each key, whether the tier has it now
    reasons: Mapping[Word, Number] = field(default_factory=dict)  # why chunks were not kept, counted
    seconds: Seconds = 0.0
    health: TransferHealth = TransferHealth.NONE
    retry: Word = ""  # what came of a second attempt, as in ``reasons.RETRY``; empty where none was due


class Answer(IntEnum):
    """The result of a get for one key: whether the tier has it, and whether its bytes were copied.

    A tier's ``Knowledge`` and ``Status`` become this one: why a chunk is MISSING makes no difference to the
    core, and is counted.
    """

    MISSING = 0  # the tier does not have it, or could not give it
    LOCATED = 1  # the tier has it; it was not copied
    COPIED = 2  # its proven bytes are in its slot


class GetEnded(Struct, array_like=True, frozen=True, gc=False, tag=2):
    """A get has ended: its slots are no longer written."""

    id: Number
    answers: Sequence[Answer]  # one for each key; only those that were given a slot can be COPIED
    reasons: Mapping[Word, Number] = field(default_factory=dict)  # why keys it has were not given
    seconds: Seconds = 0.0
    health: TransferHealth = TransferHealth.NONE
    retry: Word = ""
    elapsed_s: Seconds = 0.0  # since the get was submitted: turn, lookup and checks included
    lookup_s: Seconds = 0.0  # spent in the tier before the copy; ``seconds`` has only the copy


class TierDown(Struct, array_like=True, frozen=True, tag=3):
    """A tier can not be used, for the reason given, until ``TierUp``."""

    tier: Number
    reason: Text


class TierUp(Struct, array_like=True, frozen=True, tag=4):
    """A tier can be used: it is open, and reset to ``epoch``."""

    tier: Number
    epoch: Number


class Removed(Struct, array_like=True, frozen=True, tag=5):
    """Chunks have left a tier by themselves: evicted, expired or set aside. Without keys: perhaps all."""

    tier: Number
    keys: Sequence[Key]


class SlotsReady(Struct, frozen=True):
    """Slots of the primary tier may be used from now on."""

    slots: range
    is_last: bool = True  # no more of them will follow


class ProcessEnded(Struct, frozen=True):
    """The process of the tiers has ended, and not because it was told to."""

    reason: str  # a word of ``reasons.PROCESS_ENDED``


TierEvent = PutEnded | GetEnded | TierDown | TierUp | Removed
Event = TierEvent | SlotsReady | ProcessEnded
