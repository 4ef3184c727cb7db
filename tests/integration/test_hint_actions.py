"""Client actions in the manager: their effects, their outcomes, and the limits of hostile ones.

The test calls the manager as vLLM's scheduler does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext

from kvtier._core.chunks import block_of
from kvtier._core.claims import MOST_PER_SLOT, REMEMBERED_S
from kvtier._core.limits import Limits
from kvtier._telemetry.explanation import Explanation
from kvtier.adapters.vllm._hints import LONGEST_S, MOST_BLOCKS, TYPES
from kvtier.adapters.vllm._telemetry.explain import Explainer
from kvtier.keys import OffloadKey, content_hash, pack_key
from kvtier_testing import invariants
from kvtier_tools.explain import read
from tests.effort import effort
from tests.integration.test_bridge import Clock, World, content, dummy
from tests.unit.test_hints import action, envelope

pytestmark = pytest.mark.releases

PEER = "10.0.0.1:18570"
SLOTS = 32


def prompt(number: int, length: int) -> list[OffloadKey]:
    """Return keys whose blocks have the names ``1000 * number`` and following."""
    return [pack_key((1000 * number + index).to_bytes(32, "big")) for index in range(length)]


def named(keys: list[OffloadKey]) -> list[int]:
    return [block_of(key) for key in keys]


class Engine(World):
    """A manager, and requests whose clients send actions."""

    def begin(self, name: str, *actions: dict[str, Any], **params: Any) -> ReqContext:
        sent = {"kv_hint": envelope(*actions)} if actions else {}
        context = ReqContext(req_id=name, kv_transfer_params={**sent, **params})
        self.manager.on_new_request(context)
        return context

    def end(self, context: ReqContext) -> list[tuple[str, str]]:
        """End a request; return the outcomes in its response."""
        told = self.manager.response_params(context.req_id, context.kv_transfer_params) or {"kvtier": {}}
        self.step([context.req_id])
        self.manager.on_request_finished(context)
        self.step()
        return [(one["outcome"], one["reason"]) for one in told["kvtier"].get("outcomes", [])]

    def turn(self, name: str, keys: list[OffloadKey], *actions: dict[str, Any]) -> list[tuple[str, str]]:
        """Serve a request from its lookups to its end."""
        context = self.begin(name, *actions)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (place + 1))
        found = keys[: self.find(keys, context)]
        if found:
            self.manager.prepare_load(found, context)
            self.step([name])
            self.manager.complete_load(set(found), context)
        self.store(keys, context)
        self.step()
        outcomes = self.end(context)
        self.settle()
        return outcomes

    def in_memory(self, keys: list[OffloadKey]) -> int:
        return sum(key in self.core.table.visible for key in keys)

    def flood(self) -> None:
        """Other clients' requests take all slots that they can get."""
        for number in range(100, 108):
            self.turn(f"other {number}", prompt(number, 8))


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Engine] = []

    def make(*tiers: Any, **more: Any) -> Engine:
        made.append(Engine(*tiers, slots=SLOTS, **more))
        return made[-1]

    yield make
    for it in made:
        it.manager.shutdown()


