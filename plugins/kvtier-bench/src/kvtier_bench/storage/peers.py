"""Benchmark of reads from another process's memory: the NIXL tier, compared with NIXL alone.

A second process, the holder, serves the same bytes in two ways: as chunks of an open tier, and as plain
memory registered with NIXL. In each round, this process gets them through its own tier and reads them with
NIXL alone. Both use the same settings of NIXL, and the same ``UCX_TLS`` and ``UCX_NET_DEVICES``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

from kvtier import HeapMemory, Identity
from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import Batch, TierContext
from kvtier.tiers import _registry as registry
from kvtier_bench.engine.server import free_port
from kvtier_bench.machine import Machine
from kvtier_bench.storage.disk import fill
from kvtier_bench.storage.movers import BATCHES_IN_FLIGHT, SIZES, BatchMover, TierMover, key_of, require_ok
from kvtier_bench.storage.throughput import Throughput, compare
from kvtier_bench.storage.tier import BATCH_CHUNKS, GOAL, SINGLES, Latency, percentiles_ms, timed

HELD_BATCHES: Final = 8
"""Batches that the holder has; they are read again and again."""

_POLL_S: Final = 0.0005
_CONNECTED_S: Final = 60.0


def run(
    sizes: Sequence[int] = SIZES, mib: int = 256, rounds: int = 5
) -> list[Throughput | Latency | Machine]:
    """Measure.

    Args:
        mib: MiB read in each stretch.

    Raises:
        KVTierError: a tier cannot be opened or fails.
    """
    machine = Machine.here()
    found: list[Throughput | Latency | Machine] = []
    for size in sizes:
        found += asyncio.run(_measure(size, mib * 2**20, rounds))
    return [*found, machine.again()]


async def _measure(size: int, nbytes: int, rounds: int) -> list[Throughput | Latency]:
    address = f"127.0.0.1:{free_port()}"
    with _holder(address, size) as served:
        memory = HeapMemory(BATCH_CHUNKS * BATCHES_IN_FLIGHT, size)
        async with _opened(size, peers=[address]) as tier:
            subject, bare = HeldByPeer(tier, _identity(size), memory), BareReader(memory, served)
            await subject.until_found()
            rows = await compare({"nixl": subject}, bare, size, nbytes, rounds, GOAL, verbs=("get",))
            return [*rows, await _latency(size, subject, bare, rounds)]


class HeldByPeer(TierMover):
    """A tier that gets the chunks that its peer has put."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hold([self.make(keys) for keys in _held_keys()])

    async def until_found(self) -> None:
        """Wait until the peer is connected."""
        async with asyncio.timeout(_CONNECTED_S):
            while not all(await self.tier.contains([key_of(0)])):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(_POLL_S)


class BareReader(BatchMover[int]):
    """NIXL alone, with the addresses of the bytes. A batch is the address of its first chunk."""

    def __init__(self, memory: HeapMemory, served: dict[str, Any]) -> None:
        super().__init__(memory)
        self._agent = _agent("reader")
        self._agent.register_memory([(memory.address, memory.slots * memory.chunk_bytes, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(base64.b64decode(served["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._base = served["base"]
        self.hold([self.address(batch * BATCH_CHUNKS) for batch in range(HELD_BATCHES)])

    def address(self, chunk: int) -> int:
        """Return the holder's address of a chunk."""
        return self._base + chunk * self.memory.chunk_bytes

    async def get(self, batch: int, slots: range) -> None:
        length, base = self.memory.chunk_bytes, self.memory.address
        remote = [(batch + index * length, length, 0) for index in range(len(slots))]
        local = [(base + slot * length, length, 0) for slot in slots]
        parts = [self._agent.get_xfer_descs(part, "DRAM") for part in (local, remote)]
        handle = self._agent.initialize_xfer("READ", *parts, self._peer)
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                await asyncio.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TierError(f"a read by NIXL ended {state}")


async def _latency(size: int, tier: HeldByPeer, bare: BareReader, rounds: int) -> Latency:
    """Time gets of single chunks on an idle tier."""
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds * SINGLES):
        chunk = number % (HELD_BATCHES * BATCH_CHUNKS)
        ours.append(await timed(tier.get(tier.make([key_of(chunk)]), range(1))))
        theirs.append(await timed(bare.get(bare.address(chunk), range(1))))
    return Latency(size, "get", *percentiles_ms(ours), *percentiles_ms(theirs))


def _agent(role: str) -> Any:
    """Return a NIXL agent with the settings of the tier, but independent of the tier."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # NIXL logs to stdout, which is where the figures go.
    from kvtier_nixl._agent import new_agent

    return new_agent(f"kvtier-bench-{role}", is_local=True)


def _identity(size: int) -> Identity:
    return Identity.make("bench", {"chunk_bytes": size})


def _held_keys() -> Iterator[Sequence[OffloadKey]]:
    for first in range(0, HELD_BATCHES * BATCH_CHUNKS, BATCH_CHUNKS):
        yield [key_of(number) for number in range(first, first + BATCH_CHUNKS)]


@asynccontextmanager
async def _opened(size: int, **settings: Any) -> AsyncIterator[Any]:
    """Open a NIXL tier."""
    held = HELD_BATCHES * BATCH_CHUNKS * size
    given = {"type": "nixl", "listen": "127.0.0.1:0", "serve_bytes": held, "receive_bytes": held, **settings}
    tier = registry.maker(registry.validate(given, "bench peers"))()
    await tier.open(TierContext("nixl", _identity(size), size))
    try:
        yield tier
    finally:
        await tier.aclose()


# --- the holder ----------------------------------------------------------------------------------


@contextmanager
def _holder(address: str, size: int) -> Iterator[dict[str, Any]]:
    """Start a process that holds the bytes; yield their locations."""
    command = [sys.executable, "-m", __name__, address, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise TierError("the process that holds the chunks has ended; its reason is above")
            yield json.loads(line)
        finally:
            with suppress(OSError):
                process.stdin.close()


async def _hold(address: str, size: int) -> None:
    """Run the holder: print the locations of the bytes, and keep them until stdin is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    memory = HeapMemory(HELD_BATCHES * BATCH_CHUNKS, size)
    fill(memory)
    agent = _agent("holder")
    served = agent.register_memory([(memory.address, memory.slots * size, 0, "")], "DRAM")
    metadata = agent.get_partial_agent_metadata(served, inc_conn_info=True, backends=["UCX"])
    async with _opened(size, listen=address) as tier:
        mover = TierMover(tier, _identity(size), memory)
        for keys in _held_keys():
            _, trailers = mover.make(keys)
            require_ok("put", await tier.put(Batch(keys, range(BATCH_CHUNKS), memory, trailers)))
        facts = {"base": memory.address, "metadata": base64.b64encode(metadata).decode()}
        print(json.dumps(facts), file=answers, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_hold(sys.argv[1], int(sys.argv[2])))
