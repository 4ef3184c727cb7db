"""Input from peers: frames of any bytes, proofs, and refused settings."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier._settings import validation
from kvtier.errors import ConfigError
from kvtier_nixl import NixlConfig
from kvtier_nixl import _protocol as protocol
from kvtier_nixl._pool import ChunkPool

pytestmark = pytest.mark.anyio


async def received(sent: bytes, limit_bytes: int = protocol.MAX_FRAME_BYTES) -> protocol.AnyMessage:
    reader = asyncio.StreamReader()
    reader.feed_data(sent)
    reader.feed_eof()
    return await protocol.receive(reader, limit_bytes)


MESSAGES = st.one_of(
    st.builds(protocol.LookupKeys, st.lists(st.binary(min_size=1, max_size=68), max_size=8).map(tuple)),
    st.builds(protocol.LeaseChunks, st.lists(st.binary(min_size=1, max_size=68), max_size=8).map(tuple)),
    st.builds(protocol.Release, st.integers(0, 2**60)),
    st.builds(protocol.Found, st.lists(st.booleans(), max_size=8).map(tuple)),
    st.builds(protocol.Refused, st.text(max_size=100)),
)


@given(MESSAGES)
async def test_messages_round_trip(message: protocol.AnyMessage) -> None:
    assert await received(protocol.encode(message)) == message


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(framed)))
async def test_any_bytes_parse_or_are_refused(sent: bytes) -> None:
    try:
        message = await received(sent)
    except (protocol.PeerProtocolError, ConnectionError):
        return
    assert isinstance(message, protocol.Message)
    assert await received(protocol.encode(message)) == message


@given(MESSAGES, st.integers(0), st.integers(1, 255))  # hypothesis draws nothing within the event loop
async def test_damage_parses_or_is_refused(message: protocol.AnyMessage, place: int, change: int) -> None:
    frame = bytearray(protocol.encode(message))
    frame[place % len(frame)] ^= change
    with suppress(protocol.PeerProtocolError, ConnectionError):
        assert isinstance(await received(bytes(frame)), protocol.Message)


@pytest.mark.parametrize("limit_bytes", [protocol.MAX_HELLO_BYTES, protocol.MAX_FRAME_BYTES])
async def test_long_frame_is_refused_early(limit_bytes: int) -> None:
    with pytest.raises(protocol.PeerProtocolError, match="exceeds the limit"):
        await received(struct.pack(">I", limit_bytes + 1), limit_bytes)


async def test_key_limit_is_enforced() -> None:
    keys = tuple(bytes([1]) * 68 for _ in range(protocol.MAX_KEYS))
    assert await received(protocol.encode(protocol.LeaseChunks(keys))) == protocol.LeaseChunks(keys)
    leased = protocol.Leased(2**60, 600.0, (2**63,) * protocol.MAX_KEYS, (bytes(128),) * protocol.MAX_KEYS)
    assert await received(protocol.encode(leased)) == leased
    with pytest.raises(protocol.PeerProtocolError, match="invalid frame"):
        await received(protocol.encode(protocol.LookupKeys((*keys, b"one more"))))


@pytest.mark.parametrize("lasts_s", [-1.0, float("inf"), float("nan")])
def test_lease_expires(lasts_s: float) -> None:
    with pytest.raises(protocol.PeerProtocolError, match="invalid frame"):
        protocol.decode(protocol.encode(protocol.Leased(1, lasts_s, (), ()))[4:])


def test_proof_binds_everything() -> None:
    challenge = protocol.Challenge(1, b"n" * 32)
    proofs = {
        protocol.proof(secret, side, one, nonce, cache, agent)
        for secret in (b"", b"secret")
        for side in (b"client", b"server")
        for one in (challenge, protocol.Challenge(2, b"n" * 32), protocol.Challenge(1, b"m" * 32))
        for nonce in (b"", b"nonce")
        for cache in (b"", b"identity", b"nonceidentity")
        for agent in (b"", protocol.agent_digest("a", b"b"), protocol.agent_digest("ab", b""))
    }
    assert len(proofs) == 2 * 2 * 3 * 2 * 3 * 3
    assert all(map(protocol.is_proof, proofs, proofs))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "0.0.0.0:1234"}, "secret_file is missing: 0.0.0.0:1234 is no loopback address"),
        ({"peers": ["10.0.0.1:1234"]}, "secret_file is missing: 10.0.0.1:1234"),
        ({"peers": ["127.0.0.1"]}, "is not host:port"),
        ({"peers": ["127.0.0.1:0"]}, "has no valid port"),
        ({"listen": "::1:1234"}, "is not host:port"),
        ({"serve_bytes": 0}, "serve_bytes"),
        ({"answer_timeout_s": 11, "deadline_s": 60}, "answer_timeout_s"),
        (
            {"deadline_s": 1.9},
            r"answer_timeout_s \(1\) is more than half of deadline_s \(1.9\).*lower answer_timeout_s to 0.95",
        ),
    ],
)
def test_wrong_settings_name_field(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validation.build(NixlConfig, settings)


def test_answer_takes_half_the_deadline() -> None:
    assert validation.build(NixlConfig, {"deadline_s": 4.0, "answer_timeout_s": 2.0}).answer_timeout_s == 2.0


def test_only_loopback_needs_no_secret(tmp_path: Path) -> None:
    local = ["127.0.0.1:1", "[::1]:1", "localhost:1"]
    assert validation.build(NixlConfig, {"peers": local}).peers == tuple(local)
    public = {"listen": "0.0.0.0:0", "secret_file": tmp_path / "secret"}
    assert validation.build(NixlConfig, public).secret_file == tmp_path / "secret"


def test_readme_lists_settings() -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    for name, field in NixlConfig.model_fields.items():
        if name in NixlConfig.__annotations__ and name != "type":
            assert f"| `{name}` |" in readme
            assert str(field.description) in readme


class TestPool:
    """Eviction of chunks, and chunks kept by leases."""

    def filled(self, rows: int = 4, lease_s: float = 10.0) -> tuple[ChunkPool, list[Any]]:
        evicted: list[Any] = []
        pool = ChunkPool(rows, lease_s, evicted.extend)
        for name in range(rows):
            (row,) = pool.reserve(1, 0.0)
            pool.publish(self.key(name), row, b"trailer")
        return pool, evicted

    @staticmethod
    def key(name: int) -> Any:
        return bytes([name])

    def test_oldest_unleased_leave(self) -> None:
        pool, evicted = self.filled()
        number, chunks = pool.lease([self.key(0), self.key(9)], 0.0)
        assert chunks[0] is not None
        assert chunks[1] is None
        pool.touch([self.key(1)])
        assert len(pool.reserve(1, 1.0)) == 1
        assert evicted == [self.key(2)]
        assert len(pool.reserve(9, 1.0)) == 2  # all except the leased chunk
        pool.release(number)
        assert len(pool.reserve(9, 2.0)) == 1

    def test_discarded_row_waits_for_lease(self) -> None:
        pool, _ = self.filled()
        number, _ = pool.lease([self.key(0)], 0.0)
        pool.clear()
        assert len(pool.reserve(9, 9.9)) == 3
        assert len(pool.reserve(9, 10.0)) == 1
        pool.release(number)
        assert not pool.reserve(9, 10.0)

    def test_leases_take_half_the_rows(self) -> None:
        pool, _ = self.filled()
        _, chunks = pool.lease([self.key(name) for name in range(4)], 0.0)
        assert [chunk is not None for chunk in chunks] == [True, True, False, False]
        assert len(pool.reserve(9, 1.0)) == 2
