"""What the core remembers of one request while its chunks are looked for."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.core.chunks import Chunk
from kvtier.core.states import REQUEST_MOVES, RequestEvent, RequestState, forbidden
from kvtier.keys import OffloadKey


class Request:
    """One request of the engine, from its first lookup to its end.

    What is learned about a key (absent, or located in a tier) holds for the scan under way, so that
    a scan that is asked again each step gets the same answers and comes to an end.

    Attributes:
        name: how logs name it.
        tiers: the tiers that may be asked for it; None for all of them.
        state: see ``RequestState``.
        deadline_s: when what is pending becomes a miss, on the owner's clock; set while WAITING.
        round: the step in which it was last asked; what follows to ``wanted`` is of that step.
        first: the key that was asked first.
        hits: keys that were answered HIT and are not among those held.
        wanted: keys that were answered PENDING or RETRY, in the order of the questions.
        held: chunks that it pins until it has loaded them, and the round in which each was asked last.
        absent: keys that no tier has, or could give.
        located: keys that a tier has, and which.
        stands: whether it waits and nothing has changed since it was last asked, so that the same
            questions would be answered alike.
    """

    __slots__ = (
        "absent",
        "deadline_s",
        "first",
        "held",
        "hits",
        "located",
        "name",
        "round",
        "stands",
        "state",
        "tiers",
        "wanted",
    )

    def __init__(self, name: str = "", tiers: frozenset[int] | None = None) -> None:
        self.name = name
        self.tiers = tiers
        self.state = RequestState.IDLE
        self.deadline_s: float | None = None
        self.round: object = None
        self.first: OffloadKey | None = None
        self.hits: list[OffloadKey] = []
        self.wanted: list[OffloadKey] = []
        self.held: dict[Chunk, object] = {}
        self.absent: set[OffloadKey] = set()
        self.located: dict[OffloadKey, int] = {}
        self.stands = False

    def move(self, event: RequestEvent) -> None:
        """Change the state as the table says."""
        try:
            self.state = REQUEST_MOVES[event][self.state]
        except KeyError:
            forbidden(f"request {self.name}", self.state, event)

    @property
    def is_waiting(self) -> bool:
        """Whether an answer would still be of use."""
        return self.state is RequestState.WAITING

    def begin_round(self, round_: object, first: OffloadKey) -> None:
        """Start the answers of a new step."""
        self.round = round_
        self.first = first
        self.stands = False
        self.hits.clear()
        self.wanted.clear()

    def give_up(self, keys: Iterable[OffloadKey]) -> None:
        """Answer MISS for ``keys`` from now on."""
        self.absent.update(keys)
        self.stands = False

    def forget_answers(self) -> None:
        """Forget what the scan has learned."""
        self.hits.clear()
        self.wanted.clear()
        self.absent.clear()
        self.located.clear()
        self.deadline_s = None
