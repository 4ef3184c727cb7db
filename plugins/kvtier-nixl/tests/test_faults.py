"""Peers that die, hang, are late or misbehave cause a miss with a reason, never a wrong byte or a hang."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from engines import CHUNK_BYTES, Holder, agent_of, config, identity, opened, peers_of, tier_of, until_found

from kvtier._core.messages import Answer
from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import Status
from kvtier_nixl import NixlTier, _agent, _peers, _server
from kvtier_nixl import _protocol as protocol
from kvtier_nixl._agent import ReadError
from kvtier_nixl._peers import Lease, Peer, PeerError, Peers
from kvtier_nixl.config import parse_address
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers._servers import free_port
from kvtier_testing.tiers.driver import TierDriver
from kvtier_testing.tiers.rig import keys

pytestmark = pytest.mark.anyio
EIGHT = range(8)


def first_peer(it: TierRig) -> Peer:
    return peers_of(it).members[0]


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[TierRig, TierRig]]:
    """Open a tier with chunks 0 to 7 and a tier that reads from it, both in this process."""
    listen = f"127.0.0.1:{free_port()}"
    async with opened(listen=listen) as near:
        await near.put(EIGHT)
        async with opened(listen, **settings) as it:
            await until_found(it, EIGHT)
            yield near, it


def before_reads(it: TierRig, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Awaitable[None]]) -> None:
    """Run a hook after each lease of chunks, before they are read."""
    agent = agent_of(it)
    read = agent.read

    async def wrapped(*arguments: Any) -> None:
        await act()
        await read(*arguments)

    monkeypatch.setattr(agent, "read", wrapped)


async def test_only_held_chunks_are_got(holder: Holder) -> None:
    async with opened(holder.address, holder.address.replace("127.0.0.1", "localhost")) as it:
        await until_found(it, EIGHT)
        assert set(await it.get(EIGHT)) == {Status.OK}
        await it.put(range(100, 104))
        mixed = await it.outcome_of_get(range(4, 12))
        assert list(mixed.statuses) == 4 * [Status.OK] + 4 * [Status.ABSENT]
        await it.tier.discard(keys(EIGHT))  # This tier has no chunks itself, and the peer keeps its own.
        assert set(await it.get(EIGHT)) == {Status.OK}


@pytest.mark.full  # Similar to the test of a get that waits for receiving memory.
async def test_excess_chunks_come_in_turn(holder: Holder) -> None:
    async with opened(holder.address, receive_bytes=3 * CHUNK_BYTES) as it:
        await until_found(it, EIGHT)
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(it.get, EIGHT)
        assert set(await it.get(EIGHT)) == {Status.OK}


async def test_reset_connection_is_closed() -> None:
    async with pair() as (_, it):
        peer = first_peer(it)
        link = peer._link
        assert link is not None
        lease = await peer.lease(keys(EIGHT))
        link.writer.transport.abort()  # As asyncio does after ECONNRESET, which reports no end of the stream.
        assert not link.reader.at_eof()
        with pytest.raises(PeerError, match="closed"):
            peer.release(lease)
        assert not peer.is_connected


async def test_put_of_evicted_is_refused() -> None:
    async with opened(serve_bytes=4 * CHUNK_BYTES) as it:
        assert await it.put(range(2)) == [Status.OK] * 2
        statuses = await it.put(range(6))  # The two existing chunks make room for the four others.
        assert [status is Status.OK for status in statuses] == await it.contains(range(6))


@pytest.mark.full  # The next two tests cover a loss and a return.
async def test_killed_peer_misses_until_return(holder: Holder, tmp_path: Path) -> None:
    async with opened(holder.address) as it:
        await it.put(range(100, 104))
        await until_found(it, EIGHT)
        await anyio.to_thread.run_sync(holder.kill)
        assert set(await it.get(EIGHT)) <= {Status.ABSENT, Status.FAILED}
        assert set(await it.get(EIGHT)) == {Status.ABSENT}
        assert set(await it.get(range(100, 104))) == {Status.OK}
        with Holder(tmp_path / "again.log", {"listen": holder.address}):
            await until_found(it, EIGHT)
            assert set(await it.get(EIGHT)) == {Status.OK}


async def test_peer_killed_in_transfer_misses(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(holder.address) as it:
        await until_found(it, EIGHT)
        await it.outcome_of_get(EIGHT)

        async def stop() -> None:
            holder.stop()  # ensures that the transfer is in flight at the kill

        before_reads(it, monkeypatch, stop)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_kill_when_in_flight, it, holder)
            outcome = await it.outcome_of_get(EIGHT)
        # If the bytes arrive before the peer ends, only the connection is lost.
        assert outcome.reasons in ({"transfer": 8}, {"connection": 8})


async def _kill_when_in_flight(it: TierRig, holder: Holder) -> None:
    with anyio.fail_after(30):
        while not agent_of(it).reads:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.005)
    holder.kill()


async def test_late_bytes_are_harmless(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: dict[str, Any] = {"deadline_s": 6.0, "answer_timeout_s": 3.0}
    async with opened(holder.address, receive_bytes=8 * CHUNK_BYTES, **waits) as it:
        lost: list[str] = []
        monkeypatch.setattr(it.tier, "_context", replace(tier_of(it)._context, lost=lost.append))
        await until_found(it, EIGHT)

        async def stop() -> None:
            holder.stop()

        before_reads(it, monkeypatch, stop)
        batch, slots = it.empty(EIGHT)
        outcome = await it.tier.get(batch)
        slots.reuse()
        assert outcome.reasons == {"timeout": 8}
        assert not first_peer(it).is_connected
        agent = agent_of(it)
        assert agent.reads  # The transfer itself continues.
        assert lost  # It holds all receiving memory, so kvtier would reopen the tier.
        assert set(await it.get(EIGHT)) == {Status.ABSENT}
        monkeypatch.undo()
        holder.resume()
        with anyio.fail_after(60):
            while agent.given_up_rows:  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.01)
        slots.check_reused("a read that was given up")
        await until_found(it, EIGHT)
        assert set(await it.get(EIGHT)) == {Status.OK}


async def test_unreadable_peer_is_used_less(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its control channel works, as behind a firewall."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    async with opened(holder.address) as it:
        await until_found(it, EIGHT)
        agent = agent_of(it)

        async def read(_peer: str, _addresses: Sequence[int], rows: Sequence[int]) -> None:
            agent.free_rows(rows)
            raise ReadError("unreachable")

        with monkeypatch.context() as patch:
            patch.setattr(agent, "read", read)
            patch.setattr(_peers, "anyio", SimpleNamespace(sleep=sleep))
            for _ in range(4):
                assert (await it.outcome_of_get(EIGHT)).reasons == {"transfer": 8}
                await until_found(it, EIGHT)
            assert pauses == [0.2, 0.4, 0.8, 1.6]
            patch.undo()
            assert set(await it.get(EIGHT)) == {Status.OK}
            first_peer(it).drop("of the test")
            patch.setattr(_peers, "anyio", SimpleNamespace(sleep=sleep))
            await until_found(it, EIGHT)
        assert pauses[4:] == [0.2]


async def test_get_waiting_for_memory_keeps_peer() -> None:
    async with pair(deadline_s=6.0, answer_timeout_s=3.0, receive_bytes=2 * CHUNK_BYTES) as (_, it):
        agent = agent_of(it)
        rows = await agent.take_rows(2)
        assert (await it.outcome_of_get(EIGHT)).reasons == {"timeout": 8}
        assert first_peer(it).is_connected
        agent.free_rows(rows)
        assert set(await it.get(EIGHT)) == {Status.OK}


async def test_stopped_peer_costs_one_lookup(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(holder.address, answer_timeout_s=3.0) as it:
        await until_found(it, EIGHT)
        lookups: list[Peer] = []
        lookup = Peer.lookup

        async def counted(peer: Peer, wanted: Sequence[OffloadKey]) -> list[bool]:
            lookups.append(peer)
            return await lookup(peer, wanted)

        monkeypatch.setattr(Peer, "lookup", counted)
        holder.stop()
        for _ in range(2):
            assert not any(await it.contains(EIGHT))
            assert not first_peer(it).is_connected
            assert len(lookups) == 1
        holder.resume()
        await until_found(it, EIGHT)


async def test_late_peer_is_not_awaited(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    late = f"127.0.0.1:{free_port()}"
    async with opened(listen=late) as near:
        await near.put(range(8, 16))
        async with opened(holder.address, late) as it:
            await until_found(it, range(16))
            may_answer, asked = anyio.Event(), 0
            answer = _server.ControlServer._answer

            async def answered_late(*arguments: Any) -> None:
                nonlocal asked
                asked += 1
                await may_answer.wait()
                await answer(*arguments)

            monkeypatch.setattr(_server.ControlServer, "_answer", answered_late)
            await it.contains(range(16))  # The connection awaits this request with the original method.
            for _ in range(2):
                assert list(await it.contains(range(16))) == 8 * [True] + 8 * [False]
            assert asked == 1, "it is not asked again before it has answered"
            peers = peers_of(it).members
            assert all(peer.is_connected for peer in peers), "nobody has waited for answer_timeout_s"
            may_answer.set()
            await until_found(it, range(16))


async def test_other_holder_replaces_late_peer(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    other = f"127.0.0.1:{free_port()}"
    async with opened(listen=other) as near:
        await near.put(EIGHT)
        async with opened(holder.address, other) as it:
            peers = peers_of(it).members
            with anyio.fail_after(60):
                while not all(peer.is_connected for peer in peers):  # noqa: ASYNC110 - nothing tells
                    await anyio.sleep(0.02)
            assert all(await it.contains(EIGHT))
            late = next(iter(tier_of(it)._located.values()))
            late.is_late = True
            leased: set[Peer] = set()
            lease = Peer.lease

            async def noted(peer: Peer, wanted: Sequence[OffloadKey]) -> Lease:
                leased.add(peer)
                return await lease(peer, wanted)

            monkeypatch.setattr(Peer, "lease", noted)
            assert set(await it.get(EIGHT)) == {Status.OK}
            assert len(leased) == 1
            assert late not in leased


@pytest.mark.full  # Covered by the test of a hanging thread.
async def test_stopped_peer_allows_close(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(holder.address) as it:
        await until_found(it, EIGHT)
        agent = agent_of(it)
        stopped = anyio.Event()

        async def stop() -> None:
            holder.stop()
            stopped.set()

        before_reads(it, monkeypatch, stop)
        getting = asyncio.create_task(it.get(EIGHT))
        with anyio.fail_after(60):
            await stopped.wait()
            while not agent.reads:  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.005)
        getting.cancel()
        await asyncio.wait((getting,))
        assert agent.reads  # The read cannot be stopped.
    await anyio.to_thread.run_sync(agent.thread.join, 60)
    assert not agent.thread.is_alive()
    holder.resume()


@pytest.mark.full  # The end of a tier process is tested with the other tests of the process.
async def test_holder_survives_killed_reader(holder: Holder, tmp_path: Path) -> None:
    """If UCX emulates reads, as over TCP, it may abort a holder that answers a dead reader."""
    with Holder(tmp_path / "reader.log", {"peers": [holder.address]}, chunks=0) as reader:
        # The reader stops the holder itself, so the read is certainly in flight.
        reader.tell("read", holder.process.pid)
        reader.kill()
        holder.resume()
    async with opened(holder.address) as it:
        with ExitStack() as stack, anyio.fail_after(60):
            ended = False
            while not all(await it.contains(EIGHT)) or set(await it.get(EIGHT)) != {Status.OK}:
                if not ended and holder.process.poll() is not None:
                    assert holder.process.returncode == -signal.SIGABRT
                    stack.enter_context(Holder(tmp_path / "again.log", {"listen": holder.address}))
                    ended = True
                await anyio.sleep(0.02)


@pytest.mark.parametrize(
    "is_confirmed", [False, pytest.param(True, marks=pytest.mark.full)], ids=["clock", "only-the-seal"]
)
async def test_expired_leases_give_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_confirmed: bool
) -> None:
    """After a lease expires, its memory holds other chunks. The seal detects damage that the clock misses."""
    settings = {"lease_s": 0.05, "serve_bytes": 16 * CHUNK_BYTES}
    with Holder(tmp_path / "log", settings, chunks=16) as holder:

        async def reuse() -> None:
            await anyio.sleep(0.2)
            await anyio.to_thread.run_sync(holder.tell, "put", *range(200, 216))

        rig = TierRig(NixlTier(config(holder.address, retry_share=0.0)), identity(), CHUNK_BYTES)
        driver = TierDriver(rig, 32)
        async with driver.executor:
            await driver.put(range(1))  # opens the tier
            await until_found(rig, range(8, 16))
            before_reads(rig, monkeypatch, reuse)
            if is_confirmed:
                monkeypatch.setattr(Peer, "release", lambda *_: True)
            fetched = await driver.fetch(range(8, 16))
    assert {Answer(answer) for answer in fetched.answers} == {Answer.MISSING}
    assert set(fetched.reasons) == ({"checksum"} if is_confirmed else {"lease"})


async def test_reset_holder_gives_nothing(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(holder.address) as it:
        await until_found(it, EIGHT)

        async def reset() -> None:
            await anyio.to_thread.run_sync(holder.tell, "reset")

        before_reads(it, monkeypatch, reset)
        outcome = await it.outcome_of_get(EIGHT)  # The lease precedes the reset, and the read follows it.
        assert Status.OK not in outcome.statuses
        holder.tell("put", *EIGHT)  # Chunks of the new weights, which only that engine may use.
        assert set(await it.get(EIGHT)) == {Status.ABSENT}
    async with opened(holder.address) as later:
        assert not first_peer(later).is_connected
        assert set(await later.get(EIGHT)) == {Status.ABSENT}


async def test_reset_reader_gets_nothing() -> None:
    async with pair() as (_, it):
        await it.put(range(100, 104))
        await it.tier.reset()
        assert set(await it.get(EIGHT)) == {Status.ABSENT}
        assert not any(await it.contains(range(100, 104)))
        await it.put(range(100, 104))
        assert set(await it.get(range(100, 104))) == {Status.OK}


async def test_interrupted_reset_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with pair(listen=listen) as (_, it), opened(listen) as other:
        await it.put(range(100, 104))
        await until_found(other, range(100, 104))
        with monkeypatch.context() as patched:
            patched.setattr(Peers, "aclose", lambda _: anyio.sleep_forever())
            with anyio.move_on_after(0.1) as limit:
                await it.tier.reset()
        assert limit.cancelled_caught
        assert not any(await other.contains(range(100, 104)))
        assert not any(await it.contains(EIGHT))
        await it.tier.reset()
        await it.put(range(100, 104))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(parse_address(listen))


async def test_refusals_are_logged_on_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    others: list[tuple[dict[str, Any], str]] = [
        ({"name": "another"}, "it has another identity"),
        ({"chunk_bytes": 4096}, "its chunks have 4096 bytes"),
        ({"secret_file": secret}, "it has another secret"),
    ]
    async with pair() as (it, _):
        for other, words in others:
            async with opened(tier_of(it).config.listen, **other) as stranger:
                assert set(await stranger.get(EIGHT)) == {Status.ABSENT}
            assert f"127.0.0.1 was turned away: {words}" in caplog.text
            assert f"is not used: it refuses: '{words}" in caplog.text


async def test_shared_secret_connects(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{secrets.token_hex(32)}\n")
    with Holder(tmp_path / "log", {"secret_file": str(path)}) as holder:
        async with opened(holder.address, secret_file=path) as it:
            await until_found(it, EIGHT)
            assert set(await it.get(EIGHT)) == {Status.OK}


async def test_rotated_secret_is_read(tmp_path: Path) -> None:
    path, listen = tmp_path / "secret", f"127.0.0.1:{free_port()}"
    path.write_text(secrets.token_hex(32))
    async with opened(listen=listen, secret_file=path) as older:
        await older.put(EIGHT)
        path.write_text(secrets.token_hex(32))
        async with opened(listen, secret_file=path) as it:
            await until_found(it, EIGHT)


async def test_nonsense_is_turned_away(holder: Holder) -> None:
    host, _, port = holder.address.partition(":")
    strangers = []
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(64), secrets.token_bytes(5000)):
        strangers.append(socket.create_connection((host, int(port))))
        strangers[-1].sendall(sent)
    async with opened(holder.address) as it:
        await until_found(it, EIGHT)
        assert set(await it.get(EIGHT)) == {Status.OK}
    for stranger in strangers:
        stranger.close()


async def test_hanging_thread_allows_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_agent, "_CLOSE_S", 0.5)
    goes_on = threading.Event()
    async with opened() as it:
        agent = agent_of(it)
        agent._jobs.put(goes_on.wait)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await agent.connect("peer", b"metadata")
        closing = asyncio.create_task(it.tier.aclose())
        await anyio.wait_all_tasks_blocked()
        closing.cancel()
        await asyncio.wait((closing,))
        assert closing.cancelled()
    assert "its thread and memory are abandoned" in caplog.text
    assert agent.thread.is_alive()
    goes_on.set()
    await anyio.to_thread.run_sync(agent.thread.join, 30)
    assert not agent.thread.is_alive()
    assert agent._agent is None


async def test_unproven_peers_leave_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_MAX_STRANGERS", 2)
    async with pair() as (near, it):
        address = parse_address(tier_of(near).config.listen)
        answers = []
        with ExitStack() as stack:
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*address)
                stack.enter_context(closing(writer))
                answers.append(type(await protocol.receive(reader)))
            assert set(await it.get(EIGHT)) == {Status.OK}
        assert answers == 2 * [protocol.Challenge] + [protocol.Refused]


async def test_silent_peer_allows_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_peers, "_FIRST_TRIES_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with opened(address, answer_timeout_s=10.0) as it:
            assert not first_peer(it).was_tried.is_set()


async def test_own_address_is_ignored(holder: Holder) -> None:
    mine = f"127.0.0.1:{free_port()}"
    async with opened(mine, holder.address, listen=mine) as it:
        await until_found(it, EIGHT)
        peers = peers_of(it).members
        assert [peer.is_connected for peer in peers] == [False, True]


async def test_failed_open_names_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "short"
    short.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for settings, words in (
            ({"listen": listen}, r"cannot listen at .*set listen to a free host:port"),
            ({"secret_file": tmp_path / "none"}, "secret_file cannot be read"),
            ({"secret_file": short}, "less than 16 bytes; make one with: openssl"),
            ({"serve_bytes": 10}, "serve_bytes is less than one chunk"),
        ):
            with pytest.raises(TierError, match=words):
                async with opened(**settings):
                    pass
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TierError, match=r'NIXL cannot be imported .*"nixl>=1.5.1" "nixl-cu12>=1.5.1"'):
        async with opened():
            pass
