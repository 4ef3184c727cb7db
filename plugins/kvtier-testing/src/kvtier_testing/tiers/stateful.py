"""The contract of a tier, last part: random sequences of calls, compared with a dict."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.tiers import Status
from kvtier_testing.limits import ended_process
from kvtier_testing.tiers.rig import TierRig, expect, keys
from kvtier_testing.tiers.setup import TierSetup

if TYPE_CHECKING:
    from kvtier.tiers._base import SecondaryTier

T = TypeVar("T")
_CHUNKS = 6
_CHUNK_BYTES = 4096
_VERSIONS = 3
_numbers = st.lists(st.integers(0, _CHUNKS - 1), min_size=1, max_size=_CHUNKS, unique=True)
_versions = st.integers(0, _VERSIONS - 1)

GONE = -1


class StatefulTests(TierSetup):
    """Sequences of calls drawn by hypothesis: puts, gets, lookups, removals, resets, restarts."""

    def test_any_sequence_of_calls_agrees_with_a_dict(self, place: Path) -> None:
        places = (place.with_name(f"{place.name}-{number}") for number in itertools.count())

        def make() -> TierMachine:
            return TierMachine(self, next(places))

        run_state_machine_as_test(make, settings=self.sequences())  # type: ignore[arg-type]


class TierMachine(RuleBasedStateMachine):
    """The model is a dict of the versions that the tier may return for each chunk; ``GONE`` is ABSENT.

    Args:
        given: the author's setup of the tier.
        place: place of this sequence's chunks.
    """

    def __init__(self, given: TierSetup, place: Path) -> None:
        super().__init__()
        self.given = given
        self.place = place
        self.runner = asyncio.Runner(loop_factory=given.event_loop)
        self.abandoned: list[SecondaryTier[Any]] = []
        self.was_reset = False
        self.possible: dict[int, set[int]] = {number: {GONE} for number in range(_CHUNKS)}
        self.it = self.open()

    def open(self) -> TierRig:
        """Open a tier at the place."""
        rig = self.given.rig(self.given.make_tier(self.place), self.place, chunk_bytes=_CHUNK_BYTES)
        self.run(rig.tier.open(rig.context()))
        return rig

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call of the tier to its end."""
        try:
            return self.runner.run(call)
        except SystemExit as error:  # from one of the tier's threads or tasks
            raise ended_process(self.given.calls.names(), error) from error

    def teardown(self) -> None:
        """Close the tier if it is open."""
        for tier in (*self.abandoned, self.it.tier):
            self.run(tier.aclose())
        self.runner.close()
        self.given.wipe(self.place)

    @rule(chosen=_numbers, version=_versions)
    def put(self, chosen: list[int], version: int) -> None:
        """Put chunks; existing ones may keep their bytes."""
        statuses = self.run(self.it.put(chosen, version))
        for number, status in zip(chosen, statuses, strict=True):
            possible = self.possible[number]
            if status is Status.OK:
                possible.discard(GONE)
            if status is not Status.REFUSED:
                possible.add(version)

    @rule(chosen=_numbers)
    def get(self, chosen: list[int]) -> None:
        """Get chunks. Later answers of the tier must be consistent with the result."""
        batch, slots = self.it.empty(chosen)
        outcome = self.run(self.it.tier.get(batch))
        self.it.check_outcome(outcome, batch, "get")
        slots.check_unused("a get")
        for index, (number, status) in enumerate(zip(chosen, outcome.statuses, strict=True)):
            if status is Status.OK:
                possible = self.possible[number] - {GONE}
                self.possible[number] = self.it.check_chunk(number, batch, index, possible)
            else:
                self._expect_absent(number, status is Status.ABSENT, f"a get ended {status.name}")

    @invariant()
    def contains(self) -> None:
        """Look all chunks up."""
        answers = self.run(self.it.contains(range(_CHUNKS)))
        for number, there in enumerate(answers):
            if there:
                expect(self.possible[number] != {GONE}, "contains() says yes to what is gone")
            else:
                self._expect_absent(number, True, "contains() says no")

    @rule(chosen=_numbers)
    def touch(self, chosen: list[int]) -> None:
        """Touch chunks, which changes no answer."""
        self.run(self.it.tier.touch(keys(chosen)))

    @rule(chosen=_numbers)
    def discard(self, chosen: list[int]) -> None:
        """Discard chunks."""
        self.run(self.it.tier.discard(keys(chosen)))
        for number in chosen:
            self.possible[number] = {GONE}

    @rule()
    def reset(self) -> None:
        """Hide everything."""
        self.run(self.it.tier.reset())
        self.was_reset = True
        self._forget()

    @rule()
    def reopen(self) -> None:
        """Close the tier and open it again."""
        self.run(self.it.tier.aclose())
        self._open_anew()

    @precondition(lambda self: self.given.is_shared or not self.given.is_persistent)
    @rule()
    def crash(self) -> None:
        """Reopen the place without closing the tier first: stored chunks may be lost."""
        self.abandoned.append(self.it.tier)
        self._open_anew()
        for possible in self.possible.values():
            possible.add(GONE)

    def _open_anew(self) -> None:
        self.it = self.open()
        if self.was_reset or not self.given.is_persistent:
            self._forget()  # chunks put after a reset are visible only until that close
        self.was_reset = False

    def _forget(self) -> None:
        self.possible = {number: {GONE} for number in self.possible}

    def _expect_absent(self, number: int, is_absent: bool, what: str) -> None:
        may_be_gone = GONE in self.possible[number] or self.given.is_lossy
        expect(is_absent and may_be_gone, f"chunk {number} was kept, but {what}")
        self.possible[number] = {GONE}
