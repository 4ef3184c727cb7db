"""Random lives of ``TieringManager`` over real and hostile tiers, judged by a dictionary. No engine.

``python -m tests.differential.managers [--minutes N] [--seed N] [--bugs NAME ...]``. Bugs are those of
``tests.differential.mutations.OF_MANAGERS`` and of ``tests.sim.mutations``.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
import torch

from kvtier import (
    Acquired,
    ConfigError,
    Identity,
    KVCaches,
    PageMapping,
    PageRef,
    StateError,
    TierError,
    TieringConfig,
    TransferError,
    open_manager,
    prometheus_collector,
)
from kvtier._device.base import PieceRun
from kvtier._memory.layout import SlotLayout
from kvtier.keys import OffloadKey
from kvtier.tiers import until_done
from kvtier_testing import invariants
from tests.differential.draws import draw_tiers
from tests.differential.hostile import TIER_FAULTS, HostilePolicy, installed
from tests.differential.mutations import OF_MANAGERS
from tests.sim.mutations import MUTATIONS, planted
from tests.unit.test_manager import Device, prompt

SLOT_BYTES = 4096  # at most, per block
CALLERS, BLOCKS = 3, 24
BOUND_S = 30.0
NEVER = ("audit_failed",)

Keys = list[OffloadKey]
PROBE: Keys = prompt(99, 2)


class Variant(NamedTuple):
    """The properties that separate the chunks of managers on one root.

    Attributes:
        pages: bytes of a block's page in each tensor.
        width: blocks per chunk.
    """

    pages: tuple[int, ...] = (3072, 960)
    width: int = 1
    dtype: str = "int8"
    namespace: str = ""


LAYOUTS = (((3072, 960), 1), ((960, 3072), 1), ((1536, 480), 2), ((4032,), 1), ((3072, 960), 3))
"""All layouts but the last have chunks of equal length."""


class Tensors(Device):
    """The tensors of an engine. Slots can hold the two halves of a page in reverse order."""

    def __init__(self, variant: Variant, groups: int, *, swapped: bool) -> None:
        super().__init__(groups, variant.width, CALLERS * BLOCKS, variant.pages)
        self._swapped = swapped
        self._layout = SlotLayout.make(self.caches.page_bytes, variant.width)
        if swapped:
            refs = (tuple(replace(ref, mapping=_swap(ref)) for ref in group) for group in self.caches.groups)
            self.caches = KVCaches(self.caches.tensors, tuple(refs))

    def _pages(self, *chunks: Any) -> list[tuple[int, int, torch.Tensor]]:
        pages = super()._pages(*chunks)
        return [(at, block, page.roll(len(page) // 2 * self._swapped)) for at, block, page in pages]

    def slot(self, key: OffloadKey, version: object) -> Iterator[tuple[slice, bytes]]:
        """Yield the pages of a chunk in a slot, with their places."""
        layout, blocks = self._layout, range(self.blocks_per_chunk)
        for tensor, block, page in super()._pages([key], blocks, version):
            first = layout.tensor_offsets[tensor] + block * layout.page_bytes[tensor]
            yield slice(first, first + len(page)), page.numpy().tobytes()


def _swap(ref: PageRef) -> PageMapping:
    half = ref.page_bytes // 2
    return PageMapping(ref.page_bytes, (PieceRun(0, half, half), PieceRun(half, 0, half)))


@dataclass
class Cache:
    """The chunks that managers of one variant share.

    Attributes:
        weights: the number of the weights for the next manager to open. A reset gives its own manager new
            weights, and later openers of its files other ones.
        offered: the stored keys, by weights.
        probe: the weights whose probe must be in the files.
        lock: held while a manager opens or resets: one that opens meanwhile could get either weights.
    """

    weights: int = 0
    offered: defaultdict[int, set[OffloadKey]] = field(default_factory=lambda: defaultdict(set))
    probe: int | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class Life:
    """Managers on one root, side by side and one after the other.

    Args:
        seed: draws everything.
        folder: the folder of the tiers' files.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = chance = Random(seed)
        HostilePolicy.chance = Random(seed)
        self.root, self.room = folder / "root", chance.choice([2**50, 2**50, 120 * SLOT_BYTES])
        self.may_reset = chance.random() < 0.5
        self.kinds: set[str] = chance.choice([set(), {"fs"}, {"fs"}, {"dummy"}])  # tiers of all managers
        self.new_weights = itertools.count(1)
        self.caches: defaultdict[Variant, Cache] = defaultdict(Cache)
        self.variants = [*self._variants()]

    def _variants(self) -> Iterator[Variant]:
        """Yield variants that each differ from the first in one respect."""
        chance = self.chance
        pages, width = chance.choice([LAYOUTS[0], *LAYOUTS])
        yield (first := Variant(pages, width))
        for _ in range(chance.randrange(3)):
            pages, width = chance.choice(LAYOUTS)
            others: list[dict[str, Any]] = [
                {"namespace": "one"},
                {"dtype": "int4"},
                {"pages": pages, "width": width},
            ]
            yield first._replace(**chance.choice(others))

    async def run(self) -> int:
        """Run the life; return how many chunks were loaded.

        Raises:
            AssertionError: bytes are wrong, pins or transfers are left, counts do not add up, or chunks are
                lost.
        """
        loaded = 0

        async def seat() -> None:
            nonlocal loaded
            for _ in range(self.chance.randrange(1, 4)):
                loaded += await Opening(self).run()

        with anyio.fail_after(BOUND_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(self.chance.choice([1, 1, 2, 3])):
                    tasks.start_soon(seat)
        return loaded


def require_refusals() -> None:
    """Raise AssertionError unless kvtier refuses managers that cannot work or would return wrong bytes."""
    plain: dict[str, Any] = {"cpu_bytes_to_use": 2**20}
    caches = Device().caches
    turns = PageMapping(960, (PieceRun(0, 0, 960),), writers=2, writer=1)
    half = PageMapping(1920, (PieceRun(0, 960, 960),))
    of_one = [KVCaches(caches.tensors, ((PageRef(0, 960, mapping),),)) for mapping in (turns, half)]
    refused: list[tuple[dict[str, Any], dict[str, str], KVCaches]] = [
        ({"keep_host_memory_s": 1}, {}, caches),
        ({"canonical_layout": True}, {}, caches),
        ({"secondary_tiers": [{"type": "unsendable"}]}, {}, caches),
        ({"namespace": "one"}, {"namespace": "two"}, caches),
        *(({}, {}, of_another) for of_another in of_one),
    ]
    for settings, fields, tensors in refused:
        try:
            config = TieringConfig.from_mapping({**plain, **settings})
            open_manager(config, Identity.make("model", fields), tensors)
        except (ConfigError, TierError):
            continue
        raise AssertionError(f"{settings}, {fields} and {tensors.groups} are not refused")


class Opening:
    """A manager from its opening to its end, and the chunks that it must return.

    Attributes:
        weights: the number of its engine's weights.
        stored: number of chunks that its callers stored with confirmation.
        loaded: number of chunks that they loaded.
    """

    def __init__(self, life: Life) -> None:
        self.life, self.chance = life, life.chance
        variant = self.chance.choice(life.variants)
        self._variant, self.cache = variant, life.caches[variant]
        self.groups = self.chance.choice([1, 2])
        self.device = Tensors(variant, self.groups, swapped=self.chance.random() < 0.3)
        self.slots = self.chance.choice([8, 24, 24, 64])
        tiers = [*draw_tiers(self.chance)]
        while not life.kinds <= {tier["type"] for tier in tiers}:
            tiers = [*draw_tiers(self.chance)]
        self._tiers = [self._tier(dict(tier)) for tier in tiers]
        self._kinds = [tier["type"] for tier in self._tiers]
        self._closes_amid = self.chance.random() < 0.15
        self._named_by_identity = self.chance.random() < 0.5
        self.settings = self._settings()
        self.is_closing = False
        self.stored = self.loaded = 0

    def _tier(self, tier: dict[str, Any]) -> dict[str, Any]:
        chance = self.chance
        quick = {"breaker_pause_s": 0.01, "retry_share": chance.choice([0, 1])}
        if tier["type"] == "fs":
            room = self.life.room
            return {**tier, "root_dir": str(self.life.root), "min_free_bytes": 0, "max_bytes": room}
        if chance.random() < 0.3:
            return {**tier, "deadline_s": 0.3}
        faults = chance.sample(TIER_FAULTS, chance.randrange(1, 4))
        hostile = {"type": "hostile", "hang_rate": 0, "faults": faults, "rate": chance.choice([0.05, 0.3, 1])}
        return {**tier, **hostile, **quick, "deadline_s": 0.3, "breaker_failures": chance.choice([5, 10**6])}

    def _settings(self) -> dict[str, Any]:
        chance, variant = self.chance, self._variant
        return {
            "cpu_bytes_to_use": self.slots
            * SLOT_BYTES
            * -(-sum(variant.pages) * variant.width // SLOT_BYTES),
            "blocks_per_chunk": variant.width,
            "namespace": "" if self._named_by_identity else variant.namespace,
            "eviction_policy": chance.choice(["auto", "lru", "arc", "lhd", "hostile", "hostile"]),
            "promotion_budget": chance.choice([0.1, 0.5, 0.9]),
            "store_threshold": chance.choice([0, 0, 0, 2]),
            "max_tracker_size": chance.choice([1, 64_000]),
            "load_gate": chance.choice(["off", "off", "latency", "throughput"]),
            "isolation": "process" if chance.random() < 0.03 else chance.choice(["auto", "thread"]),
            "audit_rate": chance.choice([0, 1.0]),
            "request_deadline_s": chance.choice([0.05, 2.0]),
            "drain_on_shutdown_s": chance.choice([0, 3.0]),
            "secondary_tiers": self._tiers,
        }

    async def run(self) -> int:
        """Open, call, rest and close; return how many chunks were loaded."""
        fields = {"dtype": self._variant.dtype}
        if self._named_by_identity and self._variant.namespace:
            fields["namespace"] = self._variant.namespace
        self.manager = open_manager(
            TieringConfig.from_mapping(self.settings),
            Identity.make("model", fields),
            self.device.caches,
            windowed_groups=range(self.groups)[1 : self.chance.randrange(1, 3)],
        )
        callers = [Caller(self, number) for number in range(CALLERS)]
        async with self.cache.lock:
            self.weights = self.cache.weights
            await self.manager.__aenter__()
            await self._files_open()
        try:
            await self._find_probe()
            async with anyio.create_task_group() as tasks:
                for caller in callers:
                    tasks.start_soon(caller.run, self.chance.randrange(20, 60))
                if self._closes_amid:
                    tasks.start_soon(self._close_amid)
            if not self._closes_amid:
                await self._rest(callers[0])
        finally:
            await self.manager.aclose()
        self.check()
        assert self.manager.statistics().pinned_chunks == 0
        return self.loaded

    async def _files_open(self) -> None:
        """Wait until the file tier is open, so that the weights of its files are known."""
        activities = self.manager._executor.activity if "fs" in self._kinds else ()
        while activities and activities[self._kinds.index("fs")].usage is None:  # noqa: ASYNC110
            await anyio.sleep(0.001)

    async def _close_amid(self) -> None:
        await anyio.sleep(self.chance.choice([0, 0.01, 0.1]))
        async with self.cache.lock:  # if a reset is cut short, the next opener of the files gets older chunks
            self.is_closing = True
            await self.manager.aclose()

    # --- expected content ----------------------------------------------------------------------------

    @property
    def version(self) -> tuple[Variant, int]:
        """A chunk's key and this value determine its bytes."""
        return self._variant, self.weights

    def draw(self, chance: Random) -> Keys:
        """Draw the beginning of a prompt, in one group or chunk by chunk in all groups."""
        name, most = chance.randrange(6), BLOCKS // self._variant.width // self.groups
        keys = [prompt(name, chance.randrange(1, most + 1), group) for group in range(self.groups)]
        return [key for chunk in zip(*keys, strict=False) for key in chunk]

    def offer(self, keys: Keys) -> None:
        """Record that lookups may find these keys from now on."""
        self.cache.offered[self.weights].update(keys)

    def require_offered(self, keys: Keys) -> None:
        """Raise AssertionError for a key that was not stored with these weights."""
        known = self.cache.offered[self.weights]
        assert known.issuperset(keys), f"{set(keys) - known} were found, and were not stored"

    def require_content(self, keys: Keys, blocks: list[int]) -> None:
        """Raise AssertionError if a block lacks the content stored under its key with these weights."""
        self.require_offered(keys)
        for place, key in enumerate(keys):
            mine = blocks[place * self._variant.width :][: self._variant.width]
            assert self.device.holds([key], mine, self.version), f"{key!r} is wrong"

    @property
    def has_honest_tiers(self) -> bool:
        return "hostile" not in self._kinds

    def check(self) -> None:
        """Check the core, unless its policy lies about its candidates."""
        policy = self.manager._core.table.orders[1]
        if not isinstance(policy, HostilePolicy):
            invariants.check(self.manager._core)

    async def reset(self) -> None:
        """Reset; the call may be cancelled and repeated. The reset continues when its caller is cancelled."""
        try:
            if self.life.may_reset:
                await until_done(self._reset())
        except TimeoutError:
            raise AssertionError("a reset does not end") from None

    async def _reset(self) -> None:
        async with self.cache.lock, asyncio.timeout(BOUND_S / 2):
            for patience_s in self.chance.choice([(None,), (0, None)]):
                with anyio.move_on_after(patience_s):
                    self.weights = next(self.life.new_weights)
                    await self.manager.reset()
            if "fs" in self._kinds:
                self.cache.weights = next(self.life.new_weights)

    # --- at rest ---------------------------------------------------------------------------------

    async def _rest(self, caller: Caller) -> None:
        await self.manager.drain_puts()
        await self.manager.drain()
        self.check()
        seen = self.manager.statistics()
        assert seen.pinned_chunks == 0
        assert seen.free_slots + seen.ready_chunks == seen.slots == self.slots
        never = NEVER if self.settings["eviction_policy"] == "hostile" else (*NEVER, "policy_replaced")
        assert not [name for name in seen.counts if name[0] in never], "nothing injects these"
        self._require_sums(seen.counts)
        await self._store_probe(caller)

    def _require_sums(self, counts: Mapping[tuple[str, ...], float]) -> None:
        """Raise AssertionError if the tiers' counts do not add up."""

        def total(*name: str) -> float:
            return sum(count for key, count in counts.items() if key[: len(name)] == name)

        stored = total("stored")
        assert stored <= self.stored
        assert total("loaded") >= self.loaded
        for kind, tier in zip(self._kinds, self._tiers, strict=True):
            put, lost = total("put", kind), total("put_dropped", kind) + total("put_failed", kind)
            missing = put + lost - stored - total("backfilled", kind)
            # A lost chunk is put again at its next use.
            assert tier["write_policy"] != "all" or 0 <= missing <= lost, f"puts into {kind}: {counts}"
            asked, found = total("asked", kind), total("found", kind)
            missed = total("absent", kind) + total("get_failed", kind)
            assert found <= asked <= found + missed, f"lookups in {kind}: {counts}"

    async def _store_probe(self, caller: Caller) -> None:
        """Store a new prompt; this manager must find it at once, the next one if the files have it."""
        before = self._lost()
        for _ in range(max(1, self.settings["store_threshold"])):
            await caller.store(PROBE)
            await self.manager.drain()
        assert await self.manager.lookup(PROBE) == len(PROBE) or self.settings["max_tracker_size"] == 1
        is_put = all(tier["write_policy"] == "all" for tier in self._tiers) and self._lost() == before
        is_last = self.weights == self.cache.weights and self.settings["store_threshold"] == 0
        if "fs" in self._kinds and self.life.room == 2**50 and is_put and is_last:
            self.cache.probe = self.weights

    async def _find_probe(self) -> None:
        """Wait for the probe if files must have it: the tier may miss a short deadline."""
        if "fs" in self._kinds and self.cache.probe == self.weights:
            while not all(await self.manager.locate(PROBE)):  # noqa: ASYNC110
                await anyio.sleep(0.01)

    def _lost(self) -> float:
        counts = self.manager.statistics().counts
        return sum(count for name, count in counts.items() if name[0] in ("put_dropped", "put_failed"))


class Caller:
    """Calls a manager with its own blocks."""

    def __init__(self, opening: Opening, number: int) -> None:
        self._opening, self._manager, self._device = opening, opening.manager, opening.device
        self._chance = Random(opening.chance.getrandbits(60))
        self._blocks = list(range(number * BLOCKS, (number + 1) * BLOCKS))
        self._scribbled: list[memoryview] = []  # of an abandoned write

    async def run(self, calls: int) -> None:
        """Make random calls; some are cancelled."""
        kinds = [self.store, self._load, self._hold, self._look, self._write, self._forget, self._drain]
        for _ in range(calls):
            (call,) = self._chance.choices(kinds, [28, 28, 14, 14, 14, 2, 2])
            limit_s = self._chance.choice([None, None, None, 0, 0.001])
            with suppress(TimeoutError), self._may_be_closed():
                if self._chance.random() < 0.5:
                    with anyio.move_on_after(limit_s):
                        await call(self._opening.draw(self._chance))
                else:
                    async with asyncio.timeout(limit_s):
                        await call(self._opening.draw(self._chance))
            self._opening.check()
        self._scribbled.clear()

    @contextmanager
    def _may_be_closed(self) -> Iterator[None]:
        try:
            yield
        except StateError:
            assert self._opening.is_closing

    async def store(self, keys: Keys) -> None:
        blocks = self._chance.sample(self._blocks, len(self._blocks))
        self._device.fill(keys, blocks, self._opening.version)
        self._opening.offer(keys)
        self._opening.stored += len(keys)  # at most: it may be cancelled
        assert 0 <= await self._manager.store(keys, self._used(keys, blocks)) <= len(keys)

    async def _load(self, keys: Keys) -> None:
        blocks = self._clear()
        with self._voided_by_resets():
            count = await self._manager.load(keys, self._used(keys, blocks))
            self._opening.require_content(keys[:count], blocks)
            assert self._device.is_clear(blocks[count * self._device.blocks_per_chunk :])
            self._opening.loaded += count

    async def _hold(self, keys: Keys) -> None:
        """Read and load chunks inside a block that pins them, late in its time."""
        version = self._opening.version
        with self._voided_by_resets():
            async with self._manager.acquire(keys) as acquired:
                await anyio.sleep(self._chance.choice([0, 0, 0.001, 0.01]))
                if version == self._opening.version:
                    for key, view in zip(acquired.keys, acquired.views, strict=True):
                        for place, page in self._device.slot(key, version):
                            assert view[place] == page, f"{key!r} is wrong in its slot"
                await self._load_acquired(acquired)

    async def _load_acquired(self, acquired: Acquired) -> None:
        blocks, keys = self._clear(), list(acquired.keys)
        if keys:
            await acquired.load(self._used(keys, blocks))
        self._opening.require_content(keys, blocks)

    @contextmanager
    def _voided_by_resets(self) -> Iterator[None]:
        """Accept the error of a load that a reset overtook."""
        before = self._opening.weights
        try:
            yield
        except TransferError:
            assert self._opening.weights > before

    async def _look(self, keys: Keys) -> None:
        self._opening.require_offered(keys[: await self._manager.lookup(keys)])
        found = await self._manager.locate(keys)
        if self._opening.has_honest_tiers:
            there = [key for key, is_there in zip(keys, found, strict=True) if is_there]
            self._opening.require_offered(there)
        self._manager.report_computed(len(keys), self._chance.choice([0, 1e-6, 1.0]))

    async def _forget(self, keys: Keys) -> None:
        """Reset while puts into tiers are in flight, and look the chunks up."""
        await self.store(keys)
        await self._opening.reset()
        await self._load(keys)

    async def _write(self, keys: Keys) -> None:
        """Fill slots, or abandon a write but keep writing: slots stay reserved until the views are
        released."""
        version = self._opening.version
        self._opening.offer(keys)
        self._scribbled.clear()
        with suppress(InterruptedError):
            async with self._manager.write(keys) as written:
                for key, view in zip(written.keys, written.views, strict=True):
                    for place, page in self._device.slot(key, version):
                        view[place] = page
                    await anyio.lowlevel.checkpoint()
                if self._chance.random() < 0.4:
                    self._scribbled += written.views
                    raise InterruptedError
                self._opening.stored += len(written.keys)
        for view in self._scribbled:
            view[:100] = bytes(100)

    async def _drain(self, keys: Keys) -> None:
        await self._manager.drain_puts()
        await anyio.to_thread.run_sync(list, prometheus_collector(self._manager).collect())

    def _used(self, keys: Keys, blocks: list[int]) -> list[int]:
        return blocks[: len(keys) * self._device.blocks_per_chunk]

    def _clear(self) -> list[int]:
        self._device.clear(self._blocks)
        return self._chance.sample(self._blocks, len(self._blocks))


def run(seed: int) -> int:
    """Run a life; return how many chunks were loaded. Raise AssertionError if a judge objects."""
    torch.set_num_threads(1)  # with more threads, managers wait for each other on busy cores
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name, installed(Path(name)):
        require_refusals()
        return asyncio.run(Life(seed, Path(name)).run())


def main() -> None:
    """Run lives until the time is up, or until each bug is found; the exit status is 1 if a life failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="in all, or for each bug")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bugs", nargs="*", default=[])
    options = parser.parse_args()
    bugs = {bug.name: bug for bug in (*OF_MANAGERS, *MUTATIONS)}
    failed = False
    for name in options.bugs or [""]:
        with planted(bugs[name]) if name else nullcontext():
            failed |= _search(name, options.seed, time.monotonic() + options.minutes * 60)
    sys.exit(failed)


def _search(bug: str, first: int, until_s: float) -> bool:
    """Run lives from a seed on; with a bug, stop at the first failure. Return whether any life failed."""
    failed, loaded, seed = 0, 0, first
    while time.monotonic() < until_s and not (bug and failed):
        faulthandler.dump_traceback_later(4 * BOUND_S, exit=True)
        try:
            loaded += run(seed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed += 1
            print(f"{bug} seed {seed} fails", flush=True)
            print(
                "".join(traceback.format_exception(error))[-3000:] if not bug else repr(error)[:200],
                flush=True,
            )
        seed += 1
    print(f"{bug} {seed - first} lives, {failed} wrong; {loaded} chunks were loaded", flush=True)
    return failed > 0


if __name__ == "__main__":
    main()
