"""The protocol: messages survive the wire; malformed and impossible ones are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from pydantic import ByteSize

from kvtier._core.messages import (
    Answer,
    Command,
    Get,
    GetEnded,
    Put,
    PutEnded,
    Removed,
    Reset,
    TierDown,
    TierUp,
    Touch,
    TransferHealth,
)
from kvtier._execution.executor import NamedTier
from kvtier._isolation import wire
from kvtier._isolation.decoder import MessageDecoder
from kvtier._isolation.wire import Frames, WireError
from kvtier.keys import OffloadKey
from kvtier.tiers import Usage
from kvtier.tiers._activity import TierActivity, usage_of
from kvtier_testing.dummy import DummyConfig, DummyTier

numbers = st.integers(0, 2**63 - 1)
keys = st.lists(st.binary(min_size=1, max_size=68).map(OffloadKey), max_size=5)
slots = st.lists(numbers, max_size=5)
words = st.text(max_size=20)
counts = st.dictionaries(words, numbers, max_size=3)
seconds = st.floats(0, 1e9)
health = st.sampled_from(TransferHealth)
answers = st.lists(st.sampled_from(Answer), max_size=5)
commands = st.one_of(
    st.builds(Put, numbers, numbers, keys, slots),
    st.builds(Get, numbers, numbers, keys, slots, st.booleans(), st.lists(words, max_size=3).map(tuple)),
    st.builds(Touch, numbers, keys),
    st.builds(Reset, numbers, numbers),
)


ends = st.one_of(
    st.builds(PutEnded, numbers, st.lists(st.booleans(), max_size=5), counts, seconds, health, words),
    st.builds(GetEnded, numbers, answers, counts, seconds, health, words),
)
tier_events = st.one_of(
    st.builds(TierDown, numbers, st.text(max_size=50)),
    st.builds(TierUp, numbers, numbers),
    st.builds(Removed, numbers, keys),
)


@given(st.lists(commands, max_size=5), st.lists(ends | tier_events, max_size=5))
def test_messages_round_trip(orders: list[Command], reports: list[wire.Report]) -> None:
    sent, received = Frames().feed(wire.pack(orders) + wire.pack(reports))
    assert wire.unpack(wire.ORDERS, sent) == orders
    assert wire.unpack(wire.REPORTS, received) == reports


@given(st.lists(st.binary(max_size=20), max_size=5), st.lists(st.integers(1, 30), min_size=1))
def test_frames_survive_any_cut(bodies: list[bytes], steps: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    frames = Frames()
    found: list[bytes] = []
    for step in steps * (len(stream) + 1):
        found += frames.feed(stream[:step])
        stream = stream[step:]
        if not stream:
            break
    assert found == bodies


@pytest.mark.parametrize(
    "report",
    [
        [[1, 7, [True], {}, -1.0, 0, ""]],
        [[1, 7, [True], {}, 0.0, 9, ""]],
        [[1, -1, [True], {}, 0.0, 0, ""]],
        [[1, 7, [True], {"x" * 65: 1}, 0.0, 0, ""]],
        [[2, 7, [3], {}, 0.0, 0, ""]],
        [[5, 0, [b""]]],
        [[5, 0, [b"x" * 69]]],
        [[9, 30, "kvtier", "x" * 20_000]],
        [[99]],
        [7],
        {},
    ],
)
def test_out_of_bounds_refused(report: object) -> None:
    with pytest.raises(WireError):
        wire.unpack(wire.REPORTS, msgspec.msgpack.encode(report))


def test_numbers_have_bounds() -> None:
    """The core and its estimates cannot handle an infinite number."""
    kinds = inspect.multi_type_info([list[wire.Order], list[wire.Report], wire.Hello])
    found = [one for kind in kinds for one in numbers_in(kind)]
    assert {type(one) for one in found} == {inspect.IntType, inspect.FloatType}
    assert [one for one in found if one.ge is None or one.le is None] == []


def numbers_in(kind: object) -> Iterator[inspect.IntType | inspect.FloatType]:
    """Yield the types of all numbers in a type."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        yield kind
    elif isinstance(kind, inspect.Type | inspect.Field):
        for name in kind.__struct_fields__:
            yield from numbers_in(getattr(kind, name))
    elif isinstance(kind, tuple):
        for part in kind:
            yield from numbers_in(part)


def test_oversized_frame_is_refused() -> None:
    with pytest.raises(WireError, match="are possible"):
        list(Frames().feed((2**31).to_bytes(4, "little")))


