"""Chunks of the primary tier that a caller uses inside of an ``async with`` block."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier._manager.device_copies import DeviceCopies
from kvtier._memory.region import Region
from kvtier.errors import StateError
from kvtier.keys import OffloadKey


class Acquired:
    """Chunks that are pinned in the primary tier inside an ``acquire`` block.

    Attributes:
        keys: the leading keys that were found.
    """

    def __init__(
        self, keys: Sequence[OffloadKey], slots: list[int], region: Region, copies: DeviceCopies
    ) -> None:
        self.keys = tuple(keys)
        self._given_slots: list[int] | None = slots
        self._region = region
        self._copies = copies

    @property
    def views(self) -> tuple[memoryview, ...]:
        """The chunks' bytes, read-only. Do not use them after the ``acquire`` block.

        Raises:
            StateError: the ``acquire`` block has ended.
        """
        return tuple(self._region.view(slot).toreadonly() for slot in self._slots)

    async def load(self, blocks: Sequence[int]) -> None:
        """Copy the chunks to the device.

        Args:
            blocks: block ids, ``blocks_per_chunk`` for each of ``keys``, in their order.

        Raises:
            StateError: the ``acquire`` block has ended.
            TransferError: the device copy failed.
            ValueError: ``blocks`` does not fit ``keys``.
        """
        await self._copies.load(self.keys, self._slots, blocks)

    def _give_back(self) -> None:
        """Forget the slots, which other chunks may take from now on."""
        self._given_slots = None

    @property
    def _slots(self) -> list[int]:
        if self._given_slots is None:
            raise StateError("the chunks were given back: use them inside of the acquire block")
        return self._given_slots


class Written:
    """Slots of the primary tier, to be filled inside a ``write`` block.

    Attributes:
        keys: the keys that were given a slot: those that the primary tier lacks, as far as there is room.
    """

    def __init__(self, keys: Sequence[OffloadKey], slots: Sequence[int], region: Region) -> None:
        self.keys = tuple(keys)
        self._slots: Sequence[int] | None = slots
        self._region = region

    @property
    def views(self) -> tuple[memoryview, ...]:
        """The slots' bytes, to be written. Do not use them after the ``write`` block.

        Raises:
            StateError: the ``write`` block has ended.
        """
        if self._slots is None:
            raise StateError("the slots were given back: use them inside of the write block")
        return tuple(self._region.view(slot) for slot in self._slots)

    def _give_back(self) -> None:
        """Forget the slots: what is in them must not change any more."""
        self._slots = None
