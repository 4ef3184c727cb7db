"""The pages of one host pool in kvtier's tiers, for calls from SGLang's threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

import torch

from kvtier import (
    Identity,
    IsolationError,
    KVCaches,
    OffloadKey,
    PageRef,
    RegionError,
    StateError,
    Statistics,
    TierError,
    TieringConfig,
    TieringManager,
    open_manager,
)
from kvtier.tiers import GuardedLogger
from kvtier_sglang._loop import LoopThread
from kvtier_sglang._pages import HostPages
from kvtier_sglang._updates import updates

logger = GuardedLogger("kvtier.sglang")

_OPEN_S = 60.0
_GRACE_S = 0.5  # Added once to the end of a call, because the manager acts only at its own deadline.
_CLOSE_S = 5.0


class PageStore:
    """The primary tier for the pages of one host pool, and the secondary tiers behind it.

    The calling thread copies a page between the pool and a slot. So a hanging tier can hold slots, which stay
    reserved, but never a page that SGLang has reused for other tokens.

    Args:
        config: kvtier's settings; only this pool uses the primary tier.
        identity: the identity of the pages' bytes.
        pages: the pool's pages.
        loop: the event loop of the tiers.

    Attributes:
        close_s: maximum duration of a close, or of the wait for a reset, in seconds.

    Raises:
        KVTierError: the primary tier cannot be created, or ``isolation`` is ``process`` and the process
            cannot start.
    """

    def __init__(self, config: TieringConfig, identity: Identity, pages: HostPages, loop: LoopThread) -> None:
        self._pages = pages
        self._loop = loop
        self.close_s = config.drain_on_shutdown_s + _CLOSE_S
        self._resets = 0
        # Number of weight updates at the last reset. The identity names the initial weights.
        self._updates = 0
        self._reset: Future[list[str]] | None = None
        self._close: Future[None] | None = None
        self._manager = self._open(config, identity)
        slots = max(1, int(config.cpu_bytes_to_use) // pages.page_bytes)
        self._part = max(1, int(slots * config.promotion_budget))

    def locate(self, keys: Sequence[OffloadKey], end_s: float) -> list[bool]:
        """Return for each page whether a read would probably find it.

        Args:
            keys: keys of the pages.
            end_s: end of the call, on the monotonic clock.

        Raises:
            TimeoutError: the answer is not known by then.
        """
        if not self._is_current:
            return [False] * len(keys)
        return self._loop.call(self._manager.locate(keys), _left_s(end_s + _GRACE_S))

    def read(self, keys: Sequence[OffloadKey], host_indices: torch.Tensor, end_s: float) -> list[bool]:
        """Copy the leading pages found by ``end_s`` into the pool; return which pages were copied."""
        pages = self._pages.pages(host_indices, len(keys))
        done, resets = 0, self._resets
        with suppress(TimeoutError):  # Pages copied earlier are valid.
            while self._is_current and done < len(keys) and (left_s := end_s - time.monotonic()) > 0:
                part = keys[done : done + self._part]
                with self._loop.lend(self._manager.acquire(part), left_s + _GRACE_S) as acquired:
                    for slot, page in zip(acquired.views, pages[done:], strict=False):
                        self._pages.copy_out(slot, page)
                    done += len(acquired.keys)
                if not acquired.keys:
                    # If there are fewer than requested, the promotion budget may have had no room for more.
                    break
        if resets != self._resets or not self._is_current:
            done = 0  # a reset has hidden the pages meanwhile
        return [index < done for index in range(len(keys))]

    def write(self, keys: Sequence[OffloadKey], host_indices: torch.Tensor, end_s: float) -> list[bool]:
        """Copy pages into the primary tier, from which they cascade; return which are stored.

        Waits for earlier puts until ``end_s``, because kvtier drops puts that a tier cannot keep up with. An
        engine must not wait for them, but SGLang's calling thread may. Does not wait for overdue puts or for
        reads.
        """
        pages = dict(zip(keys, self._pages.pages(host_indices, len(keys)), strict=True))
        stored: dict[OffloadKey, bool] = {}
        resets = self._resets
        for start in range(0, len(keys), self._part):
            part = keys[start : start + self._part]
            with suppress(TimeoutError):  # On a timeout only the primary tier gets the pages, if it has room.
                self._loop.call(self._manager.drain_puts(), _left_s(end_s))
            try:
                there = self._write_part(part, pages, end_s + _GRACE_S, resets)
            except TimeoutError:
                break  # Pages written earlier are stored.
            stored.update(zip(part, there, strict=True))
            if not all(there):
                break
        return [stored.get(key, False) for key in keys]

    def _write_part(
        self, keys: Sequence[OffloadKey], pages: Mapping[OffloadKey, list[int]], end_s: float, resets: int
    ) -> list[bool]:
        with self._loop.lend(self._manager.write(keys), _left_s(end_s)) as written:
            if resets != self._resets or not self._is_current:  # a later reset hides the pages
                raise StateError("the cache was cleared, or has to be: these pages are not stored")
            for key, slot in zip(written.keys, written.views, strict=True):
                self._pages.copy_in(pages[key], slot)
        if len(written.keys) == len(keys):
            return [True] * len(keys)
        return self._loop.call(
            self._manager.locate(keys), _left_s(end_s)
        )  # The remaining pages were stored before, or no slot was free.

    def begin_reset(self) -> None:
        """Hide all pages stored so far, in every tier and permanently. Does not wait.

        No page is read or written until every tier has answered, however long that takes.
        """
        self._reset = Future()  # First: calls that start from now on read and write nothing.
        self._resets += 1  # Before the end of the reset, so that calls that started earlier see the change.
        seen = updates()
        self._reset = self._loop.start(self._reset_tiers())
        self._updates = seen

    def end_reset(self, end_s: float) -> None:
        """Wait, until ``end_s``, for the end of the reset that ``begin_reset`` started.

        Raises:
            KVTierError: a tier was not reached. This engine does not use that tier until its reset succeeds.
                Other engines, and this engine after a restart, may still find the hidden pages in it.
            TimeoutError: the tiers did not answer. No page is served until they do.
        """
        if self._reset is not None and (down := self._reset.result(_left_s(end_s))):
            raise TierError(
                f"tier {', '.join(down)} is down and has not been reset; clear again when it is up"
            )

    @property
    def _is_current(self) -> bool:
        """Whether the last reset, if any, has succeeded, and no weights were replaced after it."""
        reset = self._reset
        is_reset = reset is None or (reset.done() and not reset.cancelled() and reset.exception() is None)
        return is_reset and self._updates == updates()

    async def _reset_tiers(self) -> list[str]:
        await self._manager.reset()
        return [f"{tier.name} ({tier.down})" for tier in self._manager.statistics().tiers if tier.down]

    def report(self, publish: Callable[[Statistics], None]) -> None:
        """Schedule ``publish`` on the loop with the current statistics. Does not wait."""
        self._loop.post(lambda: publish(self._manager.statistics()))

    def begin_close(self) -> None:
        """Drain, within bounds, and close the tiers. Does not wait."""
        self._close = self._loop.start(self._manager.aclose())

    def end_close(self, end_s: float) -> None:
        """Wait, until ``end_s``, for the end of the close that ``begin_close`` started.

        Raises:
            TimeoutError: the tiers are not closed. The rest of the close was cancelled.
        """
        if self._close is None:
            return
        try:
            self._close.result(_left_s(end_s))
        except TimeoutError:
            self._close.cancel()
            raise

    def _open(self, config: TieringConfig, identity: Identity) -> TieringManager:
        if config.isolation == "auto":
            try:
                chosen = config.model_copy(update={"isolation": "process"})
                return self._loop.call(self._enter(chosen, identity), _OPEN_S)
            except (IsolationError, RegionError) as error:
                logger.warning("%s. The tiers run in a thread of the engine", error)
        return self._loop.call(self._enter(config, identity), _OPEN_S)

    async def _enter(self, config: TieringConfig, identity: Identity) -> TieringManager:
        size = self._pages.page_bytes
        # The manager's device has no blocks in use, because the calling threads copy the pages.
        caches = KVCaches((torch.empty((1, size), dtype=torch.int8, device="cpu"),), ((PageRef(0, size),),))
        return await open_manager(config, identity, caches).__aenter__()


def _left_s(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())
