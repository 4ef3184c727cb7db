"""Copies between the device and slots, to be awaited on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvtier._device._engine import TransferEngine
from kvtier._device.base import Blocks, Finished
from kvtier._manager.checks import CallChecks
from kvtier.errors import DeviceStuckError, TransferError
from kvtier.keys import OffloadKey, group_index
from kvtier.tiers._waiting import wait_for_end


class DeviceCopies:
    """The copies of one transfer engine, whose wake-up has to call ``collect`` on the loop."""

    def __init__(self, engine: TransferEngine, checks: CallChecks, on_end: Callable[[], object]) -> None:
        self.in_flight: dict[int, asyncio.Future[Finished]] = {}
        self.stuck_slots: set[int] = set()  # abandoned copies may still write to them
        self._engine = engine
        self._checks = checks
        self._on_end = on_end
        self._last_id = 0

    async def store(self, keys: Sequence[OffloadKey], slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks of the device to slots. Raises as ``load`` does."""
        ids, ordered = self._by_group(keys, slots, blocks)
        await self._copy(len(keys), lambda copy: self._engine.submit_store(copy, ids, ordered), written=slots)

    async def load(self, keys: Sequence[OffloadKey], slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots to blocks of the device. Raises TransferError."""
        self._checks.require_owner()
        ids, ordered = self._by_group(keys, slots, self._checks.blocks(keys, blocks))
        await self._copy(len(keys), lambda copy: self._engine.submit_load(copy, ordered, ids))

    def collect(self) -> None:
        for finished in self._engine.finished():
            self.in_flight[finished.transfer_id].set_result(finished)

    async def _copy(self, chunks: int, submit: Callable[[int], None], *, written: Sequence[int] = ()) -> None:
        """Submit a copy, and wait until it has ended or was given up, cancelled or not."""
        self._last_id = copy = self._last_id + 1
        submit(copy)
        self.in_flight[copy] = asyncio.get_running_loop().create_future()
        cancelled = await wait_for_end(self.in_flight[copy])
        finished = self.in_flight.pop(copy).result()  # only now: drain() may return as soon as it is gone
        is_stuck = isinstance(finished.error, DeviceStuckError)
        if is_stuck:
            self.stuck_slots.update(written)
        self._on_end()
        if cancelled is not None:
            raise cancelled
        if finished.error is not None:
            kind = DeviceStuckError if is_stuck else TransferError
            raise kind(f"a copy of {chunks} chunks failed: {finished.error}") from finished.error

    def _by_group(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], blocks: Sequence[int]
    ) -> tuple[Blocks, list[int]]:
        """Order blocks and slots for the device layer: group after group."""
        width = self._checks.blocks_per_chunk
        order = sorted(range(len(keys)), key=lambda index: group_index(keys[index]))
        sizes = [0] * self._checks.groups
        for key in keys:
            sizes[group_index(key)] += width
        ids = [block for index in order for block in blocks[index * width : (index + 1) * width]]
        return Blocks.make(ids, sizes, [0] * self._checks.groups), [slots[index] for index in order]
