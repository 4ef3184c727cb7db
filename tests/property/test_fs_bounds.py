"""The bounds of a root with several writers that die, a lost ledger, and concurrent counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._maintenance.ages import (
    BUCKETS,
    CLASSES,
    UNIT_US,
    bucket_of,
    new_histogram,
    new_model,
    plan,
    worth_of,
    youngest_of,
)
from kvtier.tiers.fs._quota import quota
from kvtier.tiers.fs._quota.accounts import Accounts, FileSystem
from kvtier.tiers.fs._quota.ledger import Ledger as OneProcessLedger
from kvtier.tiers.fs._quota.ledger import _encode, parse
from kvtier.tiers.fs._quota.quota import Quota
from tests.effort import effort

UNIT = 100
TOTAL = 20_000
LIMIT = 6_000
MIN_FREE = 3_000
shares = st.floats(0, 1)


class Machine:
    """A disk, and a ledger on it."""

    def __init__(self) -> None:
        self.root_bytes = 0
        self.foreign_bytes = 0
        self.living: set[str] = set()
        self.lost = 0
        self.accounts: Accounts | None = None
        self.write_fails = False
        self.quota = TOTAL  # of the file system, and invisible
        self.meanwhile: Callable[[], None] | None = None
        self.is_asked = False

    def look(self) -> FileSystem:
        used = self.root_bytes + self.foreign_bytes
        self.interrupt()
        return FileSystem(TOTAL, used, TOTAL - used)

    def interrupt(self) -> None:
        """Run an action of other threads while this one waits for an answer."""
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            self.is_asked = True
            meanwhile()
            self.is_asked = False


class Ledger(OneProcessLedger):
    """One writer's view of the ledger; each change is encoded and decoded."""

    def __init__(self, machine: Machine, writer: str) -> None:
        self.stat = machine.look
        self.writer = writer
        self._machine = machine

    @contextmanager
    def change(self) -> Iterator[Accounts]:
        machine = self._machine
        if machine.accounts is None:
            machine.accounts = Accounts(machine.root_bytes + machine.foreign_bytes)
        accounts = parse(_encode(machine.accounts))
        assert accounts is not None
        yield accounts
        machine.interrupt()
        if machine.write_fails:
            machine.write_fails = False
            raise OSError("the ledger cannot be written")
        machine.accounts = accounts

    def expire_dead_leases(self, accounts: Accounts) -> None:
        accounts.expire_leases(set(accounts.leases) - self._machine.living)


class Writer:
    def __init__(self, machine: Machine, number: int) -> None:
        self.name = f"w{number}"
        self.machine = machine
        machine.living.add(self.name)
        config = FsConfig.model_validate(
            {"root_dir": "/nowhere", "max_bytes": LIMIT, "min_free_bytes": MIN_FREE}
        )
        self.quota = Quota(config, UNIT, Ledger(machine, self.name))
        self.reserved: list[int] = []

    def end_a_put(self, share: float) -> None:
        if self.reserved:
            granted = self.reserved.pop()
            wanted = int(granted * UNIT * share)
            added = min(wanted, max(0, self.machine.quota - self.machine.root_bytes))
            self.machine.root_bytes += added
            self.quota.end_reservation(granted, added)
            if added < wanted and not self.machine.is_asked:  # otherwise another thread waits for the ledger
                self.refused(wanted)

    def refused(self, wanted: int) -> None:
        """Check that the limit stays at or above the root's contents, and that a batch gets room."""
        machine = self.machine
        self.quota._bounds._moved_s = -inf  # later
        self.quota.lower_limit()
        hidden = self.quota._bounds.hidden
        if hidden is not None and machine.accounts is not None:
            assert hidden + machine.lost + wanted >= min(machine.quota, machine.root_bytes)
            is_known = machine.accounts.used >= UNIT and not machine.accounts.unconfirmed
            if is_known and self.quota.accounts.leased + self.quota.accounts.used >= hidden:
                assert self.quota.excess > 0


@dataclass
class Removal:
    """A writer's long removal: bytes removed, periodically reported, and not yet reported."""

    writer: Writer
    since: str
    nbytes: int = 0

    def remove(self, share: float) -> None:
        removed = int(self.writer.machine.root_bytes * share)
        self.writer.machine.root_bytes -= removed
        self.nbytes += removed

    def tell(self) -> None:
        nbytes, self.nbytes = self.nbytes, 0
        with suppress(OSError):
            self.since = self.writer.quota.removed(nbytes, self.since)


