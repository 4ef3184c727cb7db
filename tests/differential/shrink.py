"""Reduces a failing life: fewer requests, fewer features, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tests.differential.lives import Ask, Case, Life, Piece, Round

_REQUIRED = ("name", "pieces", "asks")


def shrink(life: Life, fails: Callable[[Life], bool], may_go_on: Callable[[], bool]) -> Life:
    """Return the smallest failing life found within the time."""
    tried = set()
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(life):
            if not may_go_on():
                return life
            if repr(candidate) in tried:
                continue
            tried.add(repr(candidate))
            if fails(candidate):
                life, is_smaller = candidate, True
                break
    return life


def smaller(life: Life) -> Iterator[Life]:
    """Yield smaller lives, the smallest first."""
    rounds = life.rounds
    width = len(rounds) // 2
    while width:
        for place in range(0, len(rounds), width):
            yield _without(life, rounds[:place] + rounds[place + width :])
        width //= 2
    if life.probe is not None:
        yield replace(life, probe=None)
    for place, each in enumerate(rounds):
        for less in _smaller_round(each):
            yield _without(life, (*rounds[:place], less, *rounds[place + 1 :]))
    for case in _smaller_case(life.case):
        yield replace(life, case=case)


def _smaller_round(each: Round) -> Iterator[Round]:
    for place, ask in enumerate(each.asks):
        if len(each.asks) > 1:
            yield replace(each, asks=each.asks[:place] + each.asks[place + 1 :])
        for less in _by_default(ask, keep=("name", "pieces", "after", "keep")):
            yield replace(each, asks=(*each.asks[:place], less, *each.asks[place + 1 :]))
        for number in range(len(ask.more)):
            more = ask.more[:number] + ask.more[number + 1 :]
            yield replace(each, asks=(*each.asks[:place], replace(ask, more=more), *each.asks[place + 1 :]))
    yield from _by_default(each, keep=("asks",))


def _smaller_case(case: Case) -> Iterator[Case]:
    yield from _by_default(case, keep=("model", "host_chunks", "arguments", "settings"))
    for key in case.settings:
        yield replace(case, settings=_less(case.settings, key))
    for key in case.arguments:
        yield replace(case, arguments=_less(case.arguments, key))
    for place in range(len(case.tiers)):
        yield replace(case, tiers=case.tiers[:place] + case.tiers[place + 1 :])


def _less(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {other: value for other, value in settings.items() if other != key}


def _by_default(value: Any, keep: tuple[str, ...]) -> Iterator[Any]:
    plain = type(value)(**{name: getattr(value, name) for name in keep})
    for each in fields(value):
        if each.name not in keep and getattr(value, each.name) != getattr(plain, each.name):
            yield replace(value, **{each.name: getattr(plain, each.name)})


def _without(life: Life, rounds: tuple[Round, ...]) -> Life:
    """Return a life of these rounds; a request that continued a removed one continues its prompt."""
    left = {ask.name for each in rounds for ask in each.asks}
    gone = {ask.name: ask for each in life.rounds for ask in each.asks if ask.name not in left}

    def repaired(ask: Ask) -> Ask:
        while ask.after in gone:
            before = gone[ask.after]
            pieces = before.pieces if ask.keep is None else cut(before.pieces, ask.keep)
            ask = replace(ask, after=before.after, keep=before.keep, pieces=pieces + ask.pieces)
        return ask

    mended = (replace(each, asks=tuple(map(repaired, each.asks))) for each in rounds)
    return replace(life, rounds=tuple(mended))


def cut(pieces: Sequence[Piece], most: int) -> tuple[Piece, ...]:
    """Return the pieces at the beginning of a text."""
    kept = []
    for seed, tokens in pieces:
        if most > 0:
            kept.append((seed, min(tokens, most)))
        most -= tokens
    return tuple(kept)


def without(life: Life, names: Collection[str]) -> Life:
    """Return a life whose requests, rounds and case have default values in these fields."""

    def plain(value: Any) -> Any:
        by_default = type(value)(**{each: getattr(value, each) for each in _REQUIRED if hasattr(value, each)})
        own = [each.name for each in fields(value) if each.name in names]
        return replace(value, **{name: getattr(by_default, name) for name in own})

    rounds = (replace(plain(each), asks=tuple(map(plain, each.asks))) for each in life.rounds)
    return replace(life, case=plain(life.case), rounds=tuple(rounds))
