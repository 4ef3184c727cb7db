"""Generated traces. The same name, seed and number of requests give the same trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

Request = list[int]


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations that each begin with one of several shared heads and grow turn by turn.

    Attributes:
        heads: number of shared heads (system prompts, tools, documents).
        head_chunks: longest head, in chunks; the mean is half of it.
        skew: exponent of the heads' popularity; 0 makes all equally popular.
        turns: mean number of turns.
        turn_chunks: longest turn, in chunks.
        active: number of concurrent conversations, and of requests between two turns of a conversation.
    """

    heads: int = 50
    head_chunks: int = 16
    skew: float = 1.0
    turns: float = 4.0
    turn_chunks: int = 12
    active: int = 400


@dataclass(slots=True)
class Source:
    """Draws the requests of a workload.

    Attributes:
        random: source of all random numbers.
        ids: ids of chunks that no request has used yet.
    """

    workload: Workload
    random: Random
    ids: Iterator[int] = field(default_factory=count)

    def requests(self) -> Iterator[Request]:
        """Yield requests without end."""
        work, random = self.workload, self.random
        heads = [self.new(work.head_chunks) for _ in range(work.heads)]
        weights = [1 / (rank + 1) ** work.skew for rank in range(work.heads)]
        active: list[Request] = []
        while True:
            if len(active) < work.active:
                prompt = list(random.choices(heads, weights)[0])
            else:
                at = random.randrange(len(active))
                active[at], active[-1] = active[-1], active[at]
                prompt = active.pop()
            prompt = prompt + self.new(work.turn_chunks)
            if random.random() > 1 / work.turns:
                active.append(prompt)
            yield prompt

    def new(self, longest: int) -> Request:
        """Return at most ``longest`` new chunks."""
        return [next(self.ids) for _ in range(self.random.randint(1, longest))]


def _heads(source: Source) -> Iterator[Request]:
    return source.requests()


def _scans(source: Source) -> Iterator[Request]:
    """Yield a workload in which every 15th request is a long prompt that never recurs.

    Sometimes 100 of them arrive in a row.
    """
    for prompt in source.requests():
        yield prompt
        burst = source.random.random()
        for _ in range(100 if burst < 0.0005 else burst < 0.06):
            yield source.new(200)


def _loops(source: Source) -> Iterator[Request]:
    """Yield a workload in which half of the requests cycle through a set of documents."""
    documents = [source.new(60) for _ in range(400)]
    for index, prompt in enumerate(source.requests()):
        yield prompt
        yield documents[index % len(documents)] + source.new(3)


def _shifts(source: Source) -> Iterator[Request]:
    """Yield a workload that changes completely every 4,000 requests.

    The heads, their popularity, the turns and the number of conversations change.
    """
    random = source.random
    while True:
        source.workload = replace(
            source.workload,
            heads=random.choice([5, 50, 500]),
            skew=random.choice([0.0, 0.7, 1.2]),
            turns=random.choice([1.2, 3.0, 10.0]),
            active=random.choice([50, 400, 2000]),
        )
        for _, prompt in zip(range(4000), source.requests(), strict=False):
            yield prompt


def _agents(source: Source) -> Iterator[Request]:
    """Yield tool calls: many short turns at short intervals, few agents at a time, and long heads."""
    source.workload = Workload(heads=20, head_chunks=40, turns=15.0, turn_chunks=4, active=40)
    return source.requests()


def _drift(source: Source) -> Iterator[Request]:
    """Yield questions about documents.

    A new one appears every 5 requests and is popular for some hundred requests.
    """
    random, documents = source.random, [source.new(60) for _ in range(200)]
    for index, prompt in enumerate(source.requests()):
        if index % 5 == 0:
            documents.append(source.new(60))
        document = documents[-1 - min(len(documents) - 1, int(random.paretovariate(0.8)))]
        yield document + source.new(4)
        if index % 3 == 0:
            yield prompt


TRACES: dict[str, Callable[[Source], Iterator[Request]]] = {
    "agents": _agents,
    "drift": _drift,
    "heads": _heads,
    "loops": _loops,
    "scans": _scans,
    "shifts": _shifts,
}


def generate(name: str, requests: int, seed: int) -> Iterator[Request]:
    """Yield ``requests`` requests of the trace ``name``."""
    source = Source(Workload(), Random(f"{name} {seed}"))
    for _, prompt in zip(range(requests), TRACES[name](source), strict=False):
        yield prompt
