"""Masters and clients that die, hang or are full cause a miss with a reason. The pool is used again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from pools import IDENTITY, Pool, opened

from kvtier.errors import TierError
from kvtier.tiers import Outcome, Status, TierContext
from kvtier_mooncake import MooncakeConfig, MooncakeTier
from kvtier_testing.tiers._servers import free_port
from kvtier_testing.tiers.rig import keys

pytestmark = pytest.mark.anyio


async def until(call: Callable[[], Awaitable[Outcome]], *statuses: Status) -> None:
    """Repeat a put or a get until all chunks have one of these statuses."""
    with anyio.fail_after(60):
        while not set((await call()).statuses) <= set(statuses):  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def test_killed_master_misses(own_pool: Pool) -> None:
    async with opened(own_pool) as it:
        await it.outcome_of_put(range(8))
        await to_thread.run_sync(own_pool.kill_master)
        assert (await it.outcome_of_get(range(8))).reasons == {"connection": 8}
        assert (await it.outcome_of_put(range(8))).reasons == {"connection": 8}
        with pytest.raises(TierError, match="8 of 8 lookups failed: connection"):
            await it.tier.contains(keys(range(8)))
        await it.tier.discard(keys(range(8)))
        with pytest.raises(TierError, match="the reset could not be stored"):
            await it.tier.reset()
        assert set(await it.get(range(8))) == {Status.ABSENT}
        await to_thread.run_sync(own_pool.start_master)
        with anyio.fail_after(60):
            while True:
                try:
                    await it.tier.reset()
                    break
                except TierError:  # The client that holds the memory has not returned yet.
                    await anyio.sleep(0.05)
        await until(lambda: it.outcome_of_put(range(100, 108)), Status.OK)
        assert set(await it.get(range(100, 108))) == {Status.OK}


@pytest.mark.parametrize("client", [False, True], ids=["master", "client"])
async def test_hanging_master_holds_calls(own_pool: Pool, client: bool) -> None:
    async with opened(own_pool) as it:
        await it.outcome_of_put(range(4))
        batch, slots = it.empty(range(4))
        async with anyio.create_task_group() as tasks:
            with own_pool.stopped(client=client):
                tasks.start_soon(it.tier.get, batch)
                await anyio.sleep(0.2)
                tasks.cancel_scope.cancel()
        slots.reuse()
        slots.check_reused("a get from a pool that hung")
        assert set(await it.get(range(4))) == {Status.OK}


async def test_hanging_master_fails_open(own_pool: Pool) -> None:
    tier = MooncakeTier(MooncakeConfig(master=own_pool.address))
    with own_pool.stopped(), anyio.fail_after(30), pytest.raises(TierError, match="cannot be reached"):
        await tier.open(TierContext("pool", IDENTITY, 4096))


async def test_missing_master_names_setting() -> None:
    tier = MooncakeTier(MooncakeConfig(master=f"127.0.0.1:{free_port()}"))
    with pytest.raises(TierError, match=r"tier pool: the master at 127.* set master to its host:port"):
        await tier.open(TierContext("pool", IDENTITY, 4096))


async def test_missing_metadata_names_setting(pool: Pool) -> None:
    url = f"http://127.0.0.1:{free_port()}/metadata"
    tier = MooncakeTier(MooncakeConfig(master=pool.address, metadata_server=url))
    with pytest.raises(TierError, match=r"the metadata server at http.* or correct metadata_server"):
        await tier.open(TierContext("pool", IDENTITY, 4096))


async def test_empty_pool_names_setting(tmp_path: Path) -> None:
    with Pool(tmp_path, 0) as pool:
        with pytest.raises(TierError, match=r"no client of the master contributes memory.*segment_bytes"):
            async with opened(pool):
                pass
        async with opened(pool, segment_bytes=64 << 20) as it:
            assert set(await it.put(range(8))) == {Status.OK}
            assert set(await it.get(range(8))) == {Status.OK}


async def test_recovers_after_client_is_killed(tmp_path: Path) -> None:
    with Pool(tmp_path, 128 << 20, "--client_ttl", "5") as pool:
        async with opened(pool, segment_bytes=0) as it:
            await it.outcome_of_put(range(8))
            await to_thread.run_sync(pool.kill_client)
            outcome = await it.outcome_of_get(range(8))
            assert set(outcome.statuses) <= {Status.FAILED, Status.ABSENT}
            assert set(outcome.reasons) <= {"transfer"}
            await until(lambda: it.outcome_of_get(range(8)), Status.ABSENT)
            assert set(await it.put(range(8))) == {Status.REFUSED}
            await to_thread.run_sync(pool.start_client)
            await until(lambda: it.outcome_of_put(range(8)), Status.OK)
            assert set(await it.get(range(8))) == {Status.OK}


async def test_full_pool_evicts_unleased(tmp_path: Path) -> None:
    with Pool(tmp_path, 32 << 20, lease="60s") as pool:
        async with opened(pool, chunk_bytes=1 << 20) as it:
            there = [
                number
                for number in range(24)
                if (await it.outcome_of_put(range(number, number + 1))).statuses[0] is Status.OK
            ]
            assert 8 <= len(there) <= 24
            await it.outcome_of_get(range(24))  # holds leases on all chunks
            refused = await it.outcome_of_put(range(100, 132))
            assert Status.REFUSED in refused.statuses
            assert set(refused.reasons) == {"full"}


@pytest.mark.parametrize("master", ["", "host", "host:", ":50051", "host:0", "host:70000", "http://host"])
def test_bad_master_address_refused(master: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        MooncakeConfig(master=master)


@pytest.mark.parametrize(
    "server", ["", "nonsense", "P2P", "http://host/metadata", "ftp://host:1", "etcd://:2379"]
)
def test_bad_metadata_server_refused(server: str) -> None:
    with pytest.raises(ValueError, match="is neither P2PHANDSHAKE nor a URL with a port"):
        MooncakeConfig(metadata_server=server)


def test_readme_lists_settings() -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    for name, field in MooncakeConfig.model_fields.items():
        if name in MooncakeConfig.__annotations__ and name != "type":
            assert f"| `{name}` |" in readme
            assert str(field.description) in readme
