"""The settings sent to the tier process, the channel, and the heartbeat."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from pydantic import SecretStr

from kvtier._execution.executor import NamedTier
from kvtier._isolation.channel import Channel
from kvtier._isolation.heartbeat import Heartbeat, SupervisorTimes
from kvtier._isolation.remote import RemoteExecutor
from kvtier._isolation.wire import Frames, TierSettings
from kvtier.errors import ConfigError
from tests.common import named_tier

from .conftest import make_tier

# --- settings ------------------------------------------------------------------------------------


KINDS = """
from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, SecretStr
from kvtier_testing.dummy import DummyConfig, DummyTier

class Login(BaseModel):
    user: str
    token: SecretStr

class Colour(Enum):
    RED = "red"

class Config(DummyConfig):
    type: str = "acme-kinds"
    root: Path
    mode: Literal["fast", "safe"] = "safe"
    password: SecretStr | None = None
    logins: tuple[Login, ...] = ()
    colours: dict[str, Colour] = {}
    room: ByteSize = ByteSize(1)

class Tier(DummyTier):
    Config = Config
"""


def test_settings_are_rebuilt(install_distribution: Any) -> None:
    install_distribution("acme-kinds", KINDS, {"acme-kinds": "Tier"})
    given: dict[str, Any] = {
        "root": "/somewhere",
        "mode": "fast",
        "password": "correct-horse",
        "logins": [{"user": "me", "token": "sesame"}],
        "colours": {"a": "red"},
        "room": 4096,
        "name": "near",
        "deadline_s": 0.5,
        "complete_index": False,
    }
    tier = make_tier("acme-kinds", **given)
    spelled = TierSettings.of(named_tier("near", tier))
    assert spelled.settings == {"type": "acme-kinds", **given}
    assert "correct-horse" not in repr(tier.config)
    again = spelled.make()
    assert (again.name, again.tier.config) == ("near", tier.config)
    assert type(again.tier) is type(tier)
    assert again.make() is not again.tier
    password = again.tier.config.model_dump()["password"]
    assert isinstance(password, SecretStr)


ODD_TIER = """
from pydantic import Field, field_validator
from kvtier_testing.dummy import DummyConfig, DummyTier

class Config(DummyConfig):
    type: str = "acme-odd"
    word: str = "x"

    @field_validator("word")
    @classmethod
    def _longer(cls, value):
        return value + "!"

class Tier(DummyTier):
    Config = Config
