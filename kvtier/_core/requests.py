"""What the core remembers of one request while its chunks are looked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from kvtier._core.chunks import Chunk
from kvtier._core.lookup_record import LookupRecord
from kvtier._core.states import REQUEST_MOVES, RequestState, Stateful
from kvtier.keys import OffloadKey


@dataclass(slots=True, eq=False, repr=False)
class Request(Stateful):
    """One request of the engine, from its first lookup to its end.

    What is known of a key (absent, or located in a tier) holds for the scan under way, so that
    a scan that is asked again each step gets the same answers and comes to an end.

    Attributes:
        name: how logs name it.
        tiers: the tiers that may be asked for it; None for all of them.
        deadline_s: when what is pending becomes a miss, on the owner's clock; set while WAITING.
        round: the step in which it was last asked; what follows to ``wanted`` is of that step.
        first: the key that was asked first.
        base: chunks of the prompt that come before it: the device has them.
        hits: keys that were answered HIT and are not among those held.
        wanted: keys that were answered PENDING or RETRY, in the order of the questions.
        held: chunks that it pins until it has loaded them, and the round in which each was asked last.
        absent: keys that no tier has, or could give, or gives sooner than they are computed.
        gated: keys that are computed sooner than a tier gives them.
        located: keys that a tier has, and which.
        locates: whether it only asks where chunks are: nothing is promoted for it.
        answers_stand: whether it waits and nothing has changed since it was last asked, so that the same
            questions would be answered alike.
        record: what becomes of its lookups; None where nobody wants to know.
    """

    MOVES: ClassVar = REQUEST_MOVES

    name: str = ""
    tiers: frozenset[int] | None = None
    state: RequestState = RequestState.IDLE
    deadline_s: float | None = None
    round: object = None
    first: OffloadKey | None = None
    base: int = 0
    hits: list[OffloadKey] = field(default_factory=list)
    wanted: list[OffloadKey] = field(default_factory=list)
    held: dict[Chunk, object] = field(default_factory=dict)
    absent: set[OffloadKey] = field(default_factory=set)
    gated: set[OffloadKey] = field(default_factory=set)
    located: dict[OffloadKey, int] = field(default_factory=dict)
    locates: bool = False
    answers_stand: bool = False
    record: LookupRecord | None = None

    def __str__(self) -> str:
        return f"request {self.name}"

    @property
    def is_waiting(self) -> bool:
        """Whether an answer would still be of use."""
        return self.state is RequestState.WAITING

    def begin_round(self, round_: object, first: OffloadKey) -> None:
        """Start the answers of a new step."""
        self.round = round_
        self.first = first
        self.answers_stand = False
        self.hits.clear()
        self.wanted.clear()
        if self.record is not None:
            self.record.began(round_)

    def mark_absent(self, keys: Iterable[OffloadKey]) -> None:
        """Answer MISS for ``keys`` from now on."""
        self.absent.update(keys)
        self.answers_stand = False

    def forget_locations(self) -> None:
        """Forget which keys are located, or nowhere."""
        self.absent.clear()
        self.gated.clear()
        self.located.clear()

    def forget_answers(self) -> None:
        """Forget the answers of the scan."""
        self.hits.clear()
        self.wanted.clear()
        self.forget_locations()
        self.deadline_s = None
