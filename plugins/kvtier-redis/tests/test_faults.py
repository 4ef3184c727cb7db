"""Servers that hang, die, fill up, move keys or refuse commands cause timely misses with a reason."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis_servers
from redis_servers import GENEROUS_S, Server, TlsServer, opened

from kvtier._core.messages import Answer
from kvtier.errors import TierError
from kvtier.tiers import Outcome, Status
from kvtier_redis._control import ControlClient
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers._forgetful import ForgetfulProxy
from kvtier_testing.tiers.driver import TierDriver
from kvtier_testing.tiers.rig import BatchSlots, key, keys

pytestmark = pytest.mark.anyio
DEADLINE_S = 1.0
GRACE_S = 9.0
CHUNK_BYTES = 256 * 1024
HANGING: dict[str, Any] = {"deadline_s": DEADLINE_S, "connect_timeout_s": 30.0}
"""Anything but the deadline takes far longer than the grace."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


async def until_ok(call: Callable[[], Awaitable[Outcome]], seconds: float = 60.0) -> None:
    """Repeat a put or a get until all chunks are OK."""
    deadline = time.monotonic() + seconds
    while set((outcome := await call()).statuses) != {Status.OK}:
        assert time.monotonic() < deadline, outcome.reasons
        await anyio.sleep(0.05)


async def all_ok(it: TierRig, numbers: Sequence[int]) -> bool:
    return set(await it.get(numbers)) == {Status.OK}


async def lookup_fails(it: TierRig, numbers: Sequence[int], reason: str) -> None:
    """A failed lookup is not a miss, because the breaker must count it."""
    with pytest.raises(TierError, match=f"{len(numbers)} of {len(numbers)} lookups failed: {reason}"):
        await it.tier.contains(keys(numbers))


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_hanging_server_frees_slots(own_server: Server, verb: str) -> None:
    async with opened(own_server, **HANGING) as it:
        await it.outcome_of_put(range(16))
        slots: BatchSlots | None = None
        with own_server.stopped(), within(DEADLINE_S + GRACE_S):
            if verb == "put":
                outcome = await it.outcome_of_put(range(100, 116))
            else:
                batch, slots = it.empty(range(16))
                outcome = await it.tier.get(batch)
                slots.reuse()
        assert set(outcome.statuses) == {Status.FAILED}
        assert outcome.reasons == {"timeout": 16}
        await anyio.sleep(0.3)
        if slots is not None:
            slots.check_reused("a get from a hanging server")
        with own_server.stopped(), within(DEADLINE_S + GRACE_S):
            async with anyio.create_task_group() as tasks:
                for call in (it.tier.touch, it.tier.discard):
                    tasks.start_soon(call, keys(range(4)))
                await lookup_fails(it, range(4), "timeout")
        await until_ok(lambda: it.outcome_of_put(range(200, 204)))
    async with opened(own_server) as it:
        stored = await it.outcome_of_get(range(100, 116))
        assert set(stored.statuses) <= {Status.OK, Status.ABSENT}


async def test_all_connections_can_be_used(own_server: Server) -> None:
    outcomes: list[Outcome] = []

    async def note(call: Awaitable[Outcome]) -> None:
        outcomes.append(await call)

    async with opened(own_server, connections=64, **HANGING) as it:
        with own_server.stopped():
            async with anyio.create_task_group() as tasks:
                for number in range(64):
                    tasks.start_soon(note, it.outcome_of_put(range(number, number + 1)))
                    tasks.start_soon(note, it.outcome_of_get(range(number, number + 1)))
    assert [outcome.reasons for outcome in outcomes] == [{"timeout": 1}] * 128


