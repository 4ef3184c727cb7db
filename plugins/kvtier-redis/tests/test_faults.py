"""Servers that hang, die, are full, move their keys or refuse: misses with a reason, in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis_servers
from redis_servers import Server, wait_for

from kvtier.identity import Identity
from kvtier.tiers.base import Outcome, Status, TierContext
from kvtier_redis import RedisConfig, RedisTier
from kvtier_testing.tiers.rig import Slots, TierRig, key, keys

pytestmark = pytest.mark.anyio
CHUNK_BYTES = 256 * 1024
IDENTITY = Identity.make("faults", {})
DEADLINE_S = 1.0
GRACE_S = 9.0
HANGING: dict[str, Any] = {"deadline_s": DEADLINE_S, "connect_timeout_s": 30.0}
"""What has another bound than the deadline takes far longer than the grace."""

AT_EASE_S = 30.0
"""A deadline that a machine does not miss which is busy with something else."""


@asynccontextmanager
async def opened(*servers: Server | int, **settings: Any) -> AsyncIterator[TierRig]:
    """Open a tier on servers, or on the ports of sentinels."""
    ports = [server.port if isinstance(server, Server) else server for server in servers]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    config = RedisConfig(**{"addresses": addresses, "deadline_s": AT_EASE_S, **settings})
    tier = RedisTier(config)
    await tier.open(TierContext("tested", IDENTITY, CHUNK_BYTES))
    try:
        yield TierRig(tier, IDENTITY, CHUNK_BYTES, is_lossy=False)
    finally:
        await tier.aclose()


async def put(it: TierRig, numbers: range) -> Outcome:
    batch, _ = it.filled(numbers)
    outcome = await it.tier.put(batch)
    it.check_outcome(outcome, batch, "put")
    return outcome


async def get(it: TierRig, numbers: Sequence[int]) -> tuple[Outcome, Slots]:
    """Get chunks; check the bytes of those that are there, and let others move into their slots."""
    batch, slots = it.empty(numbers)
    outcome = await it.tier.get(batch)
    it.check_outcome(outcome, batch, "get")
    it.check_given(list(numbers), batch, outcome, (0,))
    slots.reuse()
    return outcome, slots


async def until_put(it: TierRig, numbers: range, seconds: float = 20.0) -> None:
    """Put until all are kept."""
    deadline = time.monotonic() + seconds
    while set((outcome := await put(it, numbers)).statuses) != {Status.OK}:
        assert time.monotonic() < deadline, outcome.reasons
        await anyio.sleep(0.05)


async def in_thread(function: Any, *arguments: Any) -> Any:
    return await anyio.to_thread.run_sync(function, *arguments)


# ------------------------------------------------------------------------------- hangs and deaths


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_a_server_that_hangs_is_a_miss_by_the_deadline_and_its_slots_are_free_then(
    own_server: Server, verb: str
) -> None:
    async with opened(own_server, **HANGING) as it:
        await put(it, range(16))
        own_server.stop()
        started = time.monotonic()
        if verb == "put":
            outcome = await put(it, range(100, 116))
            slots = None
        else:
            outcome, slots = await get(it, range(16))
        took = time.monotonic() - started
        assert took < DEADLINE_S + GRACE_S
        assert set(outcome.statuses) == {Status.FAILED}
        assert outcome.reasons == {"timeout": 16}
        own_server.go_on()
        await anyio.sleep(0.3)
        if slots is not None:
            slots.check_reused("a get of a server that hung")
        await until_put(it, range(200, 204))
    async with opened(own_server) as it:
        stored, _ = await get(it, range(100, 116))
        assert set(stored.statuses) <= {Status.OK, Status.ABSENT}


async def test_a_transfer_that_is_cut_short_in_its_midst_by_a_server_that_hangs_stores_no_torn_value(
    own_server: Server,
) -> None:
    async with opened(own_server, deadline_s=0.4) as it:
        for attempt in range(6):
            numbers = range(1000 * attempt, 1000 * attempt + 64)  # more than sockets hold
            batch, slots = it.filled(numbers)
            putting = asyncio.ensure_future(it.tier.put(batch))
            await anyio.sleep(0.002 * attempt)
            own_server.stop()
            outcome = await putting
            slots.reuse()
            own_server.go_on()
            assert set(outcome.statuses) <= {Status.OK, Status.FAILED}
            await anyio.sleep(0.05)
            stored, _ = await get(it, numbers)  # checks the bytes and the trailers
            assert set(stored.statuses) <= {Status.OK, Status.ABSENT, Status.FAILED}


async def test_questions_to_a_server_that_hangs_are_answered_no_by_the_deadline(own_server: Server) -> None:
    async with opened(own_server, **HANGING) as it:
        await put(it, range(4))
        own_server.stop()
        started = time.monotonic()
        assert not any(await it.tier.contains(keys(range(4))))
        await it.tier.touch(keys(range(4)))
        await it.tier.discard(keys(range(4)))
        assert time.monotonic() - started < 3 * DEADLINE_S + GRACE_S
        own_server.go_on()


async def test_closing_does_not_wait_for_a_server_that_hangs(own_server: Server) -> None:
    async with opened(own_server) as it:
        await it.tier.reset()
        await put(it, range(4))  # to be removed when the tier is closed
        own_server.stop()
        started = time.monotonic()
    assert time.monotonic() - started < AT_EASE_S / 3
    own_server.go_on()


async def test_a_server_that_dies_is_a_miss_and_is_used_again_when_it_is_back(own_server: Server) -> None:
    async with opened(own_server) as it:
        await put(it, range(8))
        await in_thread(own_server.kill)
        outcome, _ = await get(it, range(8))
        assert outcome.reasons == {"connection": 8}
        assert (await put(it, range(8))).reasons == {"connection": 8}
        assert not any(await it.tier.contains(keys(range(8))))
        await in_thread(own_server.start)
        await until_put(it, range(8))
        outcome, _ = await get(it, range(8))
        assert set(outcome.statuses) == {Status.OK}


async def test_a_server_that_was_restarted_between_two_calls_is_no_failure(own_server: Server) -> None:
    async with opened(own_server) as it:
        await put(it, range(8))
        await in_thread(own_server.kill)
        await in_thread(own_server.start)
        assert set((await put(it, range(8))).statuses) == {Status.OK}


async def test_a_server_that_dies_in_the_midst_of_puts_and_gets(own_server: Server) -> None:
    async with opened(own_server) as it:
        await put(it, range(32))
        async with anyio.create_task_group() as tasks:
            for first in range(100, 400, 32):
                tasks.start_soon(put, it, range(first, first + 32))
                tasks.start_soon(get, it, range(32))
            await anyio.sleep(0.02)
            tasks.start_soon(in_thread, own_server.kill)
        assert set((await put(it, range(4))).statuses) == {Status.FAILED}


# ------------------------------------------------------------------------------------ full servers


async def test_a_full_server_that_evicts_nothing_refuses_puts_and_serves_gets(tmp_path: Path) -> None:
    with Server(tmp_path, ("maxmemory", "12mb"), ("maxmemory-policy", "noeviction")) as server:
        async with opened(server) as it:
            statuses: list[Status] = []
            for first in range(0, 64, 8):
                outcome = await put(it, range(first, first + 8))
                statuses += outcome.statuses
                assert set(outcome.reasons) <= {"full"}
            assert statuses[0] is Status.OK
            assert set(statuses[-8:]) == {Status.REFUSED}
            there = [number for number, status in enumerate(statuses) if status is Status.OK]
            outcome, _ = await get(it, there)
            assert set(outcome.statuses) == {Status.OK}
            usage = it.tier.usage()
            assert usage is not None
            assert usage.capacity_bytes == 12 * 2**20
        async with opened(server) as it:  # a full server can be opened
            outcome, _ = await get(it, range(4))
            assert set(outcome.statuses) == {Status.OK}


async def test_the_servers_own_refusal_for_want_of_memory_is_a_refusal(own_server: Server) -> None:
    async with opened(own_server) as it:
        await put(it, range(4))
        with own_server.client() as client:
            client.config_set("maxmemory", "1")  # unknown to the tier, which asks once a second
        outcome = await put(it, range(100, 104))
        assert set(outcome.statuses) == {Status.REFUSED}
        assert outcome.reasons == {"full": 4}


async def test_what_the_server_evicts_is_a_miss(tmp_path: Path) -> None:
    with Server(tmp_path, ("maxmemory", "12mb"), ("maxmemory-policy", "allkeys-lru")) as server:
        async with opened(server) as it:
            for first in range(0, 128, 8):
                assert set((await put(it, range(first, first + 8))).statuses) == {Status.OK}
            statuses = [
                status
                for first in range(0, 128, 8)
                for status in (await get(it, range(first, first + 8)))[0].statuses
            ]
            assert {Status.ABSENT, Status.OK} == set(statuses)


async def test_a_part_that_the_server_evicted_makes_the_chunk_a_miss_that_can_be_put_again(
    own_server: Server,
) -> None:
    async with opened(own_server, value_bytes=64 * 1024) as it:
        await put(it, range(3))
        with own_server.client() as client:
            (part,) = [name for name in client.keys(f"*{key(1).hex()}*:2")]
            client.delete(part)
        outcome, _ = await get(it, range(3))
        assert list(outcome.statuses) == [Status.OK, Status.ABSENT, Status.OK]
        assert await it.contains(range(3)) == [True, False, True]
        assert set((await put(it, range(3))).statuses) == {Status.OK}
        outcome, _ = await get(it, range(3))
        assert set(outcome.statuses) == {Status.OK}


async def test_more_than_max_bytes_is_refused(own_server: Server) -> None:
    async with opened(own_server, max_bytes="8MiB") as it:
        statuses = [
            status
            for first in range(0, 64, 8)
            for status in (await put(it, range(first, first + 8))).statuses
        ]
        assert statuses[0] is Status.OK
        assert statuses[-1] is Status.REFUSED
        with own_server.client() as client:
            assert client.info("memory")["used_memory"] < 16 * 2**20


async def test_chunks_expire_that_are_not_used_and_live_on_when_they_are(own_server: Server) -> None:
    async with opened(own_server, ttl_s=1000) as it:
        await put(it, range(3))
        with own_server.client() as client:
            names = {number: client.keys(f"*{key(number).hex()}*")[0] for number in range(3)}
            for name in names.values():
                assert 990 <= client.ttl(name) <= 1000
                client.expire(name, 100)
            await it.tier.touch(keys([0]))
            await put(it, range(1, 2))
            assert [client.ttl(names[number]) > 900 for number in range(3)] == [True, True, False]


# --------------------------------------------------------------------------------------- refusals


async def test_a_primary_that_has_become_a_replica_takes_no_puts(own_server: Server, server: Server) -> None:
    async with opened(own_server) as it:
        await put(it, range(2))
        with own_server.client() as client:
            client.replicaof("127.0.0.1", server.port)
            outcome = await put(it, range(10, 12))
            assert outcome.reasons == {"readonly": 2}
            client.replicaof("NO", "ONE")
        await until_put(it, range(10, 12))


async def test_a_user_who_loses_permissions_is_refused_and_goes_on_when_they_are_back(
    own_server: Server,
) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "kv", "on", ">secret", "~*", *redis_servers.ACL.split())
        async with opened(own_server, username="kv", password="secret") as it:
            await put(it, range(2))
            client.execute_command("ACL", "SETUSER", "kv", "-set", "-get", "-exists")
            assert (await put(it, range(4, 6))).reasons == {"denied": 2}
            assert (await get(it, range(2)))[0].reasons == {"denied": 2}
            assert not any(await it.tier.contains(keys(range(2))))
            client.execute_command("ACL", "SETUSER", "kv", ">other", "<secret")
            client.execute_command("CLIENT", "KILL", "USER", "kv")
            assert (await get(it, range(2)))[0].reasons == {"denied": 2}


async def test_a_server_that_is_loading_its_data_is_a_miss(tmp_path: Path) -> None:
    # It sleeps after each key, and answers now and then, until it is told to make haste.
    with Server(
        tmp_path, ("key-load-delay", "400000"), ("loading-process-events-interval-bytes", "1024")
    ) as server:
        async with opened(server) as it:
            await put(it, range(40))
            with server.client() as client:
                client.save()
            await in_thread(server.kill)
            with server.client() as client:
                reasons: set[str] = set()
                loading = asyncio.ensure_future(in_thread(server.start))
                while not loading.done():
                    reasons |= set((await get(it, range(4)))[0].reasons)
                    if "loading" in reasons:
                        await in_thread(client.config_set, "key-load-delay", 0)
                    await anyio.sleep(0.02)
            assert reasons <= {"loading", "connection"}
            assert "loading" in reasons
            outcome, _ = await get(it, range(4))
            assert set(outcome.statuses) == {Status.OK}


async def test_a_server_without_the_replicas_that_it_has_to_reach_takes_no_puts(own_server: Server) -> None:
    async with opened(own_server) as it:
        await put(it, range(2))
        with own_server.client() as client:
            client.config_set("min-replicas-to-write", "1")
            outcome = await put(it, range(10, 12))
            assert outcome.reasons == {"misconf": 2}
            client.config_set("min-replicas-to-write", "0")
        await until_put(it, range(10, 12))


# ------------------------------------------------------------------------------------ the cluster


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[list[Server]]:
    with redis_servers.cluster(tmp_path) as servers:
        yield servers


async def test_chunks_are_spread_over_the_cluster_and_parts_of_one_stay_together(
    cluster: list[Server],
) -> None:
    async with opened(*cluster, mode="cluster", key_prefix="spread", value_bytes=64 * 1024) as it:
        await put(it, range(48))
        found = []
        for server in cluster:
            with server.client() as client:
                names = [name for name in client.keys("spread:*") if b"{" in name]
            found.append(len(names))
            heads = [name for name in names if name.endswith(b"}")]
            assert len(names) == 4 * len(heads)
        assert sum(found) == 4 * 48
        assert min(found) > 0


async def test_keys_that_are_moved_to_another_server_are_found_there(own_cluster: list[Server]) -> None:
    async with opened(own_cluster[0], mode="cluster") as it:
        await put(it, range(24))
        home, name = next(found for server in own_cluster for found in chunks_on(server, key(0)))
        target = next(server for server in own_cluster if server is not home)
        with home.client() as client:
            slot = client.execute_command("CLUSTER", "KEYSLOT", name)
        with home.client() as source, target.client() as other:
            names = [
                source.execute_command("CLUSTER", "MYID").decode(),
                other.execute_command("CLUSTER", "MYID").decode(),
            ]
            other.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
            source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
            # Not there any more, and not to be asked for there without ASKING.
            source.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", name)
            outcome, _ = await get(it, range(24))
            assert outcome.statuses[0] is Status.FAILED
            assert outcome.reasons == {"moved": 1}
            assert set(outcome.statuses[1:]) == {Status.OK}
            for client in (other, source):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[1])
        await until_got(it, range(24))


def chunks_on(server: Server, wanted: bytes) -> list[tuple[Server, bytes]]:
    with server.client() as client:
        return [(server, name) for name in client.keys(f"*{wanted.hex()}*")]


async def until_got(it: TierRig, numbers: range, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while set((outcome := (await get(it, numbers))[0]).statuses) != {Status.OK}:
        assert time.monotonic() < deadline, outcome.reasons
        await anyio.sleep(0.05)


async def test_a_cluster_that_loses_a_server_serves_what_the_others_have(own_cluster: list[Server]) -> None:
    async with opened(*own_cluster, mode="cluster") as it:
        await put(it, range(48))
        await in_thread(own_cluster[1].kill)
        outcome, _ = await get(it, range(48))
        assert set(outcome.statuses) == {Status.OK, Status.FAILED}
        assert set(outcome.reasons) <= {"connection", "timeout"}
        found = await it.tier.contains(keys(range(48)))
        assert 0 < sum(found) < 48
        others = own_cluster[::2]
        await in_thread(redis_servers.give_up_after, 2000, others)
        await in_thread(wait_for, lambda: not any(map(all_ok, others)), "the others have noticed")
        await in_thread(redis_servers.give_up_after, redis_servers.PATIENT_MS, others)
        await in_thread(wait_for, lambda: all(map(goes_on, others)), "they go on without it")
        outcome, _ = await get(it, range(48))
        assert set(outcome.statuses) == {Status.OK, Status.FAILED}
        assert set(outcome.reasons) <= {"connection", "timeout", "clusterdown"}


def all_ok(server: Server) -> bool:
    with server.client() as client:
        return b",fail " not in client.execute_command("CLUSTER", "NODES").replace(b"fail,", b"fail ")


def goes_on(server: Server) -> bool:
    with server.client() as client:
        return b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")


# ------------------------------------------------------------------------------------- sentinels


async def test_a_failover_is_followed(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "one") as one,
        Server(tmp_path / "two", ("replicaof", "127.0.0.1", str(one.port))) as two,
        redis_servers.sentinels(tmp_path, one) as ports,
    ):
        async with opened(*ports, mode="sentinel", sentinel_master="kv") as it:
            assert set((await put(it, range(8))).statuses) == {Status.OK}
            with one.client(socket_timeout=30.0) as client:
                assert client.wait(1, 20_000) == 1
            await in_thread(one.kill)
            await in_thread(redis_servers.notice_soon, ports)
            await until_put(it, range(100, 104), 80.0)
            outcome, _ = await get(it, range(8))
            assert set(outcome.statuses) == {Status.OK}  # the replica has them
            with two.client() as client:
                assert client.role()[0] == b"master"
