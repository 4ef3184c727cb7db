"""Hints in ``kv_transfer_params``: valid ones count, invalid ones are ignored with one warning."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier._core.requests import Terms
from kvtier.adapters.vllm._hints import NO_HINTS, HintReader, Hints, is_prefill
from tests.common import failing_log_handler

NESTED: list[Any] = []
for _ in range(100_000):  # deeper than its text could be made
    NESTED = [NESTED]


@pytest.fixture
def reader() -> HintReader:
    return HintReader(lambda: 0.0)


@pytest.mark.parametrize("params", [None, {}, {"max_load_tokens": 3}, {"kvtier": None}, {"kvtier": {}}])
def test_no_hints_no_lines(reader: HintReader, params: Any, caplog: pytest.LogCaptureFixture):
    assert reader.read("a", params) == NO_HINTS
    assert caplog.text == ""


def test_failing_log_costs_no_request(reader: HintReader, capsys: pytest.CaptureFixture[str]):
    with failing_log_handler() as lines:
        assert reader.read("a", {"kvtier": 7}) == NO_HINTS
    assert len(lines) == 1
    assert "no room for the log" in capsys.readouterr().err


def test_all_hints_together(reader: HintReader):
    hints = {"explain": True, "ttl_s": 60, "pin": "a 7", "release": "a 6", "wait_s": 2.5, "priority": 2}
    assert reader.read("a", {"kvtier": hints}) == Hints(
        explain=True, ttl_s=60, pin="a 7", release="a 6", wait_s=2.5, priority=2
    )
    assert reader.read("a", {"kvtier": {"release": True, "priority": 0}}) == Hints(release=True, priority=0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (NESTED, "it must be an object, not list"),
        ({"explain": NESTED}, "explain must be true or false, not list"),
        ({"explain": "yes" * 1000}, "explain must be true or false, not str"),
        ({"ttl_s": 0}, "ttl_s must be a number of seconds above 0 and up to 86400, not 0"),
        ({"ttl_s": True}, "not True"),
        ({10**5000: 1}, "unknown key int"),
        ({"ttl_s": float("nan")}, "not float"),
        ({"ttl_s": 10**5000}, "not int"),
        ({"ttl_s": 1e9}, "not 1000000000.0"),
        ({"pin": ""}, "pin must be a name of 1 to 128 characters"),
        ({"pin": "x" * 5000}, "pin must be a name"),
        ({"release": 7}, "release must be true or a name of 1 to 128 characters, not 7"),
        ({"release": False}, "release must be true or a name of 1 to 128 characters, not False"),
        ({"keep": True}, "unknown key 'keep'; known keys: explain, ttl_s, pin, release, wait_s, from, next_"),
        ({"priority": 4}, "priority must be an integer from 0 to 3, not 4"),
        ({"priority": -1}, "priority must be an integer from 0 to 3, not -1"),
        ({"priority": True}, "priority must be an integer from 0 to 3, not True"),
        ({"priority": "high"}, "priority must be an integer from 0 to 3, not 'high'"),
        ({"priority": NESTED}, "priority must be an integer from 0 to 3, not list"),
        ({"wait_s": -1}, "wait_s must be a number of seconds above 0"),
        ({"wait_s": float("inf")}, "wait_s must be a number of seconds above 0"),
        ({"from": "10.0.0.1:18570"}, "from must be a list of 1 to 16 addresses such as 10.0.0.1:18570"),
        ({"from": []}, "from must be a list of 1 to 16 addresses"),
        ({"from": ["a:1"] * 17}, "from must be a list of 1 to 16 addresses"),
        ({"from": ["a:1", 7]}, "from must be a list of 1 to 16 addresses"),
        ({"from": ["x" * 301]}, "from must be a list of 1 to 16 addresses"),
        ({"from": ["\ud800:1"]}, "from must be a list of 1 to 16 addresses"),
    ],
)
def test_wrong_hint_warns(reader: HintReader, wrong: Any, words: str, caplog: pytest.LogCaptureFixture):
    assert reader.read("a", {"kvtier": wrong}) == NO_HINTS
    assert words in caplog.text
    assert len(caplog.text) < 400


def test_valid_neighbours_count(reader: HintReader):
    assert reader.read("a", {"kvtier": {"pin": "x", "ttl_s": "soon"}}) == Hints(pin="x")


def test_client_cannot_flood_log(reader: HintReader, caplog: pytest.LogCaptureFixture):
    for index in range(1000):
        reader.read(str(index), {"kvtier": {"ttl_s": -1, "pin": 3}})
    assert len(caplog.records) == 1


@pytest.mark.parametrize("params", [None, {}, 7, {"do_remote_decode": 1}, {"do_remote_decode": False}])
def test_ordinary_request_is_no_prefill(params: Any):
    assert not is_prefill(params)


def test_prefill_result_hints_decode(reader: HintReader):
    assert is_prefill({"do_remote_decode": True, "kvtier": {"explain": True}})
    assert reader.read("a", {"kvtier": {"wait_s": 5.0, "explained": {"tokens": {}}}}) == Hints(wait_s=5.0)
    told = {"wait_s": 5.0, "from": ["10.0.0.1:18570"]}
    assert reader.read("a", {"kvtier": told}) == Hints(wait_s=5.0, addresses=("10.0.0.1:18570",))


@pytest.mark.parametrize(
    ("hints", "terms"),
    [
        ({"explain": True, "release": True}, None),
        ({"ttl_s": 60}, Terms("request 7", kept_s=60)),
        ({"pin": "x"}, Terms("pin x", kept_s=86_400)),
        ({"pin": "x", "ttl_s": 60, "release": "y"}, Terms("pin x", kept_s=60, releases="pin y")),
        ({"pin": "x", "next_use_s": 9}, Terms("pin x", next_use_s=9)),
        ({"ttl_s": 60, "next_use_s": 9}, Terms("request 7", kept_s=60, next_use_s=9)),
        ({"release": "y"}, Terms("request 7", releases="pin y")),
    ],
)
def test_hints_become_terms(reader: HintReader, hints: Any, terms: Terms | None):
    assert reader.read("7", {"kvtier": hints}).terms("7") == terms
