"""A core with a test in the place of its engine and its tiers."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier._core.limits import Limits
from kvtier._core.messages import (
    Answer,
    Command,
    Get,
    GetEnded,
    Put,
    PutEnded,
    Reset,
    SlotsReady,
    TransferHealth,
)
from kvtier._core.requests import Request
from kvtier._core.states import Lookup
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._core.transfers import Reservation
from kvtier.keys import OffloadKey, pack_key
from kvtier.policies import LRU, EvictionPolicy
from kvtier_testing import invariants

HIT, MISS, PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.PENDING, Lookup.RETRY
COPIED, LOCATED, MISSING = Answer.COPIED, Answer.LOCATED, Answer.MISSING
NONE, GOOD, BAD, LATE = TransferHealth.NONE, TransferHealth.GOOD, TransferHealth.BAD, TransferHealth.LATE


class CountedKey(bytes):
    """A key that counts how often keys are examined."""

    hashed = 0

    def __hash__(self) -> int:
        CountedKey.hashed += 1
        return super().__hash__()


def keys(name: str, count: int = 1, group: int = 0) -> list[OffloadKey]:
    """Return the keys of a prompt's chunks."""
    return [pack_key(f"{name}{index}".encode(), group) for index in range(count)]


def make(
    slots: int = 16,
    tiers: int | Sequence[TierStatus] = 1,
    policy: EvictionPolicy | None = None,
    *,
    reserve: float = 0.0,
    budget: float = 0.5,
    windowed: frozenset[int] = frozenset(),
    **limits: float,
) -> Tiering:
    """Return a core whose slots are ready."""
    statuses = [TierStatus(f"t{index}", 3.0) for index in range(tiers)] if isinstance(tiers, int) else tiers
    given = Limits(promotion_reserve=reserve, promotion_budget=budget, **limits)  # type: ignore[arg-type]
    core = Tiering(
        LRU() if policy is None else policy, statuses, given, windowed_groups=windowed, track_kv_events=True
    )
    core.on_event(SlotsReady(range(slots)), 0.0)
    return core


def reserve(core: Tiering, chunks: Sequence[OffloadKey], request: Request | None = None) -> Reservation:
    """Reserve slots; there are some."""
    reservation = core.reserve(chunks, request)
    assert reservation is not None
    return reservation


def puts(core: Tiering, chunks: Sequence[OffloadKey], now_s: float = 0.0) -> list[Put]:
    """Store chunks; return the puts that follow."""
    core.commit(reserve(core, chunks), now_s)
    commands = taken(core)
    return [command for command in commands if isinstance(command, Put)]


def store(core: Tiering, chunks: Sequence[OffloadKey]) -> None:
    """Store chunks; the tiers' puts end at once."""
    for command in puts(core, chunks):
        put_ends(core, command)


def put_ends(
    core: Tiering,
    command: Put,
    kept: Sequence[bool] | None = None,
    now_s: float = 0.0,
    *,
    health: TransferHealth = GOOD,
    seconds: float = 0.0,
    **reasons: int,
) -> None:
    """End a put; by default all of it is kept."""
    kept = [True] * len(command.keys) if kept is None else kept
    core.on_event(PutEnded(command.id, kept, reasons, seconds, health), now_s)
    invariants.check(core)


def ask(core: Tiering, request: Request, chunks: Sequence[OffloadKey]) -> list[Lookup]:
    """Look chunks up as an engine does: the first miss ends the scan."""
    answers: list[Lookup] = []
    for key in chunks:
        answers.append(core.lookup(key, request))
        if answers[-1] is MISS:
            break
    return answers


def there(core: Tiering, chunks: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Return which chunks are in the primary tier."""
    probe = Request()
    found = [key for key in chunks if core.lookup(key, probe) is HIT]
    core.close(probe)
    return found


def taken(core: Tiering) -> list[Command]:
    """Take the core's commands; its state is consistent."""
    invariants.check(core)
    return core.take_commands()


def fetches(core: Tiering) -> list[Get]:
    """Take the core's commands; return the fetches among them."""
    commands = taken(core)
    assert not any(isinstance(command, Reset) for command in commands)
    return [command for command in commands if isinstance(command, Get)]


def step(core: Tiering, request: Request, chunks: Sequence[OffloadKey], now_s: float = 0.0) -> list[Get]:
    """Ask one round of questions; return the fetches that came of it."""
    ask(core, request, chunks)
    core.settle(now_s)
    return fetches(core)


def answer(
    core: Tiering,
    fetch: Get,
    answers: Sequence[Answer],
    now_s: float = 0.0,
    *,
    health: TransferHealth = NONE,
    seconds: float = 0.0,
    **reasons: int,
) -> list[Get]:
    """End a fetch; return the fetches that follow."""
    core.on_event(GetEnded(fetch.id, answers, reasons, seconds, health), now_s)
    return fetches(core)


def answered(fetch: Get) -> GetEnded:
    """Return the event that all of a get has arrived, as far as there were slots."""
    answers = [COPIED] * len(fetch.slots) + [LOCATED] * (len(fetch.keys) - len(fetch.slots))
    return GetEnded(fetch.id, answers, {}, 0.0, GOOD)


def ask_all(core: Tiering, request: Request, chunks: Sequence[OffloadKey]) -> list[Lookup]:
    """Look all chunks up, misses or not."""
    return [core.lookup(key, request) for key in chunks]
