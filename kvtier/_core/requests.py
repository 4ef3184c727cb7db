"""The core's memory of one request, from its first lookup to its end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, ClassVar

from kvtier._core.chunks import DEFAULT, Chunk, block_of
from kvtier._core.states import REQUEST_MOVES, RequestState, Stateful
from kvtier.keys import OffloadKey
from kvtier.policies._base import Run

if TYPE_CHECKING:
    from kvtier._core.promotion.waits import Wait


class LookupRecord:
    """Results of the lookups of the request ``name``, which is to be explained.

    The set ``asked`` gets the name in each round with a new lookup; its owner clears it.
    """

    def __init__(self, name: str = "", asked: set[str] | None = None) -> None:
        self.misses: dict[OffloadKey, str] = {}  # keys that the last scan missed, in its order; reasons
        self.refusals: dict[OffloadKey, dict[str, str]] = {}  # reasons, by key and tier name
        self._round: object = None
        self._name = name
        self._asked = set() if asked is None else asked

    def began(self, round_: object) -> None:
        """Note a lookup in a round; a new round discards earlier misses."""
        if round_ is not self._round:
            self._round = round_
            self.misses.clear()
            self._asked.add(self._name)

    def missed(self, round_: object, key: OffloadKey, reason: str) -> None:
        self.began(round_)
        self.misses[key] = reason

    def refused(self, keys: Iterable[OffloadKey], tier: str, reason: str) -> None:
        for key in keys:
            self.refusals.setdefault(key, {})[tier] = reason


@dataclass(slots=True)
class Terms:
    """The terms of a request's claim, as its client set them."""

    name: str  # the claim's; requests with the same name share it
    kept_s: float = 0.0  # how long its chunks are kept after the end of the last one; 0 if they are not
    # From its end until its chunks are needed again; 0 if they are not. If it is infinite, its claim keeps
    # nothing after its end, and remembers its chunks for ``Claims.promote``.
    next_use_s: float = 0.0
    releases: Sequence[str] = ()  # the names of claims that end with the request
    tiers: frozenset[int] | None = None  # to promote its chunks from; None for those that it allows itself
    used: dict[OffloadKey, None] = field(default_factory=dict)  # needed again, in the order of its prompt


