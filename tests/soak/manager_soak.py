"""A TieringManager without an engine: as many stores and loads as the machine can do.

Tasks on one event loop store prompts, load them into blocks of their own and compare every byte, hold
chunks, ask for them, and are cancelled in the midst of it. All tiers are too small; one of them fails,
damages chunks and hangs; now and then everything is reset. After each round all tasks have ended, and all
figures are sampled.

Run as ``python -m tests.soak.manager_soak FOLDER SECONDS SEED``, in a process of its own whose memory is
then its own; the samples are written to standard output as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import anyio
import torch

from kvtier import Identity, KVCaches, PageRef, TieringConfig, open_manager, pack_key
from kvtier._manager import TieringManager
from kvtier.keys import OffloadKey
from tests.soak.in_engine import objects, tasks
from tests.soak.process_stats import ProcessStats, on_disk
from tests.soak.trend import FEWEST_SAMPLES, Bound, Sample

MIB = 1 << 20
PAGE_BYTES = 16384 - 64  # a slot of four pages, nearly all of which is the chunk's
SLOTS = 96
TASKS = 16
BLOCKS = 16
LONGEST = 12
STEPS = 16
ROOT_BYTES = 4 * MIB
DRAIN_S = 60.0
DEADLINE_S = 0.3

BOUNDS: Mapping[str, Bound] = {
    "memory, MiB": Bound(12, "calls", 0.1 / 1024),
    "python blocks": Bound(100_000, "calls", 0.05),
    "objects of kvtier": Bound(40, "calls", 0.002),
    "tasks": Bound(3, "calls"),
    "descriptors, not of roots": Bound(2, "calls"),
    "descriptors, of roots": Bound(60, "calls"),
    "threads": Bound(4, "calls"),
    "pinned chunks": Bound(0, "calls", most=0),
    "disk, files: MiB": Bound(ROOT_BYTES / MIB, "calls", most=ROOT_BYTES / MIB),
}
"""How much may grow, see ``trend``. There are thousands of calls a minute, so a leak of some hundred
bytes a call is found in an hour, and a task that is left behind within seconds. The constants are what the
tiers remember of chunks, until that is as much as they may, and what pools do."""


@dataclass
class ManagerSoak:
    """A manager and what is done with it.

    Args:
        folder: of the roots.
        seed: of all choices.

    Attributes:
        seen: what has happened how often.
        samples: of all figures, in order.
    """

    folder: Path
    seed: int
    seen: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._tensor = torch.zeros((TASKS * BLOCKS, PAGE_BYTES), dtype=torch.int8)
        self._began_s = time.monotonic()

    async def run(self, seconds: float) -> None:
        """Run for so long.

        Raises:
            AssertionError: a wrong byte, or something did not come to rest.
        """
        caches = KVCaches((self._tensor,), ((PageRef(0, PAGE_BYTES),),))
        identity = Identity.make("soak", {"dtype": "int8"})
        async with open_manager(self._config(), identity, caches) as manager:
            while time.monotonic() < self._began_s + seconds or len(self.samples) < FEWEST_SAMPLES:
                await self._round(manager)
                with anyio.fail_after(DRAIN_S):
                    await manager.drain()
                self._sample(manager)
            self._note_work(manager)

    def _config(self) -> TieringConfig:
        quick = {"deadline_s": DEADLINE_S, "breaker_pause_s": 0.05}
        small = {"type": "fs", "max_bytes": ROOT_BYTES, "min_free_bytes": 0, "recount_s": 10, "n_threads": 2}
        faults = {"failure_rate": 0.02, "corruption_rate": 0.02, "hang_rate": 0.0005}
        files = {**small, **quick, "name": "files", "root_dir": str(self.folder / "files")}
        dummy = {"type": "dummy", "capacity_bytes": 6 * MIB, "complete_index": False, "seed": self.seed}
        return TieringConfig.from_mapping(
            {
                "cpu_bytes_to_use": SLOTS * 16384,
                "request_deadline_s": DEADLINE_S,
                "secondary_tiers": [files, {**dummy, **faults, **quick}],
            }
        )

    async def _round(self, manager: TieringManager) -> None:
        async with anyio.create_task_group() as group:
            for place in range(TASKS):
                group.start_soon(self._user, manager, place, random.Random(self._chance.getrandbits(60)))
        if len(self.samples) % 5 == 0:
            await manager.reset()
            self.seen["resets"] += 1

    async def _user(self, manager: TieringManager, place: int, chance: random.Random) -> None:
        blocks = range(place * BLOCKS, (place + 1) * BLOCKS)
        for _ in range(STEPS):
            keys = _prompt(chance)
            call = chance.choice([self._store, self._store, self._load, self._load, self._hold])
            is_cut = chance.random() < 0.1
            with anyio.move_on_after(chance.random() * 0.01 if is_cut else None) as scope:
                await call(manager, keys, blocks)
            self.seen["calls"] += 1
            self.seen["cancelled"] += scope.cancelled_caught

    async def _store(self, manager: TieringManager, keys: Sequence[OffloadKey], blocks: range) -> None:
        for key, block in zip(keys, blocks, strict=False):
            self._tensor[block] = _page(key)
        self.seen["stored"] += await manager.store(keys, blocks[: len(keys)])

    async def _load(self, manager: TieringManager, keys: Sequence[OffloadKey], blocks: range) -> None:
        self._tensor[blocks.start : blocks.stop] = 0
        count = await manager.load(keys, blocks[: len(keys)])
        for key, block in zip(keys[:count], blocks, strict=False):
            assert torch.equal(self._tensor[block], _page(key)), f"wrong bytes of {key.hex()}"
        self.seen["loaded"] += count

    async def _hold(self, manager: TieringManager, keys: Sequence[OffloadKey], blocks: range) -> None:
        self.seen["found"] += await manager.lookup(keys)
        async with manager.acquire(keys) as acquired:
            await anyio.sleep(0.001)
            for key, view in zip(acquired.keys, acquired.views, strict=True):
                assert view[:PAGE_BYTES] == memoryview(_page(key).numpy()).cast("B"), f"wrong: {key.hex()}"

    def _note_work(self, manager: TieringManager) -> None:
        """Note what the tiers have done.

        Raises:
            AssertionError: one of them has done nothing: then nothing is shown.
        """
        counts = manager.statistics().counts
        self.seen["evicted"] = int(counts.get(("evicted",), 0))
        for tier in ("files", "dummy"):
            for verb, name in (("put", f"put into {tier}"), ("fetched", f"fetched from {tier}")):
                self.seen[name] = int(counts.get((verb, tier), 0))
        for what in ("evicted", "cancelled", "loaded", "resets", "put into files"):
            assert self.seen[what], f"nothing has happened of {what}: {self.seen}"

    def _sample(self, manager: TieringManager) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        its = ProcessStats.of(os.getpid(), self.folder)
        statistics = manager.statistics()
        figures: dict[str, float] = {
            "memory, MiB": its.memory_bytes / MIB,
            "python blocks": sys.getallocatedblocks(),
            "objects of kvtier": sum(objects().values()),
            "tasks": tasks(),
            "descriptors, not of roots": its.other_files,
            "descriptors, of roots": its.disk_files,
            "threads": its.threads,
            "pinned chunks": statistics.pinned_chunks,
        }
        figures["disk, files: MiB"] = on_disk(self.folder / "files")[1] / MIB
        self.samples.append(Sample(time.monotonic() - self._began_s, {"calls": self.seen["calls"]}, figures))


def _prompt(chance: random.Random) -> list[OffloadKey]:
    """Return the keys of one of a hundred prompts, or of one that is asked for once, up to some length."""
    name = chance.randrange(100) if chance.random() < 0.8 else chance.getrandbits(62)
    length = chance.randrange(1, LONGEST)
    return [pack_key(name.to_bytes(8, "big") + index.to_bytes(8, "big"), 0) for index in range(length)]


def _page(key: OffloadKey) -> torch.Tensor:
    """Return what a chunk holds."""
    generator = torch.Generator().manual_seed(int.from_bytes(key[6:16], "big") % (1 << 63))
    return torch.randint(-128, 128, (PAGE_BYTES,), dtype=torch.int8, generator=generator)


def run_apart(folder: Path, seconds: float, seed: int) -> tuple[list[Sample], Counter[str]]:
    """Run it in a process of its own.

    Raises:
        subprocess.CalledProcessError: it has failed, and has said why on the error output.
    """
    command = [sys.executable, "-m", "tests.soak.manager_soak", str(folder), str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    told = json.loads(done.stdout)
    return [Sample(**sample) for sample in told["samples"]], Counter(told["seen"])


def main() -> None:
    """Run, and write the samples to standard output."""
    folder, seconds, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    soak = ManagerSoak(folder, seed)
    anyio.run(soak.run, seconds)
    json.dump({"samples": [asdict(sample) for sample in soak.samples], "seen": soak.seen}, sys.stdout)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
