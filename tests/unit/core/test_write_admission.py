"""Write policies: put every chunk, or only chunks requested more than once."""

from __future__ import annotations

from random import Random

import pytest

from kvtier._core.chunks import Chunk
from kvtier._core.messages import Get, GetEnded, Put, PutEnded
from kvtier._core.requests import Request
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._core.tiers.write_admission import WriteAdmission, WritePolicy
from kvtier.keys import OffloadKey, pack_key
from tests.unit.core import world
from tests.unit.core.world import COPIED, GOOD, LOCATED, MISSING, keys


def core_with(policy: WritePolicy, *, slots: int = 16, **limits: float) -> Tiering:
    return world.make(slots, [TierStatus("t0", 3.0, writes=WriteAdmission(policy, **limits))])  # type: ignore[arg-type]


def put_keys(core: Tiering) -> list[OffloadKey]:
    """Take the core's commands, and return what is put now."""
    return [key for command in world.taken(core) if isinstance(command, Put) for key in command.keys]


def evict_all(core: Tiering) -> None:
    """Fill the primary tier with other chunks, and empty it of those."""
    world.store(core, keys("other", len(core.table.all)))


class TestReused:
    def test_second_computing_puts(self):
        core = core_with("reused")
        assert world.puts(core, keys("a", 3)) == []
        assert core.take_counts()["put_dropped", "t0", "not_reused"] == 3
        evict_all(core)
        (put,) = world.puts(core, keys("a", 4))
        assert put.keys == keys("a", 3)

    def test_load_puts(self):
        core = core_with("reused")
        world.store(core, keys("a", 3))
        request = Request()
        world.ask(core, request, keys("a", 2))
        core.release(core.acquire(keys("a", 2), request))
        core.settle(0.0)
        assert put_keys(core) == keys("a", 2)

    def test_second_offer_puts(self):
        core = core_with("reused")
        world.store(core, keys("a", 3))
        core.abort(world.reserve(core, keys("a", 2)))
        core.settle(0.0)
        assert put_keys(core) == keys("a", 2)
        core.abort(world.reserve(core, keys("a", 2)))
        core.settle(0.0)
        assert put_keys(core) == [], "they have been put"

    def test_next_use_puts_unroomed(self):
        core = core_with("reused")
        world.store(core, keys("a", 1))
        core.shared.tiers[0].down = "gone"
        core.abort(world.reserve(core, keys("a", 1)))
        core.settle(0.0)
        assert put_keys(core) == []
        core.shared.tiers[0].down = None
        core.abort(world.reserve(core, keys("a", 1)))
        core.settle(0.0)
        assert put_keys(core) == keys("a", 1)

    def test_later_tiers_chunks_are_put(self):
        statuses = [TierStatus("near", 3.0, writes=WriteAdmission("reused")), TierStatus("far", 3.0)]
        core = world.make(16, statuses)
        request = Request()
        (near,) = world.step(core, request, keys("a", 2))
        (far,) = world.answer(core, near, [MISSING] * 2)
        core.on_event(GetEnded(far.id, [COPIED] * 2, {}, 0.0, GOOD), 0.0)
        (put,) = [command for command in world.taken(core) if isinstance(command, Put)]
        assert (put.tier, list(put.keys)) == (0, keys("a", 2))

    def test_memory_is_bounded(self):
        core = core_with("reused", remembered=4)
        for index in range(10):
            world.store(core, keys(f"{index}/", 16))
        assert len(core.shared.tiers[0].writes.skipped) == 2 * 16, "twice what the primary tier holds"

    def test_failed_put_is_repeated(self):
        core = core_with("reused")
        world.store(core, keys("a", 1))
        core.abort(world.reserve(core, keys("a", 1)))
        core.settle(0.0)
        (put,) = [command for command in world.taken(core) if isinstance(command, Put)]
        world.put_ends(core, put, [False])
        core.abort(world.reserve(core, keys("a", 1)))
        core.settle(0.0)
        assert put_keys(core) == keys("a", 1)

    def test_offer_during_copy_counts(self):
        core = core_with("reused")
        first = world.reserve(core, keys("a", 2))
        core.abort(world.reserve(core, keys("a", 2)))
        core.settle(0.0)
        core.commit(first, 0.0)
        core.settle(0.0)
        assert put_keys(core) == keys("a", 2)

    def test_down_tier_is_not_counted(self):
        core = core_with("reused")
        world.store(core, keys("a", 4))
        core.shared.tiers[0].down = "gone"
        for _ in range(10):
            core.abort(world.reserve(core, keys("a", 4)))
            core.settle(0.0)
        assert ("put_dropped", "t0", "down") not in core.take_counts()