def test_pin_keeps_until_release(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    assert it.turn("a", keys, action("kv.pin", session="s", ttl_s=600)) == [("accepted", "new")]
    it.flood()
    assert it.in_memory(keys) == 4
    assert it.turn("b", keys, action("kv.pin", session="s", ttl_s=600)) == [("accepted", "ok")]
    assert it.turn("c", [], action("kv.release", session="s")) == [("accepted", "ok")]
    assert it.core.claims.is_empty
    assert it.turn("d", [], action("kv.release", session="s")) == [("missing", "session")]


def test_pin_beyond_budget_is_clipped(make: Make) -> None:
    it = make(dummy(), limits=Limits(pin_budget=0.25))
    assert it.turn("a", prompt(1, 12), action("kv.pin")) == [("clipped", "budget")]
    assert len(it.core.claims.pinned) == SLOTS // 4


def test_demoted_session_returns_by_prefetch(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    assert it.turn("a", keys, action("kv.pin", session="s")) == [("accepted", "new")]
    assert it.turn("b", [], action("kv.demote", session="s")) == [("accepted", "ok")]
    assert not it.core.claims.pinned
    it.flood()
    assert it.in_memory(keys) == 0
    assert it.turn("c", [], action("kv.prefetch", session="s")) == [("accepted", "ok")]
    while it.manager.has_pending_work():  # the engine continues its steps
        it.step()
    it.flood()
    assert it.in_memory(keys) == 4
    assert it.turn("d", [], action("kv.prefetch", session="t")) == [("missing", "session")]
    assert it.turn("e", [], action("kv.demote", session="t")) == [("missing", "session")]


def test_demoted_prompt_leaves_memory(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    assert it.turn("a", keys, action("kv.demote")) == [("accepted", "ok")]
    it.step()
    assert it.in_memory(keys) == 0
    assert it.find(keys, it.begin("b")) == 4


def test_announced_use_is_deferred(make: Make) -> None:
    clock = Clock()
    it, keys = make(dummy(), clock=clock), prompt(1, 4)
    assert it.turn("a", keys, action("kv.prefetch", next_use_s=60)) == [("deferred", "next_use")]
    it.flood()
    clock.now += 55
    it.step()
    while it.manager.has_pending_work():
        it.step()
    assert it.in_memory(keys) == 4


def test_retained_prompt_outlives_others(make: Make) -> None:
    clock = Clock()
    it, keys = make(dummy(), clock=clock), prompt(1, 4)
    assert it.turn("a", keys, action("kv.retain", priority=2, ttl_s=9)) == [("accepted", "ok")]
    it.flood()
    assert it.in_memory(keys) == 4
    clock.now += 9
    it.step()
    it.flood()
    assert it.in_memory(keys) == 0


@pytest.mark.parametrize("endpoint", [PEER, f"tcp://{PEER}"])
def test_fetch_names_the_peer(make: Make, endpoint: str) -> None:
    it, keys = make(dummy(), peers=[PEER]), prompt(1, 4)
    blocks = [int.from_bytes(key[-12:-4], "big") for key in keys[:2]]
    fetch = action("kv.fetch", "1.0", source_control_endpoint=endpoint, block_hashes=blocks, mode="copy")
    context = it.begin("a", fetch)
    request = it.manager.requests["a"]
    assert request.addresses == (PEER,)
    assert [request.names(key) for key in keys] == [True] * 2 + [False] * 2
    assert it.end(context) == [("accepted", "ok")]
    elsewhere = {**fetch, "payload": {**fetch["payload"], "block_hashes": [999]}}
    assert it.turn("b", keys, elsewhere) == [("missing", "blocks")]
    assert it.turn("c", keys, fetch) == [("accepted", "ok")]


# --- blocks ----------------------------------------------------------------------------------------


def test_pin_of_blocks_keeps_them_alone(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    assert it.turn("a", keys, action("kv.pin", block_hashes=named(keys[:2]))) == [("accepted", "ok")]
    it.flood()
    assert [it.in_memory([key]) for key in keys] == [1, 1, 0, 0]


def test_pin_of_blocks_in_memory_needs_no_prompt(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    it.turn("a", keys)
    pin = action("kv.pin", session="s", block_hashes=named(keys))
    assert it.turn("b", [], pin) == [("accepted", "new")]
    it.flood()
    assert it.in_memory(keys) == 4
    assert it.turn("c", [], action("kv.release", session="s")) == [("accepted", "ok")]
    assert it.core.claims.is_empty


def test_prefetch_of_blocks_keeps_them(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    it.turn("a", keys)
    it.flood()
    fetched = action("kv.prefetch", block_hashes=named(keys[:3]), ttl_s=600)
    assert it.turn("b", keys, fetched) == [("accepted", "ok")]
    it.flood()
    assert [it.in_memory([key]) for key in keys] == [1, 1, 1, 0]


def test_announced_blocks_return(make: Make) -> None:
    clock = Clock()
    it, keys = make(dummy(), clock=clock), prompt(1, 4)
    it.turn("a", keys)
    later = action("kv.prefetch", block_hashes=named(keys[:2]), next_use_s=60)
    assert it.turn("b", [], later) == [("deferred", "next_use")]
    it.flood()
    assert it.in_memory(keys) == 0
    clock.now += 55
    it.step()
    while it.manager.has_pending_work():
        it.step()
    assert [it.in_memory([key]) for key in keys] == [1, 1, 0, 0]


def test_retained_blocks_outlive_others(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    it.turn("a", keys)
    retain = action("kv.retain", block_hashes=named(keys[:2]), priority=3)
    assert it.turn("b", [], retain) == [("accepted", "ok")]
    it.flood()
    assert [it.in_memory([key]) for key in keys] == [1, 1, 0, 0]


def test_demoted_blocks_leave_memory(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    demote = action("kv.demote", block_hashes=named(keys[2:]))
    assert it.turn("a", keys, demote) == [("accepted", "ok")]
    it.step()
    assert [it.in_memory([key]) for key in keys] == [1, 1, 0, 0]
    assert it.find(keys, it.begin("b")) == 4


@pytest.mark.parametrize("kind", ["kv.release", "kv.demote"])
def test_released_blocks_leave_first(make: Make, kind: str) -> None:
    it, keys, others = make(dummy()), prompt(1, 4), prompt(2, 8)
    it.turn("a", keys)
    it.turn("b", others)
    assert it.turn("c", [], action(kind, block_hashes=named(others[:4]))) == [("accepted", "ok")]
    it.store(prompt(3, SLOTS - 11), it.begin("d"))
    assert (it.in_memory(keys), it.in_memory(others[4:])) == (4, 4)
    assert it.in_memory(others[:4]) < 4


def test_actions_on_blocks_are_apart(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    both = [action("kv.pin", block_hashes=named(keys[:2])), action("kv.demote", block_hashes=named(keys[2:]))]
    assert it.turn("a", keys, *both) == [("accepted", "ok")] * 2
    it.flood()
    assert [it.in_memory([key]) for key in keys] == [1, 1, 0, 0]


@pytest.mark.parametrize("kind", ["kv.pin", "kv.prefetch", "kv.retain", "kv.demote", "kv.release"])
def test_unknown_blocks_are_missing(make: Make, kind: str) -> None:
    it = make(dummy())
    assert it.turn("a", prompt(1, 4), action(kind, block_hashes=[7, 2**64 - 1])) == [("missing", "blocks")]
    assert it.core.claims.is_empty
    assert not it.core.table.users


def test_blocks_beyond_bound_are_cut(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    many = action("kv.pin", block_hashes=[*named(keys), *range(MOST_BLOCKS)])
    assert it.turn("a", keys, many) == [("clipped", "limit")]


def test_pin_of_blocks_beyond_budget_is_clipped(make: Make) -> None:
    it, keys = make(dummy(), limits=Limits(pin_budget=0.25)), prompt(1, 12)
    assert it.turn("a", keys, action("kv.pin", block_hashes=named(keys))) == [("clipped", "budget")]
    assert len(it.core.claims.pinned) == SLOTS // 4


def test_blocks_of_all_groups_are_named(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 2)
    other = [pack_key(content_hash(key), 1) for key in keys]
    it.turn("a", keys + other)
    it.turn("b", [], action("kv.pin", block_hashes=named(keys)))
    it.flood()
    assert it.in_memory(keys + other) == 4


def test_aborted_request_leaves_nothing(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    kept = [action(kind, block_hashes=named(keys)) for kind in ("kv.retain", "kv.demote", "kv.release")]
    context = it.begin("a", action("kv.pin", block_hashes=named(keys), ttl_s=1e-3), *kept)
    it.store(keys, context)
    request = it.manager.requests["a"]
    it.end(context)
    assert request.blocks is None
    assert not request.parts
    assert all(user.blocks is None for user in it.core.table.users.values()), "hashes are not kept"
    it.manager.reset_cache()
    it.step()
    assert it.core.claims.is_empty
    it.check_idle()


def test_reset_ends_claims_on_blocks(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    it.turn("a", keys)
    it.begin("b", action("kv.pin", block_hashes=named(keys)), action("kv.retain", block_hashes=named(keys)))
    it.step()
    assert len(it.core.claims.pinned) == 4
    it.manager.reset_cache()
    assert (len(it.core.claims.pinned), len(it.core.table.users)) == (0, 0)
    assert not it.core.table.named(named(keys))
    it.step()
    invariants.check(it.core)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (action("kv.fetch", "1.0", source_control_endpoint="evil:1", block_hashes=[1]), "peer"),
        (action("kv.fetch", "1.0", block_hashes=[1]), "peer"),
        (action("kv.fetch", "1.0", source_control_endpoint=PEER, block_hashes=[1], mode="move"), "target"),
        (action("kv.fetch", "1.0", source_control_endpoint=PEER, block_hashes=[1], no_retain=1), "target"),
        (action("kv.demote", session="s", block_hashes=[1]), "target"),
        (action("kv.prefetch", session="s", block_hashes=[1]), "target"),
        (action("kv.retain", session="s", priority=2), "target"),
        (action("kv.pin", session=True), "session"),
        (action("kv.pin", tier="dummy0"), "target"),
        (action("kv.prefetch", tier="nowhere"), "target"),
        (action("kv.teleport"), "unknown"),
        (action("kv.pin", ttl_s=-1), "malformed"),
    ],
)
def test_refused_action_has_reason(make: Make, refused: dict[str, Any], reason: str) -> None:
    it = make(dummy(), peers=[PEER])
    assert it.turn("a", prompt(1, 2), refused) == [("rejected", reason)]
    kind = refused["action_type"] if reason != "unknown" else "other"
    assert it.core.shared.counts["hint_actions", kind, "rejected", reason] == 1
    assert it.core.claims.is_empty


def test_capabilities_follow_the_tiers(make: Make) -> None:
    (info,) = make(dummy()).manager.config_info()
    assert info["kv_hints"] == (
        "kv.fetch/1.0,kv.prefetch/0.1,kv.demote/0.1,kv.pin/0.1,kv.retain/0.1,kv.release/0.1"
    )
    it = make(limits=Limits(pin_budget=0.0))
    assert it.manager.config_info()[0]["kv_hints"] == "kv.retain/0.1,kv.release/0.1"
    assert it.turn("a", prompt(1, 2), action("kv.pin"), action("kv.prefetch")) == [
        ("rejected", "budget"),
        ("rejected", "no_tier"),
    ]
    stats = it.manager.get_stats()
    assert stats is not None
    assert ("kv.retain", "0.1") in stats.data["data"]["kvtier_hint_capability"]


def test_session_of_the_engine_is_a_name(make: Make) -> None:
    it = make(dummy())
    it.manager.session = "conversation 7"
    it.begin("a", action("kv.pin", session=True))
    assert it.core.claims.has("session conversation 7")
    assert it.end(it.begin("b", action("kv.pin", session=True))) == [("rejected", "session")]


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        (action("kv.retain"), ("accepted", "ok")),
        (action("kv.pin", block_hashes=[1000] * (MOST_BLOCKS + 1)), ("clipped", "limit")),
        (action("kv.prefetch", next_use_s=60), ("deferred", "next_use")),
        (action("kv.fetch", "1.0", source_control_endpoint="evil:1"), ("rejected", "peer")),
        (action("kv.release", session="s"), ("missing", "session")),
    ],
)
def test_outcome_is_in_response_counter_and_line(
    make: Make, sent: dict[str, Any], outcome: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvtier.explain")
    it = make(dummy(), explainer=Explainer(["dummy0"], rate=1.0, chance=lambda: 0.0))
    assert it.turn("a", prompt(1, 4), sent) == [outcome]
    assert it.core.shared.counts["hint_actions", sent["action_type"], *outcome] == 1
    assert sum(n for count, n in it.core.shared.counts.items() if count[0] == "hint_actions") == 1
    (line,) = read(record.getMessage().encode() for record in caplog.records)
    assert isinstance(line, Explanation)
    assert line.hints == [f"{sent['action_type']} {outcome[0]}: {outcome[1]}"]


def test_blocks_of_all_actions_share_a_bound(make: Make) -> None:
    it, keys = make(dummy()), prompt(1, 4)
    it.turn("a", keys)
    many = action("kv.retain", block_hashes=[*named(keys), *range(10**6, 10**6 + MOST_BLOCKS - 5)])
    last = action("kv.retain", block_hashes=named(keys))
    context = it.begin("b", many, last, last)
    request = it.manager.requests["b"]
    assert sum(len(part.blocks or ()) for part in request.parts) == MOST_BLOCKS
    assert it.end(context) == [("accepted", "ok"), ("clipped", "limit"), ("missing", "blocks")]


# --- hostile clients -------------------------------------------------------------------------------

odd_words = st.sampled_from(["", "0.1", "1.0", "s", "t", "kv.pin", "\ud800", "a\nERROR forged", "x" * 200])
words = odd_words | st.text(max_size=9)
numbers = st.integers() | st.floats() | st.sampled_from([2**64 - 1, 2**64, 10**400, 1e-9, 5, 600])
junk = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
good = {
    "session": st.sampled_from("stuv"),
    "block_hashes": st.lists(
        st.builds(lambda number, index: 1000 * number + index, st.integers(1, 6), st.integers(0, 6))
        | st.integers(0, 2**64 - 1),
        max_size=40,
    ),
    "source_control_endpoint": st.sampled_from([PEER, "evil:1"]),
    "ttl_s": st.sampled_from([0.001, 5, 600, 1e9]),
    "wait_s": st.sampled_from([0.01, 1e9]),
    "next_use_s": st.sampled_from([0.001, 60, 1e9]),
    "priority": st.integers(0, 3),
}
payloads = st.fixed_dictionaries({}, optional=good) | st.dictionaries(
    st.sampled_from([*good, "tier", "mode", "no_retain"]), junk, max_size=4
)
actions = st.fixed_dictionaries(
    {
        "action_type": st.sampled_from([*TYPES, "kv.teleport"]) | words,
        "action_version": st.sampled_from(["0.1", "1.0"]) | words,
    },
    optional={"action_id": words, "payload": payloads | junk},
)
envelopes = st.fixed_dictionaries(
    {"protocol_version": st.just("0.1") | words, "actions": st.lists(actions | junk, max_size=20) | junk}
)
short = st.dictionaries(
    st.sampled_from(["ttl_s", "pin", "release", "wait_s", "from", "next_use_s", "priority", "hints"]),
    junk | envelopes | st.sampled_from([0.001, 5, 1, "s", True, [PEER]]),
    max_size=5,
)
hostile = st.fixed_dictionaries({}, optional={"kv_hint": envelopes | junk, "kvtier": short | junk})


def _as_records(found: Any) -> KvHintsEnvelope | None:
    """Return an envelope of vLLM's own records, which validate nothing."""
    if not isinstance(found, dict) or not isinstance(found.get("actions"), list):
        return None
    fields = ("action_id", "action_type", "action_version", "payload")
    records = [KvHintAction(*map(it.get, fields)) for it in found["actions"] if isinstance(it, dict)]
    return KvHintsEnvelope(found.get("protocol_version"), "m", records)


class Hostile:
    """An engine that receives arbitrary envelopes, compared with the same engine without them."""

    def __init__(self) -> None:
        self.clock = Clock()
        limits = Limits(max_wait_s=0.02)
        self.it = Engine(dummy(), slots=SLOTS, limits=limits, clock=self.clock, peers=[PEER])
        self.turns = 0
        self.running: list[ReqContext] = []

    def end(self, most: int) -> None:
        """End the oldest requests until at most ``most`` run."""
        while len(self.running) > most:
            self.it.manager.on_request_finished(self.running.pop(0))

    def serve(self, params: Any, number: int, length: int) -> None:
        """Serve a request with hints; check its hits and its remaining state."""
        self.turns += 1
        name, keys = f"turn {self.turns}", prompt(number, length)
        found = params.get("kv_hint") if isinstance(params, dict) else None
        context = ReqContext(req_id=name, kv_transfer_params=params, kv_hints=_as_records(found))
        self.it.manager.on_new_request(context)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (place + 1))
        self.load(keys, context)
        self.it.store(keys, context)
        self.it.step([name])
        told = self.it.manager.response_params(name, params)
        json.dumps(told).encode()
        self.running.append(context)
        self.end(most=number % 4)
        self.clock.now += 0.5
        self.it.step()
        core = self.it.core
        assert len(core.claims.pinned) <= core.shared.pin_budget
        assert core.claims.size <= MOST_PER_SLOT * SLOTS
        assert len(self.it.manager.actions.running) <= len(self.running)

    def load(self, keys: list[OffloadKey], context: ReqContext) -> None:
        """Wait for answers, no longer than the bounds; load the hits, and compare the bytes."""
        steps = 0
        while (scanned := self.it.scan(keys, context))[1]:
            self.it.step()
            self.clock.now += 0.01
            steps += 1
            assert steps < 2000
        found, _ = scanned
        if found:
            loaded = self.it.manager.prepare_load(keys[:found], context)
            assert self.it.read(loaded) == [content(key) for key in keys[:found]]
            self.it.step()
            self.it.manager.complete_load(set(keys[:found]), context)


def test_hostile_hints_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    it = Hostile()

    @settings(max_examples=effort(100, 10_000), deadline=None)
    @given(hostile, st.integers(1, 6), st.integers(0, 6))
    def run(params: Any, number: int, length: int) -> None:
        it.serve(params, number, length)

    try:
        run()
        hinted = [line for line in caplog.messages if "hints ignored" in line]
        assert len(hinted) <= 2 + it.turns * 0.6 / 30, "at most one in 30 seconds"
        assert not any("\nERROR" in line for line in caplog.messages)
        for number in range(1, 7):  # afterwards only requests without hints run
            it.serve(None, number, 6)
        it.end(most=0)
        assert not it.it.manager.actions.running
        it.clock.now += LONGEST_S + REMEMBERED_S
        it.it.step()
        it.it.step()
        assert it.it.core.claims.is_empty, "all times are over"
        it.it.manager.reset_cache()
        it.it.check_idle()
    finally:
        it.it.manager.shutdown()
