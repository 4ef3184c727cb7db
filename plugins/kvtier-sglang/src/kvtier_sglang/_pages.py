"""The pages of one of SGLang's host pools: their addresses, and copies between them and slots."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from kvtier import ConfigError


class HostPages:
    """The pages of a host pool. The pool's layout divides each page into one or more pieces of memory.

    The calling thread copies pages, and only during the call: SGLang reuses them for other tokens as soon as
    its call has returned.

    Args:
        name: the pool's name.
        pool: one of SGLang's host pools.

    Attributes:
        piece_bytes: length of each piece of a page, in the order of a slot.
        page_bytes: length of a page.

    Raises:
        ConfigError: storage cannot read and write the pool's pages.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self._pool = pool
        self._page_size = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        if getattr(pool, "shard_size", 1) > 1:
            raise ConfigError(
                f"host pool {name}: its pages are spread over the ranks, and none can address all of them; "
                "remove --enable-kv-cache-sharding"
            )
        try:
            meta = pool.get_page_buffer_meta(torch.arange(self._page_size))
        except Exception as error:
            raise ConfigError(
                f"host pool {name}: {type(pool).__name__} with layout {pool.layout!r} has no pages that can "
                f"be stored ({type(error).__name__}: {error}); use --hicache-mem-layout page_first"
            ) from error
        self.piece_bytes = tuple(int(size) for size in meta[1]) if meta else ()
        self.page_bytes = sum(self.piece_bytes)
        if not self.page_bytes:
            raise ConfigError(f"host pool {name}: {type(pool).__name__} holds no bytes that could be stored")

    def pages(self, host_indices: torch.Tensor, count: int) -> list[list[int]]:
        """Return the addresses of the pieces of ``count`` pages.

        Raises:
            ValueError: ``host_indices`` do not name ``count`` pages of this pool.
        """
        if host_indices.numel() != count * self._page_size:
            raise ValueError(
                f"{host_indices.numel()} host indices for {count} pages of {self._page_size} tokens"
            )
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        width = len(self.piece_bytes)
        if tuple(sizes) != self.piece_bytes * count or len(addresses) != count * width:
            raise ValueError("the pool's pages have changed their shape")
        return [[int(it) for it in addresses[start * width :][:width]] for start in range(count)]

    def copy_in(self, page: list[int], slot: memoryview) -> None:
        """Copy a page of the pool into a slot."""
        at = _address(slot)
        for address, size in zip(page, self.piece_bytes, strict=True):
            ctypes.memmove(at, address, size)  # releases the interpreter lock
            at += size

    def copy_out(self, slot: memoryview, page: list[int]) -> None:
        """Copy a slot into a page of the pool."""
        at = _address(slot)
        for address, size in zip(page, self.piece_bytes, strict=True):
            ctypes.memmove(address, at, size)
            at += size


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
