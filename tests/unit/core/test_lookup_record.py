"""The core's records of the lookups of an explained request."""

from __future__ import annotations

import pytest

from kvtier._core.messages import Answer, TierDown
from kvtier._core.requests import LookupRecord, Request
from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey
from tests.unit.core.world import (
    COPIED,
    HIT,
    LOCATED,
    MISS,
    MISSING,
    answer,
    ask,
    fetches,
    keys,
    make,
    step,
    store,
)

Found = tuple[dict[OffloadKey, str], dict[str, str]]


def recorded(name: str = "") -> tuple[Request, LookupRecord]:
    record = LookupRecord()
    return Request(name, record=record), record


def why(core: Tiering, request: Request, prompt: list[OffloadKey]) -> Found:
    """Ask until the first miss; return what the record says of it."""
    assert ask(core, request, prompt)[-1] is MISS
    record = request.record
    assert record is not None
    (missed,) = record.misses
    return dict(record.misses), record.refusals.get(missed, {})


def test_lacking_tier_is_named() -> None:
    core, (request, _), prompt = make(tiers=2), recorded(), keys("a", 4)
    (first,) = step(core, request, prompt)
    (second,) = answer(core, first, [COPIED, MISSING, MISSING, MISSING], checksum=1)
    assert list(second.keys) == prompt[1:]
    answer(core, second, [MISSING] * 3)
    assert why(core, request, prompt) == ({prompt[1]: "absent"}, {"t0": "absent,checksum", "t1": "absent"})


def test_no_slot_is_no_failure() -> None:
    core, (request, record), prompt = make(slots=4), recorded(), keys("a", 4)
    (fetch,) = step(core, request, prompt)
    assert len(fetch.slots) == 2
    answer(core, fetch, [COPIED, MISSING, MISSING, MISSING], checksum=1)
    assert [record.refusals[key]["t0"] for key in prompt[1:]] == ["checksum", "absent", "absent"]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (
            [MISSING, COPIED, COPIED, MISSING],
            ["absent,torn", "absent,torn"],
        ),  # the first was evicted
        ([COPIED, COPIED, MISSING, LOCATED], ["torn"]),
    ],
)
def test_failed_and_absent_both_count(answers: list[Answer], expected: list[str]) -> None:
    core, (request, record), prompt = make(), recorded(), keys("a", 4)
    (fetch,) = step(core, request, prompt)
    answer(core, fetch, answers, torn=1)
    missing = [key for key, it in zip(prompt, answers, strict=True) if it is MISSING]
    assert [record.refusals[key]["t0"] for key in missing] == expected


def test_unasked_tier_is_named() -> None:
    core, (request, _), prompt = make(tiers=2), recorded(), keys("a", 2)
    core.on_event(TierDown(0, "gone"), 0.0)
    (fetch,) = step(core, request, prompt)
    answer(core, fetch, [MISSING] * 2)
    assert why(core, request, prompt) == ({prompt[0]: "absent"}, {"t0": "down", "t1": "absent"})


def test_late_tier_is_named() -> None:
    core, (request, _), prompt = make(request_deadline_s=60.0), recorded(), keys("a", 2)
    step(core, request, prompt)
    core.settle(3.5)  # past the tier's deadline
    assert why(core, request, prompt) == ({prompt[0]: "absent"}, {"t0": "timeout"})


def test_awaited_tier_is_named() -> None:
    core, (request, _), prompt = make(request_deadline_s=1.0), recorded(), keys("a", 2)
    step(core, request, prompt)
    core.settle(1.5)
    assert why(core, request, prompt) == ({prompt[0]: "deadline"}, {"t0": "deadline"})


def test_abandoned_tier_keeps_reason() -> None:
    core, (request, _), prompt = make(tiers=2, request_deadline_s=5.0), recorded(), keys("a", 2)
    step(core, request, prompt)
    core.settle(3.5)  # past the first tier's deadline
    fetches(core)
    core.settle(5.5)
    assert why(core, request, prompt)[1] == {"t0": "timeout", "t1": "deadline"}


def test_over_budget_is_a_reason() -> None:
    core, (request, _), prompt = make(slots=16, budget=0.25), recorded(), keys("a", 8)
    (fetch,) = step(core, request, prompt)
    answer(core, fetch, [COPIED] * 4 + [LOCATED] * 4)
    assert why(core, request, prompt) == ({prompt[4]: "budget"}, {})


def test_reset_and_audit_are_reasons() -> None:
    core, (request, _), prompt = make(), recorded(), keys("a", 2)
    step(core, request, prompt)
    core.reset()
    core.take_commands()
    assert why(core, request, prompt)[1] == {"t0": "reset"}

    core, (request, _) = make(), recorded()
    (fetch,) = step(core, request, prompt)
    core.disable_after_audit(0, "in a test")
    answer(core, fetch, [COPIED] * 2)
    assert why(core, request, prompt)[1] == {"t0": "audit"}


def test_only_last_scans_count() -> None:
    core, (request, record), (other, nothing) = make(tiers=0), recorded(), (Request(), keys("b", 1))
    prompt = keys("a", 3)
    store(core, prompt[:1])
    assert ask(core, request, prompt) == [HIT, MISS]
    assert ask(core, other, nothing) == [MISS]
    assert record.misses == {prompt[1]: "absent"}
    core.settle(0.0)
    store(core, prompt[1:2])
    assert ask(core, request, prompt) == [HIT, HIT, MISS]
    assert record.misses == {prompt[2]: "absent"}
    core.settle(0.0)
    store(core, prompt[2:])
    assert ask(core, request, prompt) == [HIT] * 3
    assert record.misses == {}
    assert other.record is None
    assert fetches(core) == []


def test_failed_load_is_a_reason() -> None:
    core, (request, record), prompt = make(), recorded(), keys("a", 1)
    store(core, prompt)
    assert ask(core, request, prompt) == [HIT]
    core.fail_load(core.acquire(prompt, request), request)
    assert ask(core, request, prompt) == [MISS]
    assert record.misses == {prompt[0]: "load_failed"}
