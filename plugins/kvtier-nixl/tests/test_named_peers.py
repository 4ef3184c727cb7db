"""A client names the peers that hold its chunks. They are asked first, and the other peers only if needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest
from engines import opened, peers_of, until_found

from kvtier._settings import validation
from kvtier.errors import ConfigError
from kvtier.keys import OffloadKey
from kvtier.tiers import Status
from kvtier_nixl import NixlConfig, _peers
from kvtier_nixl._peers import Peer
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers._servers import free_port
from kvtier_testing.tiers.rig import keys

EIGHT = range(8)


@asynccontextmanager
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[TierRig, list[TierRig], list[str]]]:
    """A tier that reads from three others in this process, and the addresses of the peers that it asked."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(opened(listen=address)) for address in addresses]
        it = await stack.enter_async_context(opened(*addresses))
        for other in others:
            await other.put(range(200, 201))
            await until_found(it, range(200, 201))
            await other.tier.discard(keys(range(200, 201)))
        asked: list[str] = []
        lookup = Peer.lookup

        async def noted(peer: Peer, wanted: Sequence[OffloadKey]) -> list[bool]:
            asked.append(peer.address)
            return await lookup(peer, wanted)

        monkeypatch.setattr(Peer, "lookup", noted)
        monkeypatch.setattr(_peers, "_ASK_ALL_EVERY_S", 1000.0)
        monkeypatch.setattr(peers_of(it), "patience_s", 30.0)  # A busy machine does not count as late.
        yield it, others, asked


@pytest.mark.anyio
async def test_named_peer_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(monkeypatch) as (it, others, asked):
        first, second, third = (other.tier.config.listen for other in others)
        await others[0].put(EIGHT)
        assert all(await it.tier.contains_at(keys(EIGHT), [first, "203.0.113.1:1"]))
        assert asked == [first], "one message"
        assert set(await it.get(EIGHT)) == {Status.OK}
        assert asked == [first], "who has it is known"

        asked.clear()
        await others[1].put(range(8, 16))
        found = await it.tier.contains_at(keys(range(20)), [first])
        assert list(found) == 16 * [True] + 4 * [False]
        assert asked == [first, second, third], "the others may have what it lacks"

        asked.clear()
        for _ in range(20):  # as a waiting request does
            assert not any(await it.tier.contains_at(keys(range(16, 20)), [first]))
        assert asked == 20 * [first], "not again so soon"
        assert not any(await it.contains(range(16, 20)))
        assert sorted(asked[20:]) == sorted([first, second, third])

        asked.clear()
        monkeypatch.setattr(_peers, "_ASK_ALL_EVERY_S", 0.0)
        await others[2].put(range(16, 20))
        assert all(await it.tier.contains_at(keys(range(16, 20)), [first])), "later it is"
        assert asked == [first, second, third]
        assert len(peers_of(it)._asked_s) == 4, "what is past is forgotten"


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["unknown", "gone", "late"])
async def test_all_peers_asked_on_silence(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async with fleet(monkeypatch) as (it, others, asked):
        first, second, third = (other.tier.config.listen for other in others)
        await others[1].put(EIGHT)
        assert not any(await it.tier.contains_at(keys(range(8, 16)), [first]))
        asked.clear()
        named = "203.0.113.1:1" if how == "unknown" else first
        may_answer = anyio.Event()
        if how == "gone":
            await others[0].tier.reset()
            with anyio.fail_after(60):
                while peers_of(it).members[0].is_connected:  # noqa: ASYNC110 - nothing tells of it
                    await anyio.sleep(0.01)
        elif how == "late":
            lookup = Peer.lookup

            async def answers_late(peer: Peer, wanted: Sequence[OffloadKey]) -> list[bool]:
                if peer.address == first:
                    await may_answer.wait()
                return await lookup(peer, wanted)

            monkeypatch.setattr(Peer, "lookup", answers_late)
            monkeypatch.setattr(peers_of(it), "patience_s", 1.0)
        await others[1].put(range(8, 16))  # the keys were looked up a moment ago
        try:
            with anyio.fail_after(60):
                for _ in range(2):
                    assert all(await it.tier.contains_at(keys(range(16)), [named]))
            assert {second, third} <= set(asked)
            assert peers_of(it).members[0].is_connected is (how != "gone"), "nobody waited long for it"
        finally:
            may_answer.set()


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, "127.0.0.1:18570"),
        ({"listen": "127.0.0.1:0"}, None),
        ({"listen": "[::]:18570", "secret_file": "/secret"}, None),
        (
            {"listen": "0.0.0.0:18570", "secret_file": "/secret", "advertise": "10.0.0.1:18570"},
            "10.0.0.1:18570",
        ),
    ],
)
def test_listen_address_is_advertised(settings: dict[str, str], address: str | None) -> None:
    assert validation.build(NixlConfig, settings).peer_address() == address


def test_advertised_address_has_port() -> None:
    with pytest.raises(ConfigError, match="advertise"):
        validation.build(NixlConfig, {"advertise": "10.0.0.1:0"})


def test_router_is_told_the_address() -> None:
    told = {"router_capabilities": ["router_hint"], "control_advertise_host": "127.0.0.1"}
    assert validation.build(NixlConfig, {**told, "control_ports": [18570]}).peer_address()
    with pytest.raises(ConfigError, match="peers reach this engine at 127"):
        validation.build(NixlConfig, {**told, "control_ports": [18571]})
