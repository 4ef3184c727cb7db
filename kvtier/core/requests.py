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
        state: see ``RequestState``.
        deadline_s: when what is pending becomes a miss, on the owner's clock; set while WAITING.
        round: the step in which it was last asked; the two lists that follow are of that step.
        hits: keys that were answered HIT and are not among those held.
        wanted: keys that were answered PENDING or RETRY, in the order of the questions.
        held: chunks that it pins until it has loaded them.
        absent: keys that no tier has, or could give.
        located: keys that a tier has, and which.
    """

    __slots__ = ("absent", "deadline_s", "held", "hits", "located", "name", "round", "state", "wanted")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.state = RequestState.IDLE
        self.deadline_s: float | None = None
        self.round: object = None
        self.hits: list[OffloadKey] = []
        self.wanted: list[OffloadKey] = []
        self.held: dict[Chunk, None] = {}
        self.absent: set[OffloadKey] = set()
        self.located: dict[OffloadKey, int] = {}

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

    def begin_round(self, round_: object) -> None:
        """Start the answers of a new step."""
        self.round = round_
        self.hits.clear()
        self.wanted.clear()

    def give_up(self, keys: Iterable[OffloadKey]) -> None:
        """Answer MISS for ``keys`` from now on."""
        self.absent.update(keys)

    def forget_answers(self) -> None:
        """Forget what the scan has learned."""
        self.hits.clear()
        self.wanted.clear()
        self.absent.clear()
        self.located.clear()
        self.deadline_s = None
