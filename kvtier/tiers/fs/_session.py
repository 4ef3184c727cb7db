"""What an open file tier holds, from its opening to its closing."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Final

import anyio

from kvtier.errors import TierError
from kvtier.tiers._base import TierContext
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._files.call import CORRUPT, FileCall, StopFlag
from kvtier.tiers.fs._files.pool import NativePool
from kvtier.tiers.fs._files.workers import Workers, run
from kvtier.tiers.fs._layout import max_disk_bytes
from kvtier.tiers.fs._maintenance.maintenance import Maintenance
from kvtier.tiers.fs._maintenance.quarantine import Quarantine
from kvtier.tiers.fs._namespace import Epoch, Namespace, errno_name
from kvtier.tiers.fs._outcomes import chunks_with
from kvtier.tiers.fs._puts import Puts
from kvtier.tiers.fs._quota.accounts import FileSystem
from kvtier.tiers.fs._quota.ledger import FOLDER, Ledger, SharedLedger
from kvtier.tiers.fs._quota.quota import Quota, stat_file_system

_NOT_A_FILE: Final = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ESPIPE})
_NO_LEDGER: Final = f": remove what is at {FOLDER}/ledger, which is no ledger; it is made anew"
_FIRST_COUNT_PATIENCE_S: Final = 1.0
_THREADS: Final = 4


class Session:
    """An open file tier. In the event loop.

    Attributes:
        closing: set when the tier closes.
        workers: threads that may block on the quarantine and on discards.
        epoch: the epoch that is read and written; None after a reset that failed, and after closing.
        namespace: the identity's place below the root. It and the other annotated ones are set by ``open``.
    """

    namespace: Namespace
    quota: Quota
    quarantine: Quarantine
    pool: NativePool
    maintenance: Maintenance
    puts: Puts

    def __init__(self, config: FsConfig, context: TierContext) -> None:
        self._config = config
        self._context = context
        self.closing = StopFlag()
        self.workers = Workers(f"{context.name}-io", _THREADS)
        self.epoch: Epoch | None = None
        self._all_workers = [self.workers]
        self._work = AsyncExitStack()  # stops what is under way
        self._resources = ExitStack()  # closed in a thread: that blocks
        self._closed: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Open the root, and wait a moment for its count: what a small one holds is known at once.

        Raises:
            TierError: it cannot be opened; the message names the tier, the path and the errno.
        """
        await run(self.workers, self._open_root)
        self._start_work()
        self.maintenance.begin()
        if self.quota.used_bytes is None:
            with anyio.move_on_after(_FIRST_COUNT_PATIENCE_S):
                await self.maintenance.counted.wait()

    async def close(self) -> None:
        """Wait until all threads have ended, and close what is open. See ``FsTier.aclose``."""
        if self.closing:
            if self._closed is not None:
                await asyncio.wait((self._closed,))
            return
        self.closing.set()
        if self.epoch is not None:
            self.epoch.retire()
            self.epoch = None
        try:
            await self._work.aclose()
        finally:
            for workers in self._all_workers:
                workers.close()
            closer = Workers(f"{self._context.name}-close", 1)  # the waiting blocks: a thread of its own
            self._closed = closer.call(self._close)
            closer.close()
            await asyncio.wait((self._closed,))
            self._closed.result()

    async def set_aside(self, call: FileCall) -> list[int]:
        """Move the files that have failed their checks to the quarantine. Returns whose they are."""
        corrupt = chunks_with(call.results, CORRUPT)
        if corrupt:
            await run(self.workers, partial(self.quarantine.add_all, call, corrupt))
        return corrupt

    def _open_root(self) -> None:
        namespace, self.epoch = Namespace.open(self._config, self._context)
        self._resources.callback(namespace.close)
        stat = partial(stat_file_system, namespace.root_fd)
        try:
            ledger = _open_ledger(namespace, stat)
            self._resources.callback(ledger.close)
            self.quota = Quota(self._config, max_disk_bytes(self._context.chunk_bytes), ledger, stat)
        except OSError as error:
            name, hint = errno_name(error.errno or 0), _NO_LEDGER if error.errno in _NOT_A_FILE else ""
            root = self._config.root_dir
            raise TierError(f"tier {self._context.name}: {root} cannot be measured ({name}){hint}") from error
        self._resources.callback(self.quota.flush)
        self.namespace = namespace
        self.quarantine = Quarantine(namespace.root_fd, namespace.name)

    def _start_work(self) -> None:
        """Start the pool and the background work."""
        config, context = self._config, self._context
        try:
            self.pool = NativePool(config.n_threads, config.n_threads)
        except OSError as error:
            raise TierError(
                f"tier {context.name}: {error.strerror} (n_threads={config.n_threads})"
            ) from error
        self._work.push_async_callback(self.pool.drain)
        self._resources.callback(self.pool.close)
        assert self.epoch is not None
        self.maintenance = Maintenance(
            config,
            self.namespace,
            self.quota,
            self.closing,
            context.removed,
            context.lost,
            self.epoch,
            context.name,
        )
        self._work.callback(self.maintenance.stop)
        self._all_workers += self.maintenance.workers
        self.puts = Puts(config, self.quota, self.pool, self.maintenance, self.set_aside, context.name)
        self._all_workers.append(self.puts.worker)

    def _close(self) -> None:
        for workers in self._all_workers:
            workers.join()
        self._resources.close()


def _open_ledger(namespace: Namespace, stat: Callable[[], FileSystem]) -> Ledger:
    """Open the root's ledger. Where it cannot be written the root is only read. Blocks."""
    if namespace.read_only is None:
        try:
            return SharedLedger(namespace.root_fd, stat)
        except OSError as error:
            namespace.accept_read_only(error)
    return Ledger(stat())