class Engine:
    """Requests over a core whose tier keeps all that it is given, in virtual time.

    Attributes:
        written: chunks put.
        hits: chunks loaded.
    """

    def __init__(self, policy: WritePolicy) -> None:
        self.core = core_with(policy, slots=256)
        self.stored: set[OffloadKey] = set()
        self.written = self.hits = 0
        self.now_s = 0.0

    def serve(self, chunks: list[OffloadKey]) -> None:
        """Load the chunks that hit; compute and store the rest."""
        core, request = self.core, Request()
        self.now_s += 1.0
        world.ask(core, request, chunks)
        core.settle(self.now_s)
        self._carry_out()
        found = sum(1 for answer in world.ask(core, request, chunks) if answer is world.HIT)
        core.settle(self.now_s)
        core.release(core.acquire(chunks[:found], request))
        core.close(request)
        if reservation := core.reserve(chunks):
            core.commit(reservation, self.now_s)
        core.settle(self.now_s)
        self._carry_out()
        self.hits += found

    def _carry_out(self) -> None:
        while commands := self.core.take_commands():
            for command in commands:
                if isinstance(command, Put):
                    self.stored.update(command.keys)
                    self.written += len(command.keys)
                    self.core.on_event(
                        PutEnded(command.id, [True] * len(command.keys), {}, 0.0, GOOD), self.now_s
                    )
                elif isinstance(command, Get):
                    there = [COPIED] * len(command.slots) + [LOCATED] * len(command.keys)
                    answers = [
                        answer if key in self.stored else MISSING
                        for key, answer in zip(command.keys, there, strict=False)
                    ]
                    self.core.on_event(GetEnded(command.id, answers, {}, 0.0, GOOD), self.now_s)


def prompt(name: int) -> list[OffloadKey]:
    return [pack_key(f"{name}/".encode() + bytes([index, (index + name) % 256])) for index in range(16)]


def test_adaptive_puts_under_a_tenth():
    engine = Engine("adaptive")
    for name in range(600):
        engine.serve(prompt(name))
    before = engine.written
    for name in range(600, 1600):
        engine.serve(prompt(name))
    assert 0 < engine.written - before < 0.1 * 16_000
    assert engine.hits == 0


def test_adaptive_keeps_hits():
    all_of_it, adaptive = Engine("all"), Engine("adaptive")
    for engine in (all_of_it, adaptive):
        chance = Random(1)
        for name in range(2500):
            is_new = name < 100 or chance.random() > 0.3
            engine.serve(prompt(name if is_new else chance.randrange(name - 90, name - 20)))
    assert all_of_it.hits > 5000
    assert adaptive.hits >= 0.98 * all_of_it.hits


def test_returning_reuse_puts_all():
    engine = Engine("adaptive")
    for name in range(1000):
        engine.serve(prompt(name))
    assert not engine.core.shared.tiers[0].writes.pays
    for name in range(1000, 1800):
        engine.serve(prompt(name - 21 * (name % 2)))  # every other one was asked before
    assert engine.core.shared.tiers[0].writes.pays


@pytest.mark.parametrize("size", [32, 500, 4096])
def test_sampling_ignores_offer_size(size):
    writes = WriteAdmission("adaptive")
    writes.pays, put = False, 0
    for index in range(200_000 // size):
        chunks = [Chunk(0, key) for key in keys(f"{index}/", size)]
        put += len(writes.choose(chunks, 0.0, reused=False)[0])
    assert 0.5 / 16 <= put / 200_000 <= 1.1 / 16


class TestBudget:
    def chunks(self, name: str, count: int) -> list[Chunk]:
        return [Chunk(0, key) for key in keys(name, count)]

    def put(self, writes: WriteAdmission, chunks: list[Chunk], now_s: float) -> int:
        chosen, _ = writes.choose(chunks, now_s, reused=False)
        writes.note_put([chunk.key for chunk in chosen])
        return len(chosen)

    def test_daily_budget_allows_one_burst(self):
        writes, put = WriteAdmission("all", chunks_per_day=2400), 0
        for hour in range(24):
            put += self.put(writes, self.chunks(f"{hour}/", 500), hour * 3600.0)
        assert 1200 <= put <= 2400
        assert writes.choose(self.chunks("late", 500), 86_399.0, reused=True)[1]["write_budget"] >= 400

    def test_half_is_kept_for_reuse(self):
        writes = WriteAdmission("all", chunks_per_day=2400)
        assert self.put(writes, self.chunks("a", 500), 0.0) == 50
        assert self.put(writes, self.chunks("a", 500), 0.0) == 50, "those that were skipped come first"
        assert self.put(writes, self.chunks("b", 30), 0.0) == 0
        assert self.put(writes, self.chunks("c", 30), 3600.0) == 30, "an hour later there is more"

    def test_small_budget_is_not_zero(self):
        writes, put = WriteAdmission("all", chunks_per_day=12), 0
        for hour in range(1, 49):
            put += self.put(writes, self.chunks(f"{hour}/", 5), hour * 3600.0)
        assert put == 24

    def test_skips_have_own_reason(self):
        writes = WriteAdmission("reused", chunks_per_day=2400)
        chosen, why = writes.choose(self.chunks("a", 200), 0.0, reused=False)
        assert (chosen, why) == ([], {"not_reused": 200, "write_budget": 0})
        chosen, why = writes.choose([*self.chunks("a", 150), *self.chunks("b", 50)], 0.0, reused=False)
        assert (len(chosen), why) == (100, {"not_reused": 50, "write_budget": 50})


@pytest.mark.parametrize(("policy", "gets"), [("all", 0), ("all", 1), ("adaptive", 0)])
def test_write_only_tier_named_once(policy, gets):
    core = core_with(policy, slots=256)
    writes = core.shared.tiers[0].writes
    writes.note_loaded(keys("got", gets))
    for index in range(100):
        world.store(core, keys(f"{index}/", 100))
    notices = [notice for notice in core.take_notices() if "this engine got none" in notice.text]
    assert len(notices) == (policy == "all" and not gets)