class BoundsMachine(RuleBasedStateMachine):
    """The truth is the bytes below the root. They must never pass the bound, whatever the ledger knows."""

    @initialize(held=st.integers(0, 4_000), foreign=st.integers(0, 9_000), counted=st.booleans())
    def start(self, held: int, foreign: int, counted: bool) -> None:
        self.machine = Machine()
        self.machine.root_bytes, self.machine.foreign_bytes = held, foreign
        self.started = 0
        self.writers: list[Writer] = []
        self.removals: list[Removal] = []
        self.slack = max(0, foreign + held - (TOTAL - MIN_FREE))
        self.lost = 0  # bytes that live writers had leased from lost ledgers
        self.open_writer()
        self.open_writer()
        if counted:
            self.writers[0].quota.count(lambda: held)

    @precondition(lambda self: len(self.writers) < 4)
    @rule()
    def open_writer(self) -> None:
        self.machine.write_fails = False
        self.machine.meanwhile = None
        self.started += 1
        self.writers.append(Writer(self.machine, self.started))

    def pick(self, which: int) -> Writer:
        return self.writers[which % len(self.writers)]

    @rule(which=st.integers(0, 3), chunks=st.integers(1, 50))
    def reserve(self, which: int, chunks: int) -> None:
        writer = self.pick(which)
        with suppress(OSError):
            is_ahead = writer.quota.reserve_ahead(chunks)
            granted = chunks if is_ahead else writer.quota.reserve(chunks)[0]
            assert 0 <= granted <= chunks
            if granted:
                writer.reserved.append(granted)

    @rule(which=st.integers(0, 3), share=shares)
    def a_put_ends_while_the_ledger_is_asked(self, which: int, share: float) -> None:
        writer = self.pick(which)
        self.machine.meanwhile = lambda: writer.end_a_put(share) if writer in self.writers else None

    @rule()
    def the_next_write_of_the_ledger_fails(self) -> None:
        self.machine.write_fails = True

    @rule(which=st.integers(0, 3), share=shares, is_reported=st.booleans())
    def end_a_put(self, which: int, share: float, is_reported: bool) -> None:
        writer = self.pick(which)
        writer.end_a_put(share)
        if is_reported:
            with suppress(OSError):
                writer.quota.flush()

    @precondition(lambda self: len(self.writers) > 1)
    @rule(which=st.integers(0, 3), share=shares)
    def die(self, which: int, share: float) -> None:
        """Kill a writer in the middle of its writes."""
        writer = self.pick(which)
        self.writers.remove(writer)
        self.removals = [removal for removal in self.removals if removal.writer is not writer]
        self.machine.living.discard(writer.name)
        self.machine.root_bytes += int(sum(writer.reserved) * UNIT * share)

    @rule(which=st.integers(0, 3))
    def refresh(self, which: int) -> None:
        with suppress(OSError):
            self.pick(which).quota.refresh()

    @rule(which=st.integers(0, 3))
    def begin_to_remove(self, which: int) -> None:
        writer = self.pick(which)
        self.removals.append(Removal(writer, writer.quota.mark()))

    @precondition(lambda self: self.removals)
    @rule(which=st.integers(0, 9), share=shares, is_told=st.booleans())
    def remove_some(self, which: int, share: float, is_told: bool) -> None:
        removal = self.removals[which % len(self.removals)]
        removal.remove(share)
        if is_told:
            removal.tell()

    @rule(which=st.integers(0, 3), other=st.integers(0, 3), before=shares, after=shares)
    def remove_over_a_count(self, which: int, other: int, before: float, after: float) -> None:
        """Run a whole count between a removal and its report."""
        removal = Removal(self.pick(which), self.pick(which).quota.mark())
        removal.remove(before)
        with suppress(OSError):
            self.pick(other).quota.count(lambda: self.machine.root_bytes)
        removal.remove(after)
        removal.tell()

    @rule(share=shares)
    def somebody_removes(self, share: float) -> None:
        self.machine.root_bytes -= int(self.machine.root_bytes * share)

    @rule(which=st.integers(0, 3), other=st.integers(0, 3), share=shares, seen=shares, missed=shares)
    def count(self, which: int, other: int, share: float, seen: float, missed: float) -> None:
        """Write and remove chunks while the root is counted."""
        machine, busy = self.machine, self.pick(other)

        def add_up() -> int:
            machine.write_fails, machine.meanwhile = False, None
            before = machine.root_bytes
            granted, _ = busy.quota.reserve(5)
            added = int(granted * UNIT * share)
            machine.root_bytes += added
            busy.quota.end_reservation(granted, added)
            removal = Removal(busy, busy.quota.mark())
            removed = int(before * share / 2)
            removal.nbytes = removed
            machine.root_bytes -= removed
            removal.tell()
            return before + int(added * seen) - int(removed * missed)

        with suppress(OSError):
            self.pick(which).quota.count(add_up)

    @rule(share=shares)
    def a_quota_begins_to_hold(self, share: float) -> None:
        """Set a quota at or below the root's contents, so that each write is refused."""
        self.machine.quota = int(self.machine.root_bytes * (0.5 + share))

    @rule(which=st.integers(0, 3))
    def a_doubted_ledger_is_right_after_a_count(self, which: int) -> None:
        """Check that a count without failures is exact, regardless of removals and losses."""
        writer, machine = self.pick(which), self.machine
        machine.write_fails, machine.meanwhile = False, None
        writer.quota.refresh()
        writer.quota.doubt()
        assert writer.quota.count_is_due(1e9)
        for other in self.writers:
            other.quota.flush()
        writer.quota.count(lambda: machine.root_bytes)
        accounts = machine.accounts
        assert accounts is not None
        assert not writer.quota.count_is_due(1e9) or accounts.unconfirmed
        assert machine.root_bytes <= accounts.used + self.lost
        assert accounts.used <= machine.root_bytes + accounts.unconfirmed

    @rule()
    def lose_the_ledger(self) -> None:
        """Lose the ledger: writers spend its leases in addition to the new one's until they ask again."""
        if self.machine.accounts is not None:
            leases = self.machine.accounts.leases
            self.lost += sum(leases.get(writer.name, 0) for writer in self.writers)
            self.machine.lost = self.lost
            self.machine.accounts = None

    @invariant()
    def the_bounds_hold(self) -> None:
        if not hasattr(self, "machine"):
            return
        machine = self.machine
        assert machine.root_bytes <= LIMIT + self.lost
        used = machine.root_bytes + machine.foreign_bytes
        assert TOTAL - used >= MIN_FREE - self.slack - self.lost

    @invariant()
    def what_is_charged_is_never_too_little(self) -> None:
        if hasattr(self, "machine") and self.machine.accounts is not None:
            accounts = self.machine.accounts
            assert accounts.used + accounts.leased + self.lost >= self.machine.root_bytes


