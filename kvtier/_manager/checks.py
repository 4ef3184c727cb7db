"""Checks of a manager's calls before anything starts: the event loop, the state, the arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from kvtier.errors import StateError
from kvtier.keys import GROUP_BYTES, MAX_KEY_BYTES, OffloadKey, group_index


class CallChecks:
    """Checks the calls of one manager. ``num_blocks`` has the device's blocks for each KV cache group.

    StateError: the call is not allowed now or here. TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, blocks_per_chunk: int, num_blocks: Sequence[int]) -> None:
        self.is_open = False
        self.blocks_per_chunk = blocks_per_chunk
        self.groups = len(num_blocks)
        self._num_blocks = num_blocks
        self._tails = {group.to_bytes(GROUP_BYTES, "big") for group in range(self.groups)}
        self.loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> asyncio.AbstractEventLoop:
        """Allow later calls on the running event loop alone, and return it."""
        if self.loop is not None:
            raise StateError("the manager was entered already: make one with open_manager for each use")
        self.loop = asyncio._get_running_loop()
        if self.loop is None:
            raise StateError("TieringManager needs a running asyncio event loop; trio is not supported")
        return self.loop

    def require_owner(self) -> None:
        """Refuse calls from other event loops and threads while the manager is open."""
        if self.is_open and asyncio._get_running_loop() is not self.loop:
            raise StateError(
                "the manager belongs to another event loop or thread: call it from tasks of the loop that "
                "entered it, or use asyncio.run_coroutine_threadsafe"
            )

    def require_open(self) -> None:
        """Refuse calls from other event loops and threads, and all calls while the manager is not open."""
        if not self.is_open:
            raise StateError("the manager is not open: use it inside of its async with block")
        self.require_owner()

    def keys(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the offload keys of a call as a list."""
        self.require_open()
        checked: list[OffloadKey] = _listed("keys", keys)
        if all(map(self._is_known, checked)):
            return checked
        place, key = next((place, key) for place, key in enumerate(checked) if not self._is_known(key))
        if type(key) is not bytes:
            raise TypeError(f"keys[{place}] is of type {type(key).__name__}, but keys are bytes")
        problem = f"names KV cache group {group_index(key)}; the number of groups is {self.groups}"
        if not GROUP_BYTES < len(key) <= MAX_KEY_BYTES:
            problem = f"has {len(key)} bytes, but keys have {GROUP_BYTES + 1} to {MAX_KEY_BYTES}"
        raise ValueError(f"keys[{place}] {problem}: make keys with kvtier.pack_key")

    def blocks(self, keys: Sequence[OffloadKey], blocks: Iterable[int]) -> list[int]:
        """Return the block ids of a call as a list."""
        width, checked = self.blocks_per_chunk, list(map(index, _listed("blocks", blocks)))
        if len(checked) != len(keys) * width:
            raise ValueError(f"{len(keys)} keys need {len(keys) * width} blocks, not {len(checked)}")
        for place, block in enumerate(checked):
            count = self._num_blocks[group_index(keys[place // width])]
            if not 0 <= block < count:
                raise ValueError(f"blocks[{place}] is {block}, but the device has blocks 0 to {count - 1}")
        return checked

    def _is_known(self, key: object) -> bool:
        return (
            type(key) is bytes
            and GROUP_BYTES < len(key) <= MAX_KEY_BYTES
            and key[-GROUP_BYTES:] in self._tails
        )


def _listed(name: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} is {type(values).__name__}, but a sequence of {name} is needed")
    return list(values)