"""


def test_unstable_settings_are_refused(install_distribution: Any) -> None:
    install_distribution("acme-odd", ODD_TIER, {"acme-odd": "Tier"})
    with pytest.raises(ConfigError, match=r"tier odd cannot run .* differ when they are read again"):
        TierSettings.of(NamedTier("odd", lambda: make_tier("acme-odd", word="y")))


# --- the channel ----------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def frame(number: int, size: int) -> bytes:
    body = number.to_bytes(4, "little") + bytes(size)
    return len(body).to_bytes(4, "little") + body


def test_frame_is_one_system_call(pair: Any) -> None:
    sock = Mock(wraps=pair[0])
    Channel(sock, lambda: None).add(frame(1, 40_000))
    assert [name for name, *_ in sock.method_calls] == ["send"]


def test_full_socket_keeps_order(pair: Any) -> None:
    ours, theirs = pair
    full: list[None] = []
    channel = Channel(ours, lambda: full.append(None))
    for number in range(50):
        channel.add(frame(number, 40_000))
    assert channel.is_full
    assert full == [None]  # reported once: a poller must not wake up repeatedly meanwhile
    frames = Frames()
    found: list[int] = []
    while len(found) < 50:
        found += [int.from_bytes(body[:4], "little") for body in frames.feed(theirs.recv(1 << 16))]
        channel.flush()
    assert found == list(range(50))
    assert not channel.is_full


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_no_memory_delays_frames(pair: Any, number: int) -> None:
    """A lost command would keep its slots forever."""
    ours, theirs = pair
    sock = Mock(wraps=ours)
    sock.send.side_effect = [OSError(number, "no memory"), DEFAULT]
    channel = Channel(sock, lambda: None)
    channel.add(frame(1, 8))
    assert (channel.is_full, channel.lacks_memory) == (True, True)
    channel.flush()
    assert theirs.recv(100) == frame(1, 8)
    assert (channel.is_full, channel.lacks_memory) == (False, False)


def test_threads_send_whole_frames(pair: Any) -> None:
    ours, theirs = pair
    channel = Channel(ours, lambda: None)

    def add(name: int) -> None:
        for number in range(300):
            channel.add(frame(name * 1000 + number, 500))

    threads = [threading.Thread(target=add, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    frames = Frames()
    found: list[int] = []
    while len(found) < 1200:
        found += [int.from_bytes(body[:4], "little") for body in frames.feed(theirs.recv(1 << 16))]
        channel.flush()
    for thread in threads:
        thread.join()
    for name in range(4):
        assert [number for number in found if number // 1000 == name] == [name * 1000 + n for n in range(300)]


def test_absent_reader_raises_nothing(pair: Any) -> None:
    ours, theirs = pair
    channel = Channel(ours, lambda: None)
    theirs.close()
    channel.add(b"x")
    channel.add(b"y")
    assert (len(channel), channel.is_full) == (0, False)


def test_socket_stays_open_during_send(pair: Any) -> None:
    begun, go, ended = threading.Event(), threading.Event(), list[str]()

    def send(*_: object) -> int:
        begun.set()
        go.wait()
        ended.append("sent")
        return 1

    channel = Channel(Mock(wraps=pair[0], send=send, close=lambda: ended.append("closed")), lambda: None)
    threads = [threading.Thread(target=partial(channel.add, b"x")), threading.Thread(target=channel.close)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert ended == ["sent", "closed"]


# --- the heartbeat -----------------------------------------------------------------------------------


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("kvtier._isolation.heartbeat.time.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


PACE = SupervisorTimes(heartbeat_s=1, silent_timeout_s=3, start_timeout_s=10)


def beats_until_silent(heartbeat: Heartbeat, clock: Clock, step_s: float = 1.0) -> int:
    for count in range(1, 100):
        clock.now_s += step_s
        if heartbeat.check_silence():
            return count
    raise AssertionError("never")


def test_silence_allows_slow_start(clock: Clock) -> None:
    asked: list[float] = []
    tiers_up: list[bool] = []
    heartbeat = Heartbeat(PACE, lambda: asked.append(clock.now_s), lambda: any(tiers_up))
    assert not heartbeat.check_silence()
    assert asked == [100]
    assert beats_until_silent(heartbeat, clock) == 10
    heartbeat.acknowledge()
    assert not heartbeat.check_silence()
    assert beats_until_silent(heartbeat, clock) == 11  # a ping with the first, ten more without an answer
    tiers_up.append(True)
    heartbeat.acknowledge()
    assert not heartbeat.check_silence()
    assert beats_until_silent(heartbeat, clock) == 4
    assert len(asked) == 3


def test_one_ping_per_beat(clock: Clock) -> None:
    asked: list[float] = []
    heartbeat = Heartbeat(PACE, lambda: asked.append(clock.now_s), lambda: True)
    for _ in range(40):
        assert not heartbeat.check_silence()
        heartbeat.acknowledge()
        clock.now_s += 0.25
    assert len(asked) == 10
    assert heartbeat.has_started


def test_stopped_time_is_excused(clock: Clock) -> None:
    heartbeat = Heartbeat(PACE, lambda: None, lambda: True)
    heartbeat.acknowledge()
    heartbeat.check_silence()
    clock.now_s += 3600
    assert not heartbeat.check_silence()
    assert heartbeat.wait_s == 1


# --- the owner on an event loop ------------------------------------------------------------------


async def test_failing_event_passes() -> None:
    class Silent:
        """A process that sends only the messages given by the test."""

        def __init__(self, notify: Callable[[], None]) -> None:
            self.events: deque[Any] = deque()
            self.activity = ()
            self.notify = notify

        def start(self) -> None: ...

        def close(self, *_: float) -> None: ...

    taken: list[object] = []
    has_taken_all = asyncio.Event()

    def post(event: object) -> None:
        taken.append(event)
        if event == 1:
            raise RuntimeError("a bug")
        has_taken_all.set()

    made: list[Silent] = []

    def make(notify: Callable[[], None]) -> Any:
        made.append(Silent(notify))
        return made[0]

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with RemoteExecutor(make, post):
        made[0].events.extend((1, 2))
        made[0].notify()
        async with asyncio.timeout(30):
            await has_taken_all.wait()
    assert taken == [1, 2]
