"""The conformance kit for eviction policies rejects every broken policy, in the expected test and words."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest

from kvtier.keys import OffloadKey
from kvtier.policies import LRU, EvictionPolicy, Run
from kvtier_testing.policies import PolicyConformance


class EvictsPinned(LRU):
    def __init__(self) -> None:
        super().__init__()
        self._seen: list[OffloadKey] = []

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        super().add(keys, used=used)
        self._seen += keys

    def evict(self, count: int) -> list[OffloadKey]:
        evicted = super().evict(count)
        return evicted if len(evicted) == count else evicted + [k for k in self._seen if k not in evicted][:1]


class EvictsTheFront(LRU):
    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        super().add(keys[::-1], used=used)


class EvictsTooMany(LRU):
    def evict(self, count: int) -> list[OffloadKey]:
        return super().evict(count + 1) if count else []


class EvictsNothingOfUsed(LRU):
    def __init__(self) -> None:
        super().__init__()
        self._used: set[OffloadKey] = set()

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        super().add(keys, used=used)
        self._used |= set(keys) if used else set()

    def evict(self, count: int) -> list[OffloadKey]:
        evicted = super().evict(count)
        kept = [key for key in evicted if key in self._used]
        super().add(kept, used=True)
        return [key for key in evicted if key not in self._used]


class KeepsVictims(LRU):
    def evict(self, count: int) -> list[OffloadKey]:
        evicted = super().evict(count)
        super().add(evicted[::-1], used=False)
        return evicted


class ForgetsPins(LRU):
    def pin(self, keys: Sequence[OffloadKey]) -> None:
        pass

    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        super().add([key for key in keys if key not in self], used=used)


class LosesLateParts(LRU):
    _newest = 0

    def add_run(self, run: Run, keys: Sequence[OffloadKey], *, used: bool) -> None:
        self._newest = max(self._newest, run.time)
        if run.time == self._newest:
            super().add_run(run, keys, used=used)


class ForgetsToClear(LRU):
    def clear(self) -> None:
        pass


class RefusesBeyondItsCapacity(LRU):
    def add(self, keys: Sequence[OffloadKey], *, used: bool) -> None:
        super().add(keys[: max(0, self.capacity - len(self))], used=used)


class WantsArguments(LRU):
    def __init__(self, ghosts: int) -> None:
        super().__init__()


class WalksOverAll(LRU):
    def evict(self, count: int) -> list[OffloadKey]:
        everyone = super().evict(len(self))
        super().add(everyone[count:][::-1], used=False)
        return everyone[:count]


class RemembersForEver(LRU):
    def __init__(self) -> None:
        super().__init__()
        self._ghosts: dict[OffloadKey, int] = {}

    def evict(self, count: int) -> list[OffloadKey]:
        evicted = super().evict(count)
        self._ghosts.update(dict.fromkeys(evicted, 1))
        return evicted


class ReturnsAKeyTwice(LRU):
    def evict(self, count: int) -> list[OffloadKey]:
        return [key for key in super().evict((count + 1) // 2) for _ in range(2)][:count]


class NeverReturns(LRU):
    def evict(self, count: int) -> list[OffloadKey]:
        while len(self) < count:
            pass
        return super().evict(count)


class Exits(LRU):
    def pin(self, keys: Sequence[OffloadKey]) -> None:
        raise SystemExit


LAST_FIRST = "of_keys_added_together_the_last_goes_first"
SEQUENCE = "any_sequence_of_calls_agrees_with_a_model"
CAUGHT = [
    (EvictsPinned, SEQUENCE, "evict.. chose a (pinned key|key that is no candidate)"),
    (EvictsTheFront, LAST_FIRST, "evict.. chose the keys .* the last goes first"),
    (EvictsTooMany, SEQUENCE, r"evict\(\d+\) of \d+ candidates returned \d+ keys"),
    (EvictsNothingOfUsed, SEQUENCE, r"evict\(\d+\) of \d+ candidates returned \d+ keys"),
    (KeepsVictims, SEQUENCE, "__len__.. is .* after these calls"),
    (ReturnsAKeyTwice, SEQUENCE, "evict.. returned a key twice"),
    (ForgetsPins, SEQUENCE, "__len__.. is .* after these calls"),
    (LosesLateParts, SEQUENCE, "__len__.. is .* after these calls"),
    (ForgetsToClear, SEQUENCE, "__len__.. is .* after these calls; there are 0"),
    (RefusesBeyondItsCapacity, SEQUENCE, "__len__.. is .* after these calls"),
    (WantsArguments, SEQUENCE, "ghosts"),
    (
        WalksOverAll,
        "a_call_takes_no_longer_with_more_candidates",
        "evict.. take .* times as long as with 4000",
    ),
    (RemembersForEver, "what_it_remembers_is_bounded", "a policy's memory of evicted keys must be bounded"),
    (NeverReturns, SEQUENCE, r"evict.. has not ended within 1 s(.|\n)*while len"),
    (Exits, SEQUENCE, "pin.. raised SystemExit"),
]


def kit(bad: type[EvictionPolicy]) -> PolicyConformance:
    class Kit(PolicyConformance):
        policy = bad
        patience_s = 1.0 if bad is NeverReturns else 30.0

        def sequences(self) -> hypothesis.settings:
            return hypothesis.settings(
                super().sequences(),
                max_examples=1000,  # the first few show it, rarely the hundredth: the failing one is the last
                phases=[hypothesis.Phase.generate],
                derandomize=True,
                database=None,
            )

    return Kit()


def run(policy: type[EvictionPolicy], test: str) -> None:
    """Run one test of the kit, with each argument if it has several."""
    function = getattr(kit(policy), f"test_{test}")
    parameters = [mark.args[1] for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    for parameter in parameters[0] if parameters else [None]:
        function(*(() if parameter is None else (parameter,)))


@pytest.mark.parametrize(
    ("policy", "test", "words"), CAUGHT, ids=lambda value: getattr(value, "__name__", "")
)
def test_bad_policy_fails_matching_test(policy, test, words):
    with pytest.raises((AssertionError, TypeError), match=words):
        run(policy, test)


def test_missing_policy_is_told():
    with pytest.raises(
        AssertionError, match=r"no entry point in the group kvtier.policies names .*KeepsVictims"
    ):
        kit(KeepsVictims).test_an_entry_point_names_it()
