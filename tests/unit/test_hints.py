"""Hints in three places and in short forms: valid ones become actions, others cause one warning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.adapters.vllm._hints import (
    DEMOTE,
    FETCH,
    MOST_ACTIONS,
    MOST_BLOCKS,
    PIN,
    PREFETCH,
    RELEASE,
    RETAIN,
    Action,
    Fetch,
    Hint,
    HintReader,
    Prefetch,
    Retain,
    is_prefill,
)

NESTED: list[Any] = []
for _ in range(100_000):  # deeper than any encoder could write
    NESTED = [NESTED]


def envelope(*actions: dict[str, Any], protocol: str = "0.1") -> dict[str, Any]:
    return {"protocol_version": protocol, "message_id": "m", "actions": list(actions)}


def action(kind: str, version: str = "0.1", **payload: Any) -> dict[str, Any]:
    return {"action_id": "a1", "action_type": kind, "action_version": version, "payload": payload}


DYNAMO = action(
    FETCH, "1.0", source_control_endpoint="tcp://10.0.0.1:18570", block_hashes=[2**64 - 1, 7], mode="copy"
)


@pytest.fixture
def reader() -> HintReader:
    return HintReader(lambda: 0.0)


def kinds(hints: list[Hint]) -> list[tuple[str, Action | None]]:
    return [(hint.type, hint.action) for hint in hints]


@pytest.mark.parametrize("params", [None, {}, {"max_load_tokens": 3}, {"kvtier": None}, {"kvtier": {}}])
def test_no_hints_no_lines(reader: HintReader, params: Any, caplog: pytest.LogCaptureFixture):
    assert reader.read("a", params) == (False, [])
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("short", "actions"),
    [
        ({"ttl_s": 60}, [(PIN, Action(ttl_s=60))]),
        ({"pin": "x"}, [(PIN, Action(session="x"))]),
        ({"pin": "x", "ttl_s": 9}, [(PIN, Action(session="x", ttl_s=9))]),
        ({"pin": "x", "next_use_s": 9}, [(PREFETCH, Prefetch(session="x", next_use_s=9))]),
        ({"ttl_s": 6, "next_use_s": 9}, [(PIN, Action(ttl_s=6)), (PREFETCH, Prefetch(next_use_s=9))]),
        ({"release": True}, [(DEMOTE, Action())]),
        ({"release": False}, []),
        ({"release": "x"}, [(RELEASE, Action(session="x"))]),
        ({"priority": 0}, [(RETAIN, Retain(priority=0))]),
        ({"wait_s": 5.0}, [(FETCH, Fetch(wait_s=5.0))]),
        (
            {"from": ["a:1", "b:2"]},
            [(FETCH, Fetch(source_control_endpoint=it)) for it in ("a:1", "b:2")],
        ),
        ({"explained": {"tokens": {}}, "outcomes": []}, []),
    ],
)
def test_short_forms_become_actions(
    reader: HintReader, short: Any, actions: Any, caplog: pytest.LogCaptureFixture
):
    assert kinds(reader.read("a", {"kvtier": short})[1]) == actions
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (NESTED, "hints ignored in kvtier: 'it must be an object, not list'"),
        ({"explain": NESTED}, "kvtier.explain: 'Expected `bool`, got `array`'"),
        ({"explain": "yes" * 1000}, "kvtier.explain: 'Expected `bool`, got `str`'"),
        ({"ttl_s": 0}, "kvtier.ttl_s: 'Expected `float` > 0.0'"),
        ({"ttl_s": 1e9}, "kvtier.ttl_s: 'Expected `float` <= 86400.0'"),
        ({"ttl_s": float("inf")}, "kvtier.ttl_s: 'Expected `float` <= 86400.0'"),
        ({"ttl_s": True}, "Expected `float`, got `bool`"),
        ({10**5000: 1}, "unknown key int"),
        ({"x" * 5000: 1}, "unknown key xxx"),
        ({"ttl_s": float("nan")}, "Expected `float` > 0.0"),
        ({"ttl_s": 10**5000}, "kvtier.ttl_s: 'Number out of range'"),
        ({"pin": ""}, "kvtier.pin: 'Expected `str` of length >= 1'"),
        ({"pin": "x" * 5000}, "kvtier.pin: 'Expected `str` of length <= 128'"),
        ({"pin": "\ud800"}, "kvtier.pin"),
        ({"release": 7}, "kvtier.release: 'Expected `bool | str`, got `int`'"),
        (
            {"keep\nforged": True},
            "unknown key keep\\nforged; known keys: explain, ttl_s, pin, release",
        ),
        ({"priority": 4}, "kvtier.priority: 'Expected `int` <= 3'"),
        ({"priority": True}, "kvtier.priority: 'Expected `int`, got `bool`'"),
        ({"wait_s": -1}, "kvtier.wait_s: 'Expected `float` > 0.0'"),
        ({"from": "10.0.0.1:18570"}, "kvtier.from: 'Expected `array`, got `str`'"),
        ({"from": []}, "kvtier.from: 'Expected `array` of length >= 1'"),
        ({"from": ["a:1"] * 17}, "kvtier.from: 'Expected `array` of length <= 16'"),
        ({"from": ["a:1", 7]}, "kvtier.from: 'Expected `str`, got `int` - at `$[1]`'"),
        ({"from": ["x" * 301]}, "kvtier.from: 'Expected `str` of length <= 300"),
        ({"from": ["\ud800:1"]}, "kvtier.from"),
    ],
)
def test_wrong_short_form_warns(reader: HintReader, wrong: Any, words: str, caplog: pytest.LogCaptureFixture):
    assert reader.read("a", {"kvtier": wrong}) == (False, [])
    assert words in caplog.text
    assert len(caplog.text) < 400


def test_valid_neighbours_count(reader: HintReader):
    told = reader.read("a", {"kvtier": {"explain": True, "pin": "x", "ttl_s": "soon", "later": 1}})
    assert (told[0], kinds(told[1])) == (True, [(PIN, Action(session="x"))])


@pytest.mark.parametrize("place", ["kv_hints", "kv_hint", "kvtier"])
def test_envelope_comes_in_three_places(reader: HintReader, place: str):
    sent = envelope(DYNAMO, action(PIN, session="s", ttl_s=300))
    params = {"kv_hint": sent} if place == "kv_hint" else {"kvtier": {"hints": sent}}
    if place == "kv_hints":  # vLLM's own records
        records = SimpleNamespace(**sent | {"actions": [SimpleNamespace(**it) for it in sent["actions"]]})
        hints = reader.read("a", None, records)[1]
    else:
        hints = reader.read("a", params)[1]
    fetch = Fetch(source_control_endpoint="tcp://10.0.0.1:18570", block_hashes=[2**64 - 1, 7])
    assert kinds(hints) == [(FETCH, fetch), (PIN, Action(session="s", ttl_s=300))]
    assert {hint.action_id for hint in hints} == {"a1"}


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (envelope(action("kv.teleport")), "unknown"),
        (envelope(action(PIN, "2.0")), "unknown"),
        (envelope(action(PIN), protocol="2"), "unknown"),
        (envelope(action(PIN, ttl_s="soon")), "malformed"),
        (envelope(action(PIN, priority=1)), "malformed"),
        (envelope(action(FETCH, "1.0", block_hashes=[True])), "malformed"),
        (envelope(action(FETCH, "1.0", block_hashes=[-1])), "malformed"),
        (envelope({"action_type": PIN}), "malformed"),
        ({"protocol_version": "0.1", "actions": NESTED[0] and "none"}, "malformed"),
        (NESTED, "malformed"),
        ("hints", "malformed"),
    ],
)
def test_unreadable_action_is_rejected(
    reader: HintReader, sent: Any, reason: str, caplog: pytest.LogCaptureFixture
):
    (hint,) = reader.read("a", {"kv_hint": sent})[1]
    assert (hint.action, hint.outcome, hint.reason) == (None, "rejected", reason)
    assert bool(caplog.records) is (reason == "malformed")
    assert len(caplog.text) < 400


def test_warning_names_the_field(reader: HintReader, caplog: pytest.LogCaptureFixture):
    reader.read("a", {"kv_hint": envelope(action(PIN, ttl_s="soon"))})
    assert "hints ignored in kv_hint, kv.pin: 'Expected `float`, got `str` - at `$.ttl_s`'" in caplog.text


def test_bounds_cut_actions(reader: HintReader):
    blocks = {"source_control_endpoint": "a:1", "block_hashes": list(range(MOST_BLOCKS + 1))}
    sent = envelope(action(FETCH, "1.0", **blocks), *[action(PIN)] * 20)
    fetch, *rest, last = reader.read("a", {"kv_hint": sent})[1]
    assert fetch.action is not None
    assert len(fetch.action.block_hashes or ()) == MOST_BLOCKS
    assert fetch.is_cut
    assert (len(rest), last) == (MOST_ACTIONS - 1, Hint(reason="limit"))


def test_client_cannot_flood_log(reader: HintReader, caplog: pytest.LogCaptureFixture):
    for index in range(1000):
        reader.read(str(index), {"kvtier": {"ttl_s": -1, "pin": 3}, "kv_hint": [7]})
    assert len(caplog.records) == 1


@pytest.mark.parametrize("params", [None, {}, 7, {"do_remote_decode": 1}, {"do_remote_decode": False}])
def test_ordinary_request_is_no_prefill(params: Any):
    assert not is_prefill(params)
