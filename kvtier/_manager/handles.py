"""Chunks of the primary tier that a caller uses inside of an ``async with`` block."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

from kvtier._core.states import ChunkState
from kvtier._core.transfers import Pinned
from kvtier._manager.device_copies import DeviceCopies
from kvtier._memory.region import Region
from kvtier.errors import StateError, TransferError
from kvtier.keys import OffloadKey


class _Lent:
    """Slots of the primary tier that a caller has until a block ends."""

    _ENDED = ""

    def __init__(self, keys: Sequence[OffloadKey], slots: Sequence[int], region: Region) -> None:
        self.keys = tuple(keys)
        self._lent: Sequence[int] | None = slots
        self._region = region

    @property
    def _slots(self) -> Sequence[int]:
        if self._lent is None:
            raise StateError(self._ENDED)
        return self._lent

    def _give_back(self) -> None:
        """Forget the slots, which other chunks may take from now on."""
        self._lent = None


class Acquired(_Lent):
    """Chunks that are pinned in the primary tier inside an ``acquire`` block.

    Attributes:
        keys: the leading keys that were found.
    """

    _ENDED = "the chunks were given back: use them inside of the acquire block"

    def __init__(
        self,
        keys: Sequence[OffloadKey],
        pinned: Pinned,
        region: Region,
        copies: DeviceCopies,
        unpin: Callable[[Pinned], object],
    ) -> None:
        super().__init__(keys, pinned.slots, region)
        self._copies = copies
        self._pinned = pinned
        self._unpin = unpin
        self._users = 1  # the block, and loads in flight: a load may outlast the block

    @property
    def views(self) -> tuple[memoryview, ...]:
        """The chunks' bytes, read-only. Valid inside the ``acquire`` block; StateError after it.

        They stay the same across a reset: the caller must not use them then.
        """
        return tuple(self._region.view(slot).toreadonly() for slot in self._slots)

    async def load(self, blocks: Sequence[int]) -> None:
        """Copy the chunks to the device.

        Args:
            blocks: block ids, ``blocks_per_chunk`` for each of ``keys``, in their order.

        Raises:
            StateError: the ``acquire`` block has ended, or belongs to another event loop.
            TransferError: the device copy failed, or a reset came before its end.
            TypeError, ValueError: ``blocks`` is wrong, or does not fit ``keys``.
        """
        slots = self._slots
        self._require_visible()
        self._users += 1
        try:
            await self._copies.load(self.keys, slots, blocks)
            self._require_visible()
        finally:
            self._end_use()

    def _require_visible(self) -> None:
        """Raise TransferError if a chunk was dropped since it was found: its bytes may be of old weights."""
        if any(chunk.state is not ChunkState.READY for chunk in self._pinned.chunks):
            raise TransferError(
                f"a load of {len(self.keys)} chunks is void: a reset or an audit has dropped them meanwhile; "
                "compute their blocks"
            )

    def _give_back(self) -> None:
        super()._give_back()
        self._end_use()

    def _end_use(self) -> None:
        self._users -= 1
        if not self._users:
            self._unpin(self._pinned)


class Written(_Lent):
    """Slots of the primary tier, to be filled inside a ``write`` block.

    Attributes:
        keys: the keys that have a slot: those that the primary tier lacks, as far as there is space.
    """

    _ENDED = "the slots were given back: use them inside of the write block"

    def __init__(self, keys: Sequence[OffloadKey], slots: Sequence[int], region: Region) -> None:
        super().__init__(keys, slots, region)
        self._used_views: set[object] = set()  # the caller's threads may still write to these
        self._on_unused: Callable[[], object] = lambda: None

    @property
    def views(self) -> tuple[memoryview, ...]:
        """The slots' bytes, to be written. Valid inside the ``write`` block; StateError after it."""
        return tuple(map(self._lend, self._slots))

    def _lend(self, slot: int) -> memoryview:
        """Return a view that is known to be used until it, and all that was made of it, is gone."""
        whole = self._region.view(slot)
        array = (ctypes.c_char * len(whole)).from_buffer(whole)
        self._used_views.add(view := object())
        weakref.finalize(array, self._take_back, view).atexit = False
        return memoryview(array).cast("B")

    def _take_back(self, view: object) -> None:
        self._used_views.discard(view)
        if not self._used_views:
            self._on_unused()

    def _when_unused(self, act: Callable[[], object]) -> None:
        """Call ``act``, in any thread and perhaps twice, when no view is left."""
        self._on_unused = act
        if not self._used_views:
            act()
