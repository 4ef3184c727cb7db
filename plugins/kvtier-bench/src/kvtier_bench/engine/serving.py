"""The throughput that an engine loses while a peer reads its chunks over NIXL.

This process is the peer. In every second stretch, its own NIXL tier gets chunks from an engine that is
decoding. Engine and reader have a core each, so that the reader takes no time from the engine. The engine's
tier process answers the reader and may send the bytes. In some stretches it shares the engine's core, in
others the reader's: then the engine's loss is not caused by a lack of processor time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier import HeapMemory, Identity
from kvtier.errors import ConfigError
from kvtier.keys import OffloadKey
from kvtier.tiers import Batch, SecondaryTier, TierContext
from kvtier.tiers import _registry as registry
from kvtier_bench.engine.compared import Engine, make_prompt, open_engines, say, spread_of_median
from kvtier_bench.engine.fleet import CHUNK_TOKENS, NIXL, PROMPT_TOKENS
from kvtier_bench.engine.server import free_port
from kvtier_bench.machine import Machine, open_folder, processor_s
from kvtier_bench.storage.movers import require_ok

if TYPE_CHECKING:
    from kvtier._isolation.process import ExecutorProcess
    from kvtier.adapters.vllm._manager import KVTierManager

CONTROL, OF_ENGINE, OF_READER, OWN = "nothing is read", "engine's core", "reader's core", "core of its own"
_PROMPTS = 16  # the prompts whose chunks are read
_DECODES, _DECODE_PROMPT, _DECODE_TOKENS = 4, 64, 128
_BATCH, _IN_FLIGHT = 8, 2
_SPACE = 512 * 2**20
_CONNECTED_S, _POLL_S = 60.0, 0.05


@dataclass(frozen=True)
class Lost:
    """Tokens per second that an engine loses while a peer reads; engine and reader have a core each

    Attributes:
        tier_process: the core of the engine's tier process; in the control the peer is connected and idle.
        gb_s: GB/s read; median over rounds.
        lost_percent: loss in percent of the tokens per second right before and after, without reads; median.
        low, high: bounds of the central 95 % of the medians of resampled rounds.
        engine_cpu: processor time of the engine's process per token, divided by the same without reads.
        tier_s_per_gb: processor seconds of the tier process per GB.
    """

    tier_process: str
    gb_s: float
    lost_percent: float
    low: float
    high: float
    engine_cpu: float
    tier_s_per_gb: float | None


class Stretch(NamedTuple):
    """A stretch of decoding: elapsed seconds, processor seconds of both processes, and GB read."""

    wall_s: float
    engine_s: float
    tier_s: float
    gb: float


Triple = tuple[Stretch, Stretch, Stretch]
"""A stretch with reads between two without: before, reading, after."""


def run(model: str, rounds: int, gb_s: float) -> list[Lost | Machine]:
    """Measure with a peer that reads ``gb_s`` GB/s, or as fast as it can.

    Raises:
        ConfigError: the machine has only one core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("--serve: engine and reader need a core each, and this process may use one only")
    machine = Machine.here()
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "spec_name": "KVTierOffloadingSpec",
        "cpu_bytes_to_use": _SPACE,
        "block_size": CHUNK_TOKENS,
        "isolation": "process",
        "secondary_tiers": [{"type": NIXL, "listen": address, "serve_bytes": _SPACE}],
    }
    try:
        os.sched_setaffinity(0, cores[:1])  # the engine inherits it
        with (
            open_folder(None) as logs,
            open_engines(logs, model, {NIXL: settings}, max_model_len=2 * PROMPT_TOKENS) as engines,
        ):
            os.sched_setaffinity(0, cores[1:2])
            found = asyncio.run(_measure(engines[NIXL], address, cores, rounds, gb_s))
    finally:
        os.sched_setaffinity(0, cores)
    return [*table(found), machine.again()]


