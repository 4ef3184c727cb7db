"""Random lives of ``TieringManager`` with real tiers, judged by a dictionary: ``python -m
tests.differential.managers [--minutes N] [--seed N]``. No engine."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import torch

from kvtier import Acquired, TieringConfig, TieringManager, open_manager
from kvtier.errors import TransferError
from kvtier.keys import OffloadKey
from kvtier_testing import invariants
from tests.differential.draws import draw_tiers
from tests.unit.test_manager import IDENTITY, Device, prompt

SLOT_BYTES = 4096  # of a block
CALLERS, BLOCKS = 4, 48
PROBE = 99
BOUND_S = 30.0
NEVER = ("policy_replaced", "audit_failed")

Keys = list[OffloadKey]


class Life:
    """Concurrent calls of a manager, which is closed and opened again.

    The content of a chunk follows from its key and the number of resets before its store.

    Args:
        seed: draws everything.
        folder: for the files of tiers.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self._chance = chance = Random(seed)
        self._width, self._groups = chance.choice([1, 1, 2, 3]), chance.choice([1, 2])
        self.device = Device(self._groups, self._width, blocks=CALLERS * BLOCKS)
        self._slots = chance.choice([6, 12, 24, 60])
        self._tiers = [self._tier(dict(tier), folder) for tier in draw_tiers(chance)]
        self._may_reset = chance.random() < 0.5
        self._resets = 0
        self._offered: defaultdict[int, set[OffloadKey]] = defaultdict(set)  # by resets before
        self._is_kept = False  # whether files must have the probe

    def _tier(self, tier: dict[str, Any], folder: Path) -> dict[str, Any]:
        if tier["type"] == "dummy":
            return {**tier, "deadline_s": 0.3}
        room = self._chance.choice([2**50, 2**50, 40 * SLOT_BYTES * self._width])
        return {**tier, "root_dir": str(folder / "root"), "min_free_bytes": 0, "max_bytes": room}

    def config(self) -> TieringConfig:
        """Draw the settings of an opening; tiers and chunks are the same in all of them."""
        chance = self._chance
        return TieringConfig.from_mapping(
            {
                "cpu_bytes_to_use": self._slots * SLOT_BYTES * self._width,
                "blocks_per_chunk": self._width,
                "eviction_policy": chance.choice(["auto", "lru", "arc", "lhd"]),
                "promotion_budget": chance.choice([0.1, 0.25, 0.9]),
                "isolation": "thread",
                "audit_rate": chance.choice([0, 1.0]),
                "request_deadline_s": chance.choice([0.05, 2.0]),
                "secondary_tiers": self._tiers,
            }
        )

    async def run(self) -> int:
        """Live; return how many chunks were loaded.

        Raises:
            AssertionError: bytes are wrong, pins or transfers are left, or chunks are lost.
        """
        loaded = 0
        for _ in range(self._chance.randrange(1, 4)):
            resets = self._resets
            async with open_manager(self.config(), IDENTITY, self.device.caches) as manager:
                callers = [
                    Caller(self, manager, Random(self._chance.getrandbits(60)), number)
                    for number in range(CALLERS)
                ]
                await self._find_probe(callers[0])
                with anyio.fail_after(BOUND_S):
                    async with anyio.create_task_group() as tasks:
                        for caller in callers:
                            tasks.start_soon(caller.run, self._chance.randrange(10, 40))
                await self._rest(manager)
                is_kept = await self._probe(callers[0])
                # Later openings do not see the chunks that were stored after a reset.
                self._is_kept = is_kept and self._resets == resets
                loaded += sum(caller.loaded for caller in callers)
        return loaded

    # --- what is right ---------------------------------------------------------------------------

    @property
    def resets(self) -> int:
        return self._resets

    def draw(self, chance: Random) -> Keys:
        """Draw the beginning of a prompt, in one group or chunk by chunk in all."""
        name, most = chance.randrange(8), BLOCKS // self._width // self._groups
        keys = [prompt(name, chance.randrange(1, most + 1), group) for group in range(self._groups)]
        return [key for chunk in zip(*keys, strict=False) for key in chunk]

    def offer(self, keys: Keys) -> None:
        """Note that these keys may be found from now on."""
        self._offered[self._resets].update(keys)

    def require_offered(self, keys: Keys) -> None:
        """Raise AssertionError for a key that was not stored since the last reset."""
        known = self._offered[self._resets]
        assert known.issuperset(keys), f"{set(keys) - known} were found, and were not stored"

    def require_content(self, keys: Keys, blocks: list[int]) -> None:
        """Raise AssertionError if a block has not what was stored in it since the last reset."""
        self.require_offered(keys)
        for place, key in enumerate(keys):
            mine = blocks[place * self._width :][: self._width]
            assert self.device.holds([key], mine, self._resets), f"{key!r} is wrong"

    async def reset(self, manager: TieringManager) -> None:
        if self._may_reset:
            self._resets += 1
            await manager.reset()

    # --- at rest ---------------------------------------------------------------------------------

    async def _rest(self, manager: TieringManager) -> None:
        with anyio.fail_after(BOUND_S):
            await manager.drain()
        invariants.check(manager._core)
        seen = manager.statistics()
        assert seen.pinned_chunks == 0
        assert seen.free_slots + seen.ready_chunks == seen.slots == self._slots
        assert not [name for name in seen.counts if name[0] in NEVER], "nothing injects these"

    async def _probe(self, caller: Caller) -> bool:
        """Store a new prompt, which must be found at once. Return whether files must have it."""
        keys, manager = self._probe_keys, caller.manager
        before = _lost(manager)
        await caller.store(keys)
        await self._rest(manager)
        assert await manager.lookup(keys) == len(keys)
        is_whole = any(tier["type"] == "fs" and tier["max_bytes"] == 2**50 for tier in self._tiers)
        is_quiet = all(tier["write_policy"] == "all" for tier in self._tiers) and _lost(manager) == before
        return is_whole and is_quiet

    async def _find_probe(self, caller: Caller) -> None:
        with anyio.fail_after(BOUND_S):
            while self._is_kept and not all(await caller.manager.locate(self._probe_keys)):  # noqa: ASYNC110
                await anyio.sleep(0.01)  # the tier is not open yet, or late for a short deadline

    @property
    def _probe_keys(self) -> Keys:
        return prompt(PROBE, self._slots // 4)


def _lost(manager: TieringManager) -> float:
    """Return how many puts were dropped or have failed."""
    counts = manager.statistics().counts
    return sum(count for name, count in counts.items() if name[0] in ("put_dropped", "put_failed"))


class Caller:
    """Calls a manager with blocks of its own."""

    def __init__(self, life: Life, manager: TieringManager, chance: Random, number: int) -> None:
        self.manager, self.loaded = manager, 0
        self._life, self._chance = life, chance
        self._blocks = list(range(number * BLOCKS, (number + 1) * BLOCKS))

    async def run(self, calls: int) -> None:
        """Make random calls; some are cancelled."""
        kinds = [self.store, self._load, self._hold, self._look, self._write, self._forget]
        for _ in range(calls):
            (call,) = self._chance.choices(kinds, [28, 28, 14, 14, 14, 2])
            with anyio.move_on_after(self._chance.choice([None, None, None, 0, 0.001])):
                await call(self._life.draw(self._chance))
            invariants.check(self.manager._core)

    async def store(self, keys: Keys) -> None:
        device, blocks = self._life.device, self._chance.sample(self._blocks, len(self._blocks))
        device.fill(keys, blocks, self._life.resets)
        self._life.offer(keys)
        with anyio.CancelScope(shield=True):  # a copy must not read blocks that the next call fills
            assert 0 <= await self.manager.store(keys, self._used(keys, blocks)) <= len(keys)

    async def _load(self, keys: Keys) -> None:
        device, blocks = self._life.device, self._clear()
        with anyio.CancelScope(shield=True), self._voided_by_resets():
            count = await self.manager.load(keys, self._used(keys, blocks))
            self._life.require_content(keys[:count], blocks)
            assert device.is_clear(blocks[count * device.blocks_per_chunk :])
            self.loaded += count

    async def _hold(self, keys: Keys) -> None:
        """Load chunks late in a block that pins them."""
        with self._voided_by_resets():
            async with self.manager.acquire(keys) as acquired:
                await anyio.sleep(self._chance.choice([0, 0, 0.001, 0.01]))
                with anyio.CancelScope(shield=True):
                    await self._load_acquired(acquired)

    async def _load_acquired(self, acquired: Acquired) -> None:
        blocks, keys = self._clear(), list(acquired.keys)
        if keys:
            await acquired.load(self._used(keys, blocks))
        self._life.require_content(keys, blocks)

    @contextmanager
    def _voided_by_resets(self) -> Iterator[None]:
        """Accept the error of a load that a reset overtook."""
        before = self._life.resets
        try:
            yield
        except TransferError:
            assert self._life.resets > before

    async def _look(self, keys: Keys) -> None:
        self._life.require_offered(keys[: await self.manager.lookup(keys)])
        found = await self.manager.locate(keys)
        self._life.require_offered([key for key, is_there in zip(keys, found, strict=True) if is_there])

    async def _forget(self, keys: Keys) -> None:
        """Reset while chunks are put into tiers, and look for them."""
        await self.store(keys)
        await self._life.reset(self.manager)
        await self._load(keys)

    async def _write(self, keys: Keys) -> None:
        """Begin to fill slots, and give up."""
        try:
            async with self.manager.write(keys) as written:
                for view in written.views:
                    view[:100] = bytes(100)
                    await anyio.lowlevel.checkpoint()
                raise InterruptedError
        except InterruptedError:
            pass

    def _used(self, keys: Keys, blocks: list[int]) -> list[int]:
        return blocks[: len(keys) * self._life.device.blocks_per_chunk]

    def _clear(self) -> list[int]:
        self._life.device.clear(self._blocks)
        return self._chance.sample(self._blocks, len(self._blocks))


def run(seed: int) -> int:
    """Run a life; return how many chunks were loaded. Raises AssertionError if a judge objects."""
    torch.set_num_threads(1)  # several of them wait for each other where the cores are busy
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(Life(seed, Path(name)).run())


def main() -> None:
    """Run lives until time is over, and print the seeds of those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    until_s, seed, loaded = time.monotonic() + options.minutes * 60, options.seed, 0
    while time.monotonic() < until_s:
        try:
            loaded += run(seed)
        except BaseException:
            print(f"seed {seed} fails", flush=True)
            raise
        seed += 1
    print(f"{seed - options.seed} lives are right; {loaded} chunks were loaded")


if __name__ == "__main__":
    main()
