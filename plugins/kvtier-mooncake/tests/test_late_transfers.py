"""A transfer that outlives the client's call is stopped before its slots are released."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio import to_thread
from pools import IDENTITY, Pool, opened

from kvtier.errors import TierError
from kvtier.tiers import Status, TierContext
from kvtier_mooncake import MooncakeConfig, MooncakeTier, _client, _store
from kvtier_testing.tiers import TierRig
from kvtier_testing.tiers.rig import keys

pytestmark = pytest.mark.anyio
OPENED_ANEW = "a transfer did not end in time, and closing the client has stopped it"
OK, NOT_FOUND, LEASE, TRANSFER, UNREACHABLE, UNKNOWN = 256 * 1024 + 128, -704, -707, -800, -900, -1602


class StandIn:
    """A double of Mooncake's client. Tests decide how calls end; it counts the calls inside."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.error: Exception | None = None
        self.exists: Callable[[list[str]], list[int]] = lambda names: [0] * len(names)
        self.inside = 0
        self.closed_with_inside: list[int] = []

    def setup(self, *_: object) -> int:
        return 0

    def register_buffer(self, *_: object) -> int:
        return 0

    def get(self, _name: str) -> bytes:
        return b"epoch"

    def get_size(self, _name: str) -> int:
        return OK

    def batch_get_into_multi_buffers(self, *_: object) -> list[int]:
        if self.error is not None:
            raise self.error
        return self.codes

    batch_put_from_multi_buffers = batch_get_into_multi_buffers

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self.inside += 1
        try:
            return self.exists(names)
        finally:
            self.inside -= 1

    def close(self) -> None:
        self.closed_with_inside.append(self.inside)

    @property
    def is_closed(self) -> bool:
        return bool(self.closed_with_inside)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    module = SimpleNamespace(MooncakeDistributedStore=lambda: made, ReplicateConfig=SimpleNamespace)
    monkeypatch.setattr(_store, "library", lambda: module)
    monkeypatch.setattr(_store, "own_address", lambda master: "127.0.0.1")
    return made


@pytest.fixture
def gives_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_client, "_GIVES_UP_S", 0.0)


async def open_tier(lost: Callable[[str], None], **settings: Any) -> TierRig:
    rig = TierRig(MooncakeTier(MooncakeConfig(**settings)), IDENTITY, 256 * 1024)
    await rig.tier.open(TierContext("pool", IDENTITY, rig.chunk_bytes, lost=lost))
    return rig


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize("code", [TRANSFER, UNREACHABLE, LEASE, UNKNOWN])
@pytest.mark.usefixtures("gives_up_at_once")
async def test_abandoned_transfer_stops(client: StandIn, verb: str, code: int) -> None:
    lost: list[str] = []
    it = await open_tier(lost.append)
    client.codes = [OK if verb == "get" else 0, code]
    batch, _ = it.filled(range(2)) if verb == "put" else it.empty(range(2))
    outcome = await (it.tier.put(batch) if verb == "put" else it.tier.get(batch))
    assert list(outcome.statuses) == [Status.OK, Status.FAILED]
    assert client.is_closed
    assert lost == [OPENED_ANEW]
    for call in (it.tier.contains(keys(range(2))), it.tier.get(batch)):
        with pytest.raises(ConnectionError, match="kvtier opens the tier anew"):
            await call
    await it.tier.aclose()
    assert (len(client.closed_with_inside), len(lost)) == (1, 1)


@pytest.mark.parametrize(
    ("code", "protocol", "closes"),
    [
        (TRANSFER, "tcp", False),
        (TRANSFER, "rdma", True),
        (UNREACHABLE, "rdma", False),
        (LEASE, "rdma", False),
        (NOT_FOUND, "rdma", False),
        (UNKNOWN, "tcp", True),
    ],
)
async def test_failure_closes_busy_client(client: StandIn, code: int, protocol: str, closes: bool) -> None:
    lost: list[str] = []
    it = await open_tier(lost.append, protocol=protocol)
    client.codes = [code]
    await it.tier.get(it.empty(range(1))[0])
    assert (client.is_closed, bool(lost)) == (closes, closes)
    await it.tier.aclose()