@dataclass(slots=True, eq=False, repr=False)
class Request(Stateful):
    """One request of the engine, from its first lookup to its end.

    The location of a key (absent, or in a tier) holds for the whole scan. The engine repeats the scan in each
    step and gets the same answers, so the scan ends.
    """

    MOVES: ClassVar = REQUEST_MOVES

    name: str = ""
    tiers: frozenset[int] | None = None  # tiers that may be asked; None for all
    addresses: tuple[str, ...] = ()  # engines that have its chunks, by its client's hint
    blocks: dict[int, None] | None = None  # last 64 bits of those chunks' hashes; None for all chunks
    state: RequestState = RequestState.IDLE
    deadline_s: float | None = None  # when pending keys become misses; set while WAITING
    round: object = None  # the last one that asked it; the fields down to ``wanted`` belong to that round
    first: OffloadKey | None = None  # the key that was asked first
    is_repeated: bool = False  # that key got its answer by ``repeat_answer``, perhaps all did
    base: int = 0  # chunks of the prompt before ``first``: the device has them
    hits: list[OffloadKey] = field(default_factory=list)  # answered HIT and not held yet
    wanted: list[OffloadKey] = field(default_factory=list)  # answered PENDING or RETRY, in order of asking
    held: dict[Chunk, object] = field(default_factory=dict)  # pinned, and the last round that asked for each
    misses: dict[OffloadKey, str] = field(default_factory=dict)  # answered MISS and not counted yet; reasons
    missed: set[OffloadKey] = field(default_factory=set)  # counted as misses
    # No tier has or can return them, they are computed faster than loaded, or they lack room.
    absent: set[OffloadKey] = field(default_factory=set)
    why_absent: dict[OffloadKey, str] = field(default_factory=dict)  # if tiers may have the key
    located: dict[OffloadKey, int] = field(default_factory=dict)  # keys that a tier has, with the tier
    locates: bool = False  # it only locates chunks: nothing is promoted for it
    is_prefetch: bool = False  # no client waits for it: it yields to all other requests
    answers_stand: bool = False  # it waits, and the same lookups get the same answers until ``note_change``
    has_news: bool = True  # a scan, or ``note_change``, came since its wanted keys were last examined
    blocked: OffloadKey | None = None  # then: the first located key that had no slot
    wait: Wait | None = None  # for chunks that no tier has yet; None if these are misses at once
    terms: Terms | None = None  # the terms of its claim, if it has one
    priority: int = DEFAULT  # the chunks that it uses get it, unless another request gives them a higher one
    priority_s: float = inf  # how long after its end the priority lasts
    releases: bool = False  # chunks that it alone has used leave the primary tier when it has ended
    # Chunks whose priority it sets, and whether a tier is known to have them.
    own: dict[OffloadKey, bool] = field(default_factory=dict)
    is_placed: bool = False  # the engine has named its blocks, and will not again after a preemption
    no_store: str | None = None  # why its blocks may hold foreign KV: ``reasons.STORE_REFUSED``
    run: Run = field(default_factory=Run)
    # Its actions on blocks: each uses the chunks of its own ``blocks``. The value says whether it has any.
    parts: dict[Request, bool] = field(default_factory=dict)
    # Of each chunk in its prompt; empty if its chunks are offered in their order.
    places: Mapping[OffloadKey, int] = field(default_factory=dict)
    record: LookupRecord | None = None  # the results of its lookups, if it is explained

    def __str__(self) -> str:
        return f"request {self.name!r}"

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is still of use."""
        return self.state is RequestState.WAITING

    @property
    def awaits_any(self) -> bool:
        """Whether it waits for chunks that no tier has yet."""
        return self.wait is not None and bool(self.wait.keys)

    def names(self, key: OffloadKey) -> bool:
        """Return whether the chunk is one of ``blocks``."""
        return self.blocks is None or block_of(key) in self.blocks

    def begin_round(self, round_: object, first: OffloadKey) -> None:
        self.round = round_
        self.first = first
        if self.no_store is not None:
            self.renew_blocks()  # the engine forgets its old blocks before it asks
        self.is_repeated = False
        self.note_change()
        self.hits.clear()
        self.wanted.clear()
        if self.wait is not None:
            self.wait.leading = 0
        if self.record is not None:
            self.record.began(round_)

    def place(self, *, appends: bool) -> None:
        """Note that the engine names its blocks. ``appends``: to those that it had, which may be others'."""
        if self.is_placed and appends:
            self.no_store = "session"
        else:
            self.renew_blocks()
        self.is_placed = True

    def lose_blocks(self, why: str) -> None:
        """Note that the engine has taken its blocks, and may still offer them as its own."""
        if self.is_placed:
            self.no_store = self.no_store or why

    def renew_blocks(self) -> None:
        """Note that it gets new blocks in place of those that it lost."""
        if self.no_store != "session":
            self.no_store = None

    def mark_absent(self, keys: Collection[OffloadKey], why: str = "") -> None:
        """Answer MISS for keys from now on, with a reason if tiers may have them."""
        self.absent.update(keys)
        if why:
            self.why_absent.update(dict.fromkeys(keys, why))
        self.note_change()

    def note_change(self) -> None:
        """Note that the same lookups may get other answers from now on."""
        self.answers_stand = False
        self.has_news = True

    def forget_locations(self) -> None:
        """Forget which keys are located, or nowhere."""
        self.absent.clear()
        self.why_absent.clear()
        self.located.clear()

    def forget_answers(self) -> None:
        self.hits.clear()
        self.wanted.clear()
        self.forget_locations()
