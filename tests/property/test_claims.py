"""Claims against a plain reference: lists of keys under names, fully scanned in each round."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from random import Random

import pytest

from kvtier._core.claims import AT_ONCE, LEAD_S, MOST_PER_SLOT, REMEMBERED_S
from kvtier._core.messages import Get, GetEnded, Put, Reset
from kvtier._core.requests import Request, Terms
from kvtier._core.states import ChunkState
from kvtier._core.transfers import Reservation
from kvtier.keys import OffloadKey
from kvtier_testing import invariants
from tests.effort import effort
from tests.unit.core import world
from tests.unit.core.world import COPIED, LOCATED, MISSING, keys

SLOTS = 64
PROMPTS = [keys("a", 20), keys("a", 4) + keys("b", 20), keys("slow", 6)]
SLOW = PROMPTS[2]  # requests whose stores take time


@dataclass
class Named:
    """The claims under a name."""

    requests: int = 0
    keys: list[OffloadKey] = field(default_factory=list)
    until_s: float = -inf
    ahead: list[OffloadKey] = field(default_factory=list)
    from_s: float = inf
    over_s: float = inf


class Reference:
    """The meaning of claims."""

    def __init__(self, budget: int, at_once: int) -> None:
        self.budget, self.at_once = budget, at_once
        self.names: dict[str, Named] = {}
        self.pinned: set[OffloadKey] = set()
        self.arriving: list[OffloadKey] = []
        self.counts: Counter[tuple[str, ...]] = Counter()

    @property
    def room(self) -> int:
        return MOST_PER_SLOT * SLOTS - sum(len(it.keys) + len(it.ahead) for it in self.names.values())

    def keep(self, named: Named, chunks: list[OffloadKey]) -> None:
        for key in [key for key in chunks if key not in named.keys]:
            if not self.room:
                self.counts["keep_refused", "names"] += 1
                continue
            named.keys.append(key)
            if key not in self.pinned and key not in self.arriving:
                self.arriving.append(key)

    def drop(self, named: Named, gone: list[OffloadKey]) -> None:
        named.keys = [key for key in named.keys if key not in gone]
        held = {key for it in self.names.values() for key in it.keys}
        self.pinned &= held
        self.arriving = [key for key in self.arriving if key in held]

    def stop(self, named: Named) -> None:
        named.ahead, named.from_s, named.over_s = [], inf, inf

    def pin(self, visible: dict[OffloadKey, bool]) -> None:
        """Pin the arrived chunks; ``visible`` maps each chunk to whether it is READY."""
        for key in [key for key in self.arriving if visible.get(key, True)]:
            if key in visible and len(self.pinned) < self.budget:
                self.pinned.add(key)
                self.arriving.remove(key)
            else:
                self.counts["keep_refused", "budget" if key in visible else "absent"] += 1
                for named in self.names.values():
                    self.drop(named, [key])

    def settle(self, now_s: float, visible: dict[OffloadKey, bool], in_tier: set[OffloadKey]) -> None:
        """End expired claims, promote the due ones, and pin the arrived chunks."""
        due = sorted((it.from_s, name) for name, it in self.names.items() if it.from_s <= now_s)
        for named in self.names.values():
            if named.over_s <= now_s:
                self.counts["keep_refused", "budget"] += len(named.ahead)
                self.stop(named)
            if named.until_s <= now_s:
                self.drop(named, named.keys)
        for _ in range(1 + len(self.arriving)):  # each chunk that does not arrive may free room
            for _, name in due:
                if not self.promote(self.names[name], visible, in_tier):
                    break  # the next ones also wait for room
            self.pin(visible)

    def promote(self, named: Named, visible: dict[OffloadKey, bool], in_tier: set[OffloadKey]) -> bool:
        """Promote the due chunks, as far as there is room; return whether all were promoted."""
        while named.ahead:
            room, taken = max(0, self.budget - len(self.pinned) - len(self.arriving)), list[OffloadKey]()
            for key in named.ahead[: self.at_once]:
                room -= key not in self.pinned
                if room < 0:
                    break
                taken.append(key)
            if not taken:
                return False
            found = [key for key in taken if key in visible or key in in_tier]
            found = found if found == taken else taken[: [key in found for key in taken].index(False)]
            self.pin(visible)
            self.counts["prefetched",] += sum(key not in visible for key in found)
            visible |= dict.fromkeys(found, True)
            named.ahead = named.ahead[len(taken) :] if found == taken else []
            named.until_s = max(named.until_s, named.over_s)
            self.keep(named, found)
            self.pin(visible)
        self.stop(named)
        return True


class World:
    """Requests of a few conversations, whose chunks leave, return and get lost."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        pin_budget, budget = chance.choice((0.0, 0.1, 0.3, 1.0)), chance.choice((0.05, 0.5, 1.0))
        self.core = world.make(SLOTS, 1, budget=budget, pin_budget=pin_budget)
        self.now_s = 0.0
        self.requests: list[Request] = []
        self.used: dict[Request, list[OffloadKey]] = {}
        self.stores: list[Reservation] = []
        self.in_tier: set[OffloadKey] = set()
        self.counts: Counter[tuple[str, ...]] = Counter()
        at_once = max(1, min(AT_ONCE, self.core.holds.budget // 2))
        self.reference = Reference(int(SLOTS * pin_budget), at_once)

    def run(self, steps: int) -> None:
        acts = [self.begin, self.use, self.use, self.use, self.end, self.settle, self.settle, self.evict]
        for _ in range(steps):
            if self.chance.random() < 0.15:
                self.chance.choice((self.release, self.promote, self.store_ends, self.lose, self.reset))()
            else:
                self.chance.choice(acts)()
            self.compare()

    def compare(self) -> None:
        assert self.core.claims.pinned.keys() == self.reference.pinned
        for count, number in self.core.take_counts().items():
            if number and count[0] in ("keep_refused", "prefetched"):
                self.counts[count] += int(number)
        assert self.counts == +self.reference.counts
        names = self.reference.names
        for name in [name for name, it in names.items() if not (it.keys or it.ahead or it.requests)]:
            del names[name]
        assert self.core.claims.is_empty is not bool(names)
        invariants.check(self.core)

    @property
    def _visible(self) -> dict[OffloadKey, bool]:
        return {key: it.state is ChunkState.READY for key, it in self.core.table.visible.items()}

    def _named(self, name: str) -> Named:
        return self.reference.names.setdefault(name, Named())

    # --- requests --------------------------------------------------------------------------------

    def begin(self) -> None:
        if len(self.requests) > 3:
            return
        terms = Terms(
            self.chance.choice("abc"),
            self.chance.choice((0.0, 5.0, 50.0)),
            self.chance.choice((0.0, 4.0, 40.0, inf)),
            self.chance.choice(((), (), (), ("a",), ("a", "b"))),
        )
        self.requests.append(Request())
        self.core.claims.start_request(self.requests[-1], terms)
        named = self._named(terms.name)
        self.reference.stop(named)
        if terms.kept_s:
            named.requests, named.until_s = named.requests + 1, inf

    def use(self) -> None:
        """Load chunks of a prompt for a request, or offer them for a store."""
        if not self.requests:
            return
        request, prompt = self.chance.choice(self.requests), self.chance.choice(PROMPTS)
        terms, is_load, chunks = (
            request.terms,
            self.chance.random() < 0.3,
            prompt[: self.chance.randint(1, 24)],
        )
        assert terms is not None
        if prompt is SLOW and terms.next_use_s:
            return
        if is_load:
            chunks = [key for key in chunks if self._visible.get(key)]
            self.core.release(self.core.acquire(chunks, request))
        else:
            self.stores.append(world.reserve(self.core, chunks, request))
            if prompt is not SLOW:
                self.core.commit(self.stores.pop(), self.now_s)
        if terms.kept_s:
            self.reference.keep(self._named(terms.name), chunks)
        used = self.used.setdefault(request, [])
        used[:] = [key for key in used if is_load or key not in chunks]
        used += [key for key in chunks if key not in used]

    def end(self) -> None:
        if not self.requests:
            return
        request = self.requests.pop(self.chance.randrange(len(self.requests)))
        terms = request.terms
        assert terms is not None
        self.core.close(request, self.now_s)
        for name in terms.releases:
            self._released(name)
        named = self._named(terms.name)
        if terms.kept_s:
            named.requests -= 1
            named.until_s = inf if named.requests else self.now_s + terms.kept_s
        if after_s := terms.next_use_s:
            kept = [*named.keys] if after_s == inf else []
            named.ahead = [*dict.fromkeys(kept + self.used.pop(request, []))]
            named.over_s = self.now_s + min(2 * after_s, REMEMBERED_S)
            named.from_s = self.now_s + max(after_s / 2, after_s - LEAD_S)
            self.reference.drop(named, kept)

    def release(self) -> None:
        name = self.chance.choice("abc")
        self.core.claims.release(name)
        self._released(name)

    def promote(self) -> None:
        name, kept_s = self.chance.choice("abc"), self.chance.choice((3.0, 30.0))
        is_known = self.core.claims.promote(name, kept_s, self.now_s, None)
        named = self.reference.names.get(name, Named())
        assert is_known is bool(named.keys or named.ahead or named.requests)
        if named.ahead:
            named.from_s, named.over_s = min(named.from_s, self.now_s), self.now_s + kept_s
        if named.keys:
            named.until_s = max(named.until_s, self.now_s + kept_s)

    def _released(self, name: str) -> None:
        named = self.reference.names.get(name, Named())
        self.reference.stop(named)
        self.reference.drop(named, named.keys)

    # --- tiers and engine ------------------------------------------------------------------------

    def settle(self) -> None:
        self.now_s += self.chance.choice((0.0, 1.0, 5.0, 30.0))
        self._carry_out()
        visible = self._visible
        due = [len(it.ahead) for it in self.reference.names.values() if it.from_s <= self.now_s]
        for _ in range(1 + 4 * sum(due)):  # at most as many rounds as promotions need
            self.core.settle(self.now_s)
            self._carry_out()
        self.reference.settle(self.now_s, visible, self.in_tier)

    def _carry_out(self) -> bool:
        """Execute the commands; return whether there were any."""
        commands = world.taken(self.core)
        for command in commands:
            if isinstance(command, Put):
                self.in_tier.update(command.keys)
                world.put_ends(self.core, command, now_s=self.now_s)
            elif isinstance(command, Get):
                answers = [LOCATED if key in self.in_tier else MISSING for key in command.keys]
                front = min(len(command.slots), [*answers, MISSING].index(MISSING))
                answers[:front] = [COPIED] * front
                self.core.on_event(GetEnded(command.id, answers, {}, 0.0, world.GOOD), self.now_s)
            elif isinstance(command, Reset):
                self.in_tier.clear()
        return bool(commands)

    def store_ends(self) -> None:
        if self.stores:
            store = self.stores.pop()
            self.core.commit(store, self.now_s) if self.chance.random() < 0.7 else self.core.abort(store)

    def evict(self) -> None:
        self._carry_out()
        self.core.shared.evict(self.chance.choice((1, 10, SLOTS)))

    def lose(self) -> None:
        """Fail a load, which drops its chunks."""
        lost = [key for key in self.chance.choice(PROMPTS)[:4] if self._visible.get(key)]
        self.core.fail_load(self.core.acquire(lost))
        for named in self.reference.names.values():
            self.reference.drop(named, [key for key in lost if key in self.reference.pinned])

    def reset(self) -> None:
        if self.chance.random() < 0.3:
            self.core.reset()
            for name in self.reference.names:
                self._released(name)


@pytest.mark.timeout(400)
def test_claims_agree_with_reference() -> None:
    for seed in range(effort(150, 3000)):
        World(Random(seed)).run(60)