@pytest.mark.usefixtures("gives_up_at_once")
async def test_slow_miss_keeps_client(client: StandIn) -> None:
    it = await open_tier(pytest.fail)
    client.codes = [OK, NOT_FOUND]
    outcome = await it.tier.get(it.empty(range(2))[0])
    assert list(outcome.statuses) == [Status.OK, Status.ABSENT]
    assert not client.is_closed
    await it.tier.aclose()


async def test_put_of_removed_chunk_fails(client: StandIn) -> None:
    it = await open_tier(pytest.fail)
    client.codes = [0, NOT_FOUND]
    outcome = await it.tier.put(it.filled(range(2))[0])
    assert list(outcome.statuses) == [Status.OK, Status.FAILED]
    assert outcome.reasons == {"error": 1}
    await it.tier.aclose()


async def test_raising_call_closes_client(client: StandIn) -> None:
    it = await open_tier(lambda why: None)
    client.error = MemoryError()
    with pytest.raises(MemoryError):
        await it.tier.get(it.empty(range(1))[0])
    assert client.is_closed


@pytest.mark.usefixtures("gives_up_at_once")
async def test_client_closes_when_unused(client: StandIn) -> None:
    it = await open_tier(lambda why: None)
    client.codes = [TRANSFER]
    inside, leave, found = threading.Event(), threading.Event(), list[bool]()
    tier = it.tier
    assert isinstance(tier, MooncakeTier)

    def stays(names: list[str]) -> list[int]:
        inside.set()
        assert leave.wait(60)
        return [1] * len(names)

    async def look_up() -> None:
        found.extend(await it.tier.contains(keys(range(1))))

    client.exists = stays
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look_up)
        await to_thread.run_sync(inside.wait, 60)
        tasks.start_soon(it.tier.get, it.empty(range(1))[0])
        try:
            with anyio.fail_after(60):
                while tier._opened._client.is_usable:  # noqa: ASYNC110 (until it is about to be closed)
                    await anyio.sleep(0.01)
            assert not client.is_closed
        finally:
            leave.set()
    assert found == [True]
    assert client.closed_with_inside == [0]


@pytest.mark.parametrize("codes", [[-900, -900, -900], [-1, -900, 0], [1, 0, -1]])
async def test_unanswered_lookup_fails(client: StandIn, codes: list[int]) -> None:
    it = await open_tier(pytest.fail)
    client.exists = lambda names: codes
    if codes[0] == 1:
        assert list(await it.tier.contains(keys(range(3)))) == [True, False, False]
    else:
        with pytest.raises(TierError, match="of 3 lookups failed"):
            await it.tier.contains(keys(range(3)))
    await it.tier.aclose()


@pytest.mark.full
async def test_slow_link_spares_reused_slots(tmp_path: Path) -> None:
    """The client abandons a transfer after 60 s if bytes keep arriving but some are missing."""
    with Pool(tmp_path, 256 << 20) as pool:
        async with opened(pool, chunk_bytes=64 << 20) as it:
            await it.outcome_of_put(range(1))
            batch, slots = it.empty(range(1))
            async with anyio.create_task_group() as tasks:
                with pool.stopped(client=True):

                    async def trickle() -> None:
                        while True:
                            # shorter than the 30 s after which a silent connection is dropped
                            await anyio.sleep(22)
                            pool.run_client(0.004)

                    tasks.start_soon(trickle)
                    begun = time.monotonic()
                    assert (await it.tier.get(batch)).reasons == {"transfer": 1}
                    assert time.monotonic() - begun > 50  # The transfer was abandoned, not dropped.
                    tasks.cancel_scope.cancel()
                    slots.reuse()
            with anyio.CancelScope(shield=True):
                for _ in range(20):
                    await anyio.sleep(0.25)
                    slots.check_reused("a get that was given up")