async def test_removal_after_reset_spares_usage(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    removing, may_end = threading.Event(), threading.Event()

    def remove_epoch(*_: object) -> None:
        removing.set()
        may_end.wait(60)

    monkeypatch.setattr(ControlClient, "remove_epoch", remove_epoch)
    async with opened(own_server) as it:
        await it.tier.reset()
        await it.tier.reset()  # Starts the removal of the first reset's private epoch.
        await anyio.to_thread.run_sync(removing.wait, 60)
        before = it.tier.usage()
        try:
            with own_server.client() as client:
                client.set("other", bytes(32 << 20))
            with anyio.fail_after(30):
                while it.tier.usage() == before:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
        finally:
            may_end.set()


async def test_close_ignores_hanging_server(own_server: Server) -> None:
    tier = opened(own_server)
    it = await tier.__aenter__()
    await it.tier.reset()
    await it.outcome_of_put(range(4))  # The tier removes these when it is closed.
    with own_server.stopped(), within(GENEROUS_S / 3):
        await tier.__aexit__(None, None, None)


async def test_killed_server_misses(own_server: Server) -> None:
    async with opened(own_server) as it:
        await it.outcome_of_put(range(8))
        await anyio.to_thread.run_sync(own_server.kill)
        outcome = await it.outcome_of_get(range(8))
        assert outcome.reasons == {"connection": 8}
        assert (await it.outcome_of_put(range(8))).reasons == {"connection": 8}
        await lookup_fails(it, range(8), "connection")
        await anyio.to_thread.run_sync(own_server.start)
        await until_ok(lambda: it.outcome_of_put(range(8)))
        assert await all_ok(it, range(8))
        await anyio.to_thread.run_sync(own_server.kill)
        await anyio.to_thread.run_sync(own_server.start)  # A restart between two calls is not a failure.
        assert set(await it.put(range(8))) == {Status.OK}


@pytest.mark.parametrize(
    ("options", "settings"),
    [("--maxmemory 12mb --maxmemory-policy noeviction", {}), ("", {"max_bytes": "12MiB"})],
    ids=["maxmemory", "max_bytes"],
)
async def test_full_server_serves_gets(tmp_path: Path, options: str, settings: dict[str, Any]) -> None:
    with Server(tmp_path, options) as server:
        async with opened(server, **settings) as it:
            statuses: list[Status] = []
            for first in range(0, 64, 8):
                outcome = await it.outcome_of_put(range(first, first + 8))
                statuses += outcome.statuses
                assert set(outcome.reasons) <= {"full"}
            assert statuses[0] is Status.OK
            assert set(statuses[-8:]) == {Status.REFUSED}
            there = [number for number, status in enumerate(statuses) if status is Status.OK]
            assert await all_ok(it, there)
            usage = it.tier.usage()
            assert usage is not None
            assert usage.capacity_bytes == 12 * 2**20
        async with opened(server, **settings) as it:  # The tier opens although the server is full.
            assert await all_ok(it, range(4))


async def test_use_restarts_expiry(own_server: Server) -> None:
    async with opened(own_server, ttl_s=1000) as it:
        await it.outcome_of_put(range(3))
        with own_server.client() as client:
            names = {number: client.keys(f"*{key(number).hex()}*")[0] for number in range(3)}
            for name in names.values():
                assert 990 <= client.ttl(name) <= 1000
                client.expire(name, 100)
            await it.tier.touch(keys([0]))
            await it.outcome_of_put(range(1, 2))
            assert [client.ttl(names[number]) > 900 for number in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("refuse", "reason", "accept"),
    [
        ("REPLICAOF 127.0.0.1 1", "readonly", "REPLICAOF NO ONE"),
        ("CONFIG SET min-replicas-to-write 1", "misconf", "CONFIG SET min-replicas-to-write 0"),
        ("CONFIG SET maxmemory 1", "full", "CONFIG SET maxmemory 0"),
    ],
)
async def test_unwritable_server_fails_puts(
    own_server: Server, refuse: str, reason: str, accept: str
) -> None:
    async with opened(own_server) as it:
        await it.outcome_of_put(range(2))
        with own_server.client() as client:
            client.execute_command(*refuse.split())
            assert (await it.outcome_of_put(range(10, 12))).reasons == {reason: 2}
            client.execute_command(*accept.split())
        await until_ok(lambda: it.outcome_of_put(range(10, 12)))


async def test_lost_permissions_are_denied(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    own_server.add_user("kv", "hunter2")
    with own_server.client() as client:
        async with opened(own_server, username="kv", password="hunter2") as it:
            await it.outcome_of_put(range(2))
            client.execute_command("ACL", "SETUSER", "kv", "-set", "-get", "-exists")
            assert (await it.outcome_of_put(range(4, 6))).reasons == {"denied": 2}
            assert (await it.outcome_of_get(range(2))).reasons == {"denied": 2}
            await lookup_fails(it, range(2), "denied")
            client.execute_command("ACL", "SETUSER", "kv", ">other", "<hunter2")
            client.execute_command("CLIENT", "KILL", "USER", "kv")
            assert (await it.outcome_of_get(range(2))).reasons == {"denied": 2}
    assert "denied" in caplog.text
    assert "hunter2" not in caplog.text + repr(it.tier.config)


async def test_rotated_password_is_read(own_server: Server, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("old")
    logins: list[dict[str, Any]] = [{"password_file": file}, {"password_command": ["cat", str(file)]}]
    for login in logins:
        file.write_text("old")
        own_server.add_user("kv", "old", f"resetpass >old ~* {redis_servers.ACL}")
        async with opened(own_server, username="kv", **login) as it:
            await it.outcome_of_put(range(4))
            file.write_text("new")
            own_server.add_user("kv", "new", "<old")
            with own_server.client() as client:
                client.execute_command("CLIENT", "KILL", "USER", "kv")
            await until_ok(lambda: it.outcome_of_get(range(4)))


async def test_rotated_tls_files_are_read(tmp_path: Path) -> None:
    with TlsServer(tmp_path) as tls:
        async with opened(tls.server, **tls.settings) as it:
            await it.outcome_of_put(range(2))
            await anyio.to_thread.run_sync(tls.rotate)
            await until_ok(lambda: it.outcome_of_put(range(4, 8)))


async def test_bad_link_removes_no_keys(own_server: Server) -> None:
    with ForgetfulProxy(own_server.port) as proxy, own_server.client() as client:
        driver = TierDriver(TierRig(redis_servers.tier(proxy), redis_servers.IDENTITY, CHUNK_BYTES), 32)
        async with driver.executor:
            await driver.put(range(24))
            proxy.flips = 5
            fetched = await driver.fetch(range(24))
            assert proxy.flips == 0
            driver.check_copied(range(24), fetched)
            # the second read succeeds
            assert {Answer(answer).name for answer in fetched.answers} == {"COPIED"}
            proxy.flips = 500
            driver.check_copied(range(24), await driver.fetch(range(24)))
        assert len(client.keys("*:*:*:*")) == 24


async def test_forgotten_connections_cost_one_timeout(own_server: Server) -> None:
    with ForgetfulProxy(own_server.port) as proxy:
        async with opened(proxy, deadline_s=DEADLINE_S, connections=4) as it:
            await it.outcome_of_put(range(64))  # over several connections
            await it.outcome_of_get(range(64))
            proxy.forget()
            assert (await it.outcome_of_get(range(4))).reasons == {"timeout": 4}
            for _ in range(8):
                assert await all_ok(it, range(64))


async def test_idle_connections_are_dropped(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_redis._client._IDLE_S", 0.0)
    with ForgetfulProxy(own_server.port) as proxy:
        async with opened(proxy) as it:
            await it.outcome_of_put(range(4))
            proxy.forget()
            assert await all_ok(it, range(4))


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[list[Server]]:
    with redis_servers.cluster(tmp_path) as servers:
        yield servers


async def test_moved_keys_are_found(own_cluster: list[Server]) -> None:
    async with opened(own_cluster[0], mode="cluster") as it:
        await it.outcome_of_put(range(24))
        where = {}
        for server in own_cluster:
            with server.client() as client:
                where.update({name: server for name in client.keys(f"*{key(0).hex()}*")})
        ((name, home),) = where.items()
        with home.client() as client:
            slot = client.execute_command("CLUSTER", "KEYSLOT", name)
        target = next(server for server in own_cluster if server is not home)
        with home.client() as source, target.client() as other:
            names = [
                source.execute_command("CLUSTER", "MYID").decode(),
                other.execute_command("CLUSTER", "MYID").decode(),
            ]
            other.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
            source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
            # The source no longer has the key, and the target serves it only after ASKING.
            source.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", name)
            outcome = await it.outcome_of_get(range(24))
            assert outcome.statuses[0] is Status.FAILED
            assert outcome.reasons == {"moved": 1}
            assert set(outcome.statuses[1:]) == {Status.OK}
            for client in (other, source):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[1])
        await until_ok(lambda: it.outcome_of_get(range(24)))


async def test_removed_node_is_not_asked_again(own_cluster: list[Server]) -> None:
    removed, heir, other = own_cluster
    async with opened(removed, mode="cluster") as it:
        assert await it.outcome_of_put(range(24)) == Outcome([Status.OK] * 24)
        with removed.client() as client:
            own_id = client.execute_command("CLUSTER", "MYID")
            client.flushall()
            client.execute_command("CLUSTER", "RESET")  # The node keeps running, but knows no other node.
        for server in (heir, other):
            with server.client() as client:
                client.execute_command("CLUSTER", "FORGET", own_id)
        with heir.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 5461)
        await until_ok(lambda: it.outcome_of_put(range(24)))
        assert await all_ok(it, range(24))


async def test_max_bytes_bounds_the_cluster(cluster: list[Server]) -> None:
    async with opened(*cluster, mode="cluster", max_bytes="1GiB") as it:
        assert set(await it.put(range(4))) == {Status.OK}
        usage = it.tier.usage()
        assert usage is not None
        assert usage.capacity_bytes == 2**30
        assert usage.used_bytes is not None
        used = usage.used_bytes  # Sum over three servers, so half of it exceeds the usage of each.
    async with opened(*cluster, mode="cluster", max_bytes=used // 2) as it:
        assert (await it.outcome_of_put(range(100, 104))).reasons == {"full": 4}


async def test_cluster_survives_lost_server(own_cluster: list[Server]) -> None:
    async with opened(*own_cluster, mode="cluster") as it:
        await it.outcome_of_put(range(48))
        await anyio.to_thread.run_sync(own_cluster[1].kill)
        outcome = await it.outcome_of_get(range(48))
        assert set(outcome.statuses) == {Status.OK, Status.FAILED}
        assert set(outcome.reasons) <= {"connection", "timeout"}
        found = await it.tier.contains(keys(range(48)))
        assert 0 < sum(found) < 48


@asynccontextmanager
async def behind_sentinels(folder: Path) -> AsyncIterator[tuple[Server, Server, list[int], TierRig]]:
    """Yield a primary, its replica, the ports of their sentinels, and a tier that asks these."""
    with (
        Server(folder / "one") as one,
        Server(folder / "two", f"--replicaof 127.0.0.1 {one.port}") as two,
        redis_servers.sentinels(folder, one) as ports,
    ):
        addresses = [f"127.0.0.1:{port}" for port in ports]
        async with opened(addresses=addresses, mode="sentinel", sentinel_master="kv") as it:
            yield one, two, ports, it


async def test_follows_failover(tmp_path: Path) -> None:
    async with behind_sentinels(tmp_path) as (one, two, ports, it):
        assert set(await it.put(range(8))) == {Status.OK}
        with one.client(socket_timeout=30.0) as client:
            assert client.wait(1, 20_000) == 1
        await anyio.to_thread.run_sync(one.kill)
        await anyio.to_thread.run_sync(redis_servers.mark_down_soon, ports)
        await until_ok(lambda: it.outcome_of_put(range(100, 104)), 80.0)
        assert await all_ok(it, range(8))  # the replica has the chunks
        with two.client() as client:
            assert client.role()[0] == b"master"


async def test_reset_reaches_new_primary(tmp_path: Path) -> None:
    """The former primary refuses only writes. Nothing may be put there before the reset has succeeded."""
    async with behind_sentinels(tmp_path) as (one, two, ports, it):
        assert set(await it.put(range(4))) == {Status.OK}
        await anyio.to_thread.run_sync(redis_servers.fail_over, ports, one)
        await it.tier.reset()
        assert not any(await it.tier.contains(keys(range(4))))
        assert set(await it.put(range(4))) == {Status.OK}
        with two.client() as client:
            assert client.role()[0] == b"master"


async def test_reset_on_lonely_primary_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A partition separates a primary from its replicas.

    The sentinels promote one of them on the other side.
    """
    async with behind_sentinels(tmp_path) as (one, two, _, it):
        await anyio.to_thread.run_sync(two.kill)
        with one.client() as client:
            redis_servers.wait_for(
                lambda: client.info("replication")["connected_slaves"] == 0, "the replica is gone"
            )
        await it.tier.reset()
    assert "reset not confirmed by all replicas" in caplog.text


async def test_replaced_primary_is_not_used(tmp_path: Path) -> None:
    """A partition isolates a primary together with the sentinels that come first in the settings."""
    with (
        Server(tmp_path / "old") as old,
        Server(tmp_path / "its-replica", f"--replicaof 127.0.0.1 {old.port}"),
        Server(tmp_path / "one") as one,
        Server(tmp_path / "two", f"--replicaof 127.0.0.1 {one.port}") as two,
        redis_servers.sentinels(tmp_path / "minority", old) as few,
        redis_servers.sentinels(tmp_path / "majority", one) as most,
    ):
        await anyio.to_thread.run_sync(redis_servers.fail_over, most, one)
        addresses = [f"127.0.0.1:{port}" for port in (*few, *most)]
        async with opened(addresses=addresses, mode="sentinel", sentinel_master="kv") as it:
            assert set(await it.put(range(4))) == {Status.OK}
            await it.tier.reset()
        with two.client() as new_client, old.client() as old_client:
            assert [client.dbsize() for client in (new_client, old_client)] == [6, 0]