NAMES = [OffloadKey(b"k1"), OffloadKey(b"k2")]


class FakeLink:
    """A link without a process that keeps sent messages in flight."""

    def __init__(self) -> None:
        self.in_flight: dict[int, Put | Get] = {
            1: Put(1, 0, NAMES, [0, 1]),
            2: Get(2, 0, NAMES, [0], False),
        }


@pytest.fixture
def decoder() -> MessageDecoder:
    return MessageDecoder([NamedTier("dummy", lambda: DummyTier(DummyConfig()))])


def decode(decoder: MessageDecoder, link: FakeLink, *reports: wire.Report) -> bool:
    (frame,) = Frames().feed(wire.pack(reports))
    return decoder.decode(frame, link)  # type: ignore[arg-type]


def put_ended(id_: int = 1, kept: int = 2, **fields: Any) -> PutEnded:
    return PutEnded(id_, [True] * kept, **fields)


def get_ended(**fields: Any) -> GetEnded:
    return GetEnded(2, [Answer.MISSING] * 2, **fields)


@pytest.mark.parametrize(
    "report",
    [
        put_ended(3),
        put_ended(2),
        put_ended(kept=1),
        put_ended(reasons={"a word of nobody": 1}),
        put_ended(reasons={"full": 3}),
        put_ended(retry="perhaps"),
        put_ended(seconds=float("nan")),
        put_ended(seconds=float("inf")),
        *(
            get_ended(**{name: value})
            for name in ("seconds", "elapsed_s", "lookup_s")
            for value in (float("nan"), float("inf"), -1.0)
        ),
        GetEnded(2, [Answer.COPIED]),
        GetEnded(2, [Answer.MISSING, Answer.COPIED]),  # into which slot?
        TierUp(1, 0),
        TierDown(1, "x"),
        Removed(1, []),
        wire.Activity(1, 0, 0, 0, 0, None),
    ],
)
def test_impossible_messages_are_stopped(decoder: MessageDecoder, report: wire.Report) -> None:
    with pytest.raises(WireError):
        decode(decoder, FakeLink(), report)
    assert not decoder.events


def test_subclasses_become_plain() -> None:
    class Word(str):
        __slots__ = ()

    said = PutEnded(1, [True], {Word("full"): ByteSize(1)}, 0.5, TransferHealth.GOOD, "")
    (frame,) = Frames().feed(wire.pack([said, wire.Activity(0, 0, 0, 0, 0, (ByteSize(5), ByteSize(7)))]))
    put, activity = wire.unpack(wire.REPORTS, frame)
    assert isinstance(put, PutEnded)
    assert isinstance(activity, wire.Activity)
    assert (put.reasons, activity.usage) == ({"full": 1}, (5, 7))
    assert {type(nbytes) for nbytes in activity.usage or ()} == {int}


def test_any_usage_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DummyTier(DummyConfig())
    monkeypatch.setattr(tier, "usage", lambda: Usage(-1, 2**64))
    activity = TierActivity(1)
    activity.usage = usage_of(tier)
    (frame,) = Frames().feed(wire.pack([wire.activity_of(0, activity)]))
    (got,) = wire.unpack(wire.REPORTS, frame)
    assert isinstance(got, wire.Activity)
    assert got.usage == (0, 2**63 - 1)


def test_command_ends_once(decoder: MessageDecoder) -> None:
    link = FakeLink()
    decode(decoder, link, put_ended())
    with pytest.raises(WireError, match="not in flight"):
        decode(decoder, link, put_ended())
    assert [type(event) for event in decoder.events] == [PutEnded]


def test_up_proves_event_loop(decoder: MessageDecoder) -> None:
    """The limit for open tiers does not apply to a long delay during opening."""
    link = FakeLink()
    assert not decoder.are_all_up
    assert not decode(decoder, link, wire.log_line(30, "kvtier", "it imports"))
    assert decode(decoder, link, TierUp(0, 0))
    assert decoder.are_all_up
    decode(decoder, link, TierDown(0, "x"))
    assert not decoder.are_all_up
    decode(decoder, link, TierUp(0, 1))
    decoder.clear_activity()
    assert not decoder.are_all_up


def test_dead_process_changes_no_tier(
    decoder: MessageDecoder,
) -> None:
    (frame,) = Frames().feed(wire.pack([TierUp(0, 0), TierDown(0, "x"), put_ended()]))
    decoder.decode(frame, FakeLink(), is_last=True)  # type: ignore[arg-type]
    assert [type(event) for event in decoder.events] == [PutEnded]