@pytest.mark.timeout(300)
def test_writers_respect_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "_AHEAD_SHARE", 4)  # leases ahead need a larger share of this small root
    machine = BoundsMachine
    machine.TestCase.settings = settings(max_examples=effort(12, 150), stateful_step_count=40, deadline=None)
    machine.TestCase("runTest").debug()


# --------------------------------------------------------------------------------- the ledger's text


@given(st.binary(max_size=300))
def test_non_ledger_is_refused(text: bytes) -> None:
    assert parse(text) is None


@given(
    st.builds(
        Accounts,
        used=st.integers(0, 10**14),
        boot=st.text(max_size=8),
        is_exact=st.booleans(),
        added=st.integers(0, 10**18 - 1),
        removed=st.integers(0, 10**18 - 1),
        leases=st.dictionaries(st.text(max_size=8), st.integers(0, 2**40), max_size=200),
        unconfirmed=st.integers(0, 10**15 - 1),
    ),
    st.integers(0),
    st.integers(0, 255),
)
def test_ledger_shows_damage(accounts: Accounts, where: int, value: int) -> None:
    text = _encode(accounts)
    assert parse(text) == accounts
    damaged = bytearray(text)
    end = text.index(b"\n")
    damaged[where % end] = value
    assert parse(bytes(damaged)) == (accounts if damaged == text else None)
    assert len(text) % 4096 == 0


# ---------------------------------------------------------------------------------------- ages


@given(st.integers(-5, 2**52))
def test_buckets_are_narrow(age: int) -> None:
    bucket = bucket_of(age)
    assert 0 <= bucket < BUCKETS
    clamped = min(max(age, 0), 2**50 - 1)
    assert youngest_of(bucket) <= clamped
    assert clamped - youngest_of(bucket) <= clamped / 256
    if bucket + 1 < BUCKETS:
        assert youngest_of(bucket + 1) > clamped


files = st.lists(
    st.tuples(st.integers(0, 2**50), st.integers(0, CLASSES - 1), st.integers(1, 10**6)), max_size=60
)
lessons = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, 47), st.integers(1, 500)))


AGES = [youngest_of(bucket) for bucket in range(BUCKETS)]
BINS = [new_model().bin_of(age_us / UNIT_US) for age_us in AGES]


@settings(deadline=None)
@given(files, lessons, st.integers(1, 10**8), st.sampled_from([0.0, 20.0, 300.0]))
def test_plan_frees_least_dense(
    found: list[tuple[int, int, int]], lessons: list[tuple[int, int, int]], need: int, lag_s: float
) -> None:
    histogram, model = new_histogram(), new_model()
    for class_, bin_, count in lessons:
        model.used[class_] += count
        model.reused[class_][bin_] += count / 2
        model.update(10.0, 0.1)
    worth = worth_of(model, lag_s)
    for age, class_, nbytes in found:
        histogram[class_ * BUCKETS + bucket_of(age)] += nbytes
    leaving = plan(histogram, 1.0, need, worth)
    cells = {cell: nbytes for cell, nbytes in enumerate(histogram) if nbytes}
    gone = {cell: nbytes for cell, nbytes in cells.items() if leaving[cell]}
    assert sum(gone.values()) >= min(need, sum(cells.values()))

    ranks = [
        (value[bin_], -age_us) for value in worth for bin_, age_us in zip(BINS[:-1], AGES[:-1], strict=True)
    ]
    for class_ in range(CLASSES):
        ranks.insert((class_ + 1) * BUCKETS - 1, (-1.0, 0))  # older than the model can express
    rank = ranks.__getitem__
    if gone:
        last = max(gone, key=rank)
        alike = sum(nbytes for cell, nbytes in gone.items() if rank(cell) == rank(last))
        assert sum(gone.values()) - alike < need  # cells of one rank leave together
        # A sample skips cells, whose chunks are evicted with the others.
        wrong = [cell for cell in range(CLASSES * BUCKETS) if leaving[cell] != (ranks[cell] <= ranks[last])]
        assert wrong == []
    else:
        assert not any(leaving)
