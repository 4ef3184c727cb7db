"""Hints in ``kv_transfer_params``: valid ones count, invalid ones are ignored with one warning."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.adapters.vllm._hints import NO_HINTS, ClientHints, HintReader, Hints, is_prefill
from tests.common import failing_log_handler
from tests.unit.core import world
from tests.unit.core.world import keys

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


class Session:
    """Requests that pin the same chunks for 10 seconds under one name, at a test's times."""

    def __init__(self) -> None:
        self.core = world.make(16, 0)
        self.now_s = 0.0
        self._hints = ClientHints(self.core.retention, self.core.prefetches, lambda: self.now_s)
        world.store(self.core, keys("a", 3))

    def begin(self, req_id: str) -> None:
        self._hints.begin(req_id, {"kvtier": {"pin": "agent", "ttl_s": 10}})

    def offer(self, req_id: str) -> None:
        self._hints.stored(req_id, keys("a", 3))

    def end(self, req_id: str) -> None:
        self._hints.ended(req_id)

    def kept_at(self, now_s: float) -> int:
        self.now_s = now_s
        self.core.settle(now_s)
        return len(self.core.retention.pinned)


def test_idle_name_expires():
    session = Session()
    session.begin("first")
    session.offer("first")
    session.end("first")
    assert session.kept_at(5) == 3
    session.begin("second")
    assert session.kept_at(11) == 3, "it waits for its turn"
    session.begin("third")
    session.offer("second")
    session.end("third")
    assert session.kept_at(60) == 3, "it generates for long"
    session.end("second")
    assert session.kept_at(69) == 3
    assert session.kept_at(70) == 0
    assert session.core.retention.is_empty


def test_second_start_extends_nothing():
    session = Session()
    session.begin("same")
    session.begin("same")
    session.offer("same")
    session.end("same")
    assert session.kept_at(9) == 3
    assert session.kept_at(10) == 0
    assert session.core.retention.is_empty


def test_announcement_keeps_order():
    core = world.make(16, 1, pin_budget=0.5)
    now_s = 0.0
    hints = ClientHints(core.retention, core.prefetches, lambda: now_s)
    prompt = keys("a", 4)
    world.store(core, prompt)
    hints.begin("first", {"kvtier": {"pin": "agent", "next_use_s": 100}})
    hints.loaded("first", prompt[2:])
    hints.stored("first", prompt)
    hints.ended("first")
    core.settle(0.0)
    assert not core.retention.pinned
    core.settle(90.0)
    assert list(core.retention.pinned) == prompt
    hints.begin("second", {"kvtier": {"pin": "agent"}})
    core.settle(95.0)
    assert list(core.retention.pinned) == prompt, "it is back, and waits for its turn"
    hints.ended("second")
    hints.begin("third", {"kvtier": {"release": "agent"}})
    hints.ended("third")
    assert not core.retention.pinned