async def _measure(
    engine: Engine, address: str, cores: Sequence[int], rounds: int, gb_s: float
) -> dict[str, list[Triple]]:
    """Return stretches, by the core of the tier process. Each stretch with reads lies between two without."""
    prompts = [make_prompt(number, PROMPT_TOKENS) for number in range(_PROMPTS)]
    engine.ask("generate", prompts=prompts, output_tokens=1, together=False)
    engine.ask("settle")
    facts = engine.ask("call", module=__name__, function="served", arguments={})
    keys = [OffloadKey(bytes.fromhex(key)) for key in facts["keys"]]
    pids = (engine.pid, facts["pid"])
    places = dict(zip((OF_ENGINE, OF_READER, OWN), cores, strict=False))
    ways: list[str] = [CONTROL, *places]
    found: dict[str, list[Triple]] = {way: [] for way in ways}
    settings = {
        "type": NIXL,
        "listen": "127.0.0.1:0",
        "peers": [address],
        "serve_bytes": facts["chunk_bytes"],
    }
    async with aclosing(registry.maker(registry.validate(settings, "--serve"))()) as tier:
        identity = Identity(facts["model"], json.loads(facts["manifest"]))
        await tier.open(TierContext(NIXL, identity, facts["chunk_bytes"]))
        held: list[OffloadKey] = []
        async with asyncio.timeout(_CONNECTED_S):
            while not held:
                await asyncio.sleep(_POLL_S)
                held = [key for key, is_held in zip(keys, await tier.contains(keys), strict=True) if is_held]
        say(f"the peer finds {len(held)} of {len(keys)} chunks")
        read = partial(_read, tier, held, HeapMemory(_BATCH * _IN_FLIGHT, facts["chunk_bytes"]), gb_s)
        await _decode(engine, pids)
        before = await _decode(engine, pids)
        for number in range(rounds):
            for way in random.Random(number).sample(ways, len(ways)):
                _pin(facts["pid"], places.get(way, cores[0]))
                stretch = await _decode(engine, pids, None if way == CONTROL else read)
                after = await _decode(engine, pids)
                say(f"round {number}: {way}: {stretch.wall_s:.2f} s, {stretch.gb / stretch.wall_s:.2f} GB/s")
                found[way].append((before, stretch, after))
                before = after
    return found


async def _decode(
    engine: Engine,
    pids: Sequence[int],
    read: Callable[[asyncio.Future[Any]], Awaitable[int]] | None = None,
) -> Stretch:
    """Start a decode on the engine, and read from the engine until the decode ends."""
    prompts = [make_prompt(-1 - number, _DECODE_PROMPT) for number in range(_DECODES)]
    before = [processor_s(pid) for pid in pids]
    answer = asyncio.ensure_future(
        asyncio.to_thread(engine.ask, "generate", prompts=prompts, output_tokens=_DECODE_TOKENS)
    )
    nbytes = await read(answer) if read else 0
    wall_s: float = (await answer)["wall_s"]
    engine_s, tier_s = (processor_s(pid) - used for pid, used in zip(pids, before, strict=True))
    return Stretch(wall_s, engine_s, tier_s, nbytes / 1e9)


async def _read(
    tier: SecondaryTier[Any],
    keys: Sequence[OffloadKey],
    memory: HeapMemory,
    gb_s: float,
    end: asyncio.Future[Any],
) -> int:
    """Get chunks repeatedly, at a given rate, until ``end`` is done; return the number of bytes."""
    batches = cycle([keys[first : first + _BATCH] for first in range(0, len(keys), _BATCH)])
    started, nbytes = time.perf_counter(), 0

    async def fly(first: int) -> None:
        nonlocal nbytes
        while not end.done():
            batch = next(batches)
            require_ok("get", await tier.get(Batch(batch, range(first, first + len(batch)), memory)))
            nbytes += len(batch) * memory.chunk_bytes
            await asyncio.sleep(nbytes / (gb_s * 1e9) - (time.perf_counter() - started))

    async with asyncio.TaskGroup() as flights:
        for flight in range(_IN_FLIGHT):
            flights.create_task(fly(flight * _BATCH))
    return nbytes


def table(found: Mapping[str, Sequence[Triple]]) -> list[Lost]:
    """Compare each stretch with the stretches before and after it."""
    rows = []
    for way, triples in found.items():
        lost = [100 * (1 - (one.wall_s + two.wall_s) / 2 / it.wall_s) for one, it, two in triples]
        low, high = spread_of_median(lost)
        costs = [it.tier_s / it.gb for _, it, _ in triples if it.gb]
        rows.append(
            Lost(
                way,
                gb_s=median(it.gb / it.wall_s for _, it, _ in triples),
                lost_percent=median(lost),
                low=low,
                high=high,
                engine_cpu=median(
                    2 * it.engine_s / (one.engine_s + two.engine_s) for one, it, two in triples
                ),
                tier_s_per_gb=median(costs) if costs else None,
            )
        )
    return rows


def _pin(pid: int, core: int) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {core})


# --- in the engine's process ---------------------------------------------------------------------


def served(llm: Any) -> dict[str, Any]:
    """Return the data that a peer needs to read from this engine, and the id of its tier process."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager: KVTierManager = scheduler.connector.connector_scheduler.manager
    executor: ExecutorProcess = manager._driver._submit.__self__  # type: ignore[attr-defined]
    return {
        "pid": executor.pid,
        "model": executor._identity.model,
        "manifest": executor._identity.manifest,
        "chunk_bytes": executor._region.chunk_bytes,
        "keys": [key.hex() for key in manager.core.table.visible],
    }
