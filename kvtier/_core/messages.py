"""Messages between the core and its owner: commands to carry out, and events that have happened.

Commands and the events of tiers travel unchanged, in a thread and over the socket of the tier process. The
bounds declared here are checked when a message is decoded, not when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from kvtier.keys import MAX_KEY_BYTES, OffloadKey

MAX_TEXT = 16_384
MAX_WORD = 64
MAX_ADDRESS = 300
MAX_ADDRESSES = 16

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Key = Annotated[OffloadKey, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Word = Annotated[str, Meta(max_length=MAX_WORD)]
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

    Slot ``i`` belongs to key ``i``; there are at most as many slots as keys. A get copies the run of found
    keys from the front, as far as the slots reach. If ``located`` is true, the keys are known to be in the
    tier and need no lookup. ``addresses`` are where, by a client's hint, engines have the chunks: see
    ``SecondaryTier.contains_at``.
    """

    id: Number
    tier: Number
    keys: Sequence[Key]
    slots: Sequence[Number]
    located: bool
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()


class Touch(Struct, array_like=True, frozen=True, gc=False, tag=3):
    """Note the use of chunks that a tier may have. It has no reply."""

    tier: Number
    keys: Sequence[Key]


class Reset(Struct, array_like=True, frozen=True, gc=False, tag=4):
    """Hide all of the tier's chunks permanently. Later commands wait for it."""

    tier: Number
    epoch: Number


Command = Put | Get | Touch | Reset


class TransferHealth(IntEnum):
    """Evidence of a finished transfer about its tier's health. Only real puts and gets give any."""

    NONE = 0  # no evidence: it was not started, or the tier's index alone answered it
    GOOD = 1  # the backend succeeded, or refused with a reason
    BAD = 2  # most of the transfer failed
    LATE = 3  # it did not end by its deadline


class PutEnded(Struct, array_like=True, frozen=True, gc=False, tag=1):
    """A put has ended: its slots are no longer read."""

    id: Number
    kept: Sequence[bool]  # for each key, whether the tier has it now
    reasons: Mapping[Word, Number] = field(default_factory=dict)  # why chunks were not kept, counted
    seconds: Seconds = 0.0
    health: TransferHealth = TransferHealth.NONE
    retry: Word = ""  # result of the second attempt, in a word of ``reasons.RETRY``; empty if none was due


class Answer(IntEnum):
    """The result of a get for one key: whether the tier has it, and whether its bytes were copied.

    A tier's ``Knowledge`` and ``Status`` map to it. The reason why a chunk is MISSING is only counted.
    """

    MISSING = 0  # the tier lacks it, or could not return it
    LOCATED = 1  # the tier has it; it was not copied
    COPIED = 2  # its verified bytes are in its slot


class GetEnded(Struct, array_like=True, frozen=True, gc=False, tag=2):
    """A get has ended: its slots are no longer written."""

    id: Number
    answers: Sequence[Answer]  # one for each key; only keys with a slot can be COPIED
    reasons: Mapping[Word, Number] = field(default_factory=dict)  # why keys that the tier has were not copied
    seconds: Seconds = 0.0
    health: TransferHealth = TransferHealth.NONE
    retry: Word = ""
    elapsed_s: Seconds = 0.0  # since the get was submitted, with queueing, lookup and checks
    lookup_s: Seconds = 0.0  # spent in the tier before the copy; ``seconds`` is the copy alone


class TierDown(Struct, array_like=True, frozen=True, tag=3):
    """A tier is unusable, for the given reason, until ``TierUp``."""

    tier: Number
    reason: Text


class TierUp(Struct, array_like=True, frozen=True, tag=4):
    """A tier is usable: it is open, and reset to ``epoch``."""

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
    """The tier process has ended without being told to."""

    reason: str  # a word of ``reasons.PROCESS_ENDED``
    times: int = 1


TierEvent = PutEnded | GetEnded | TierDown | TierUp | Removed
Event = TierEvent | SlotsReady | ProcessEnded
