"""The directories of one identity below a root, opened by one tier: its epoch, manifest and writer lock.

Everything here blocks and runs in the tier's own threads.

**Epochs.** Chunks are in a directory of their epoch. A reset starts an epoch for its opener alone, and raises
the number in the file ``epoch`` beyond it, so that later openers start another: only this process may have
the new weights. Other openers keep their epoch until they reset or reopen. Sweeps remove unlocked old
epochs.

The number never decreases. If the file is missing, unreadable or behind a trace of a higher epoch, the next
epoch is above all traces: old chunks are then lost, but never mixed up.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Final

from kvtier._core.tiers.backoff import Backoff
from kvtier._log import GuardedLogger, LogLimit
from kvtier.errors import IdentityError, TierError
from kvtier.tiers._base import TierContext
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._epoch import OpenEpoch
from kvtier.tiers.fs._files.native_call import Flag, Place, errno_name
from kvtier.tiers.fs._locks import close_lock, make_writer_lock, open_lock, try_lock, wait_for_lock
from kvtier.tiers.fs._quota import ledger

_READ_ONLY: Final = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOLCK}
)
_DURABILITY: Final = {"none": Flag.NONE, "data": Flag.SYNC_DATA, "full": Flag.SYNC_DATA | Flag.SYNC_DIRECTORY}
_AWAITED_READS: Final = re.compile(
    "ext[234]|xfs|btrfs|f2fs|bcachefs|zfs|tmpfs|overlay|virtiofs|fuse(blk|[.].+)?"
)
"""File systems whose direct reads hold up the end of a killed process. With others, such as NFS, a late
answer of the server would overwrite the chunk that has the slot by then."""

_EPOCHS_APART: Final = 2**24
_FIRST_TRY_PAUSE_S: Final = 2.0
_LONGEST_TRY_PAUSE_S: Final = 60.0
_LINES_EVERY_S: Final = 30.0
_log = GuardedLogger("kvtier.tiers.fs")
# For the whole process, because each attempt to open creates another tier.
_log_limit = LogLimit(_LINES_EVERY_S)


class OpenNamespace:
    """The directories of one identity below a root, opened by one tier."""

    def __init__(self, config: FsConfig, context: TierContext, root_fd: int) -> None:
        self.name = context.identity.namespace
        self.root_fd = root_fd
        self._refusal = 0  # errno of the first write, if it failed
        self._next_try_s, self._try_pause = 0.0, Backoff(_FIRST_TRY_PAUSE_S, _LONGEST_TRY_PAUSE_S)
        self.is_new = False  # whether this opener wrote the manifest
        self.direct = False  # whether files bypass the page cache
        self._mount = _mount_above(config.root_dir)
        self._config = config
        self._context = context
        self.writer = ""  # name of this opener's lock and temporary directory
        self._writer_fd: int | None = None

    @staticmethod
    def open(config: FsConfig, context: TierContext) -> tuple[OpenNamespace, OpenEpoch]:
        """Make or open the directories, join the epoch, and compare or write the manifest.

        TierError if the root can be neither written nor read, ``direct_io`` is ``always`` and impossible, or
        the directory belongs to another cache: the message lists the differences.
        """
        root = config.root_dir
        try:
            _make_folder(root)
            root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with ExitStack() as undo:
                namespace = OpenNamespace(config, context, root_fd)
                undo.callback(namespace.close)
                epoch = namespace._join()
                undo.callback(epoch.retire)
                namespace._agree_on_identity()
                undo.pop_all()
        except OSError as error:
            name = errno_name(error.errno)
            whose = layout.owner_of(error, root)
            why = f"{root} cannot be used: {error.strerror or error} ({name}){whose}"
            raise TierError(f"tier {context.name}: {why}") from error
        return namespace, epoch

    @property
    def read_only(self) -> str | None:
        """Name of the errno that prevents writes; None if the root can be written."""
        return errno_name(self._refusal) if self._refusal else None

    @property
    def can_evict(self) -> bool:
        """Whether files may be removed, which a full disk or quota does not prevent."""
        return not self._refusal or self._refusal in ledger.NO_ROOM

    @property
    def tmp_dir(self) -> str:
        return f"{self.name}/.tmp/{self.writer}"

    def is_replaced(self) -> bool:
        """Return whether the tier must reopen: another directory is at the root's path, or it was removed.

        A root that was moved away stays in use. After an unmount it stays too: the directory under the mount
        point is on another disk, which must not be filled.
        """
        try:
            there = os.stat(self._config.root_dir)
            if not os.path.ismount(self._mount) and there.st_dev == os.stat(self._mount).st_dev:
                return False
        except FileNotFoundError:
            return self._is_removed()
        except OSError:
            return False
        try:
            is_same = os.path.samestat(there, os.fstat(self.root_fd))
        except OSError:  # the root's file system is gone
            return True
        return not is_same or not self._exists(layout.MANIFEST)

    def _is_removed(self) -> bool:
        try:
            return not os.fstat(self.root_fd).st_nlink and os.path.ismount(self._mount)
        except OSError as error:  # A share hangs or is gone, or its server removed the directory.
            return error.errno == errno.ESTALE and os.path.ismount(self._mount)

    def try_to_write(self) -> int | None:
        """Try whether a read-only root and its ledger can be written now. Return 0 or the errno.

        Return None if no attempt is due: each may make a file, so they have growing intervals.
        """
        if not self._refusal or time.monotonic() < self._next_try_s:
            return None
        self._next_try_s = time.monotonic() + self._try_pause.next_s()
        try:
            self._make_writer()
            ledger.SharedLedger(self.root_fd).close()
        except OSError as error:
            return error.errno or errno.EIO
        else:
            return 0
        finally:
            self._remove_writer()

    def close(self) -> None:
        """Remove this writer's directory and close the root. Retire the epoch first."""
        self._remove_writer()
        os.close(self.root_fd)

    def _remove_writer(self) -> None:
        """Remove this writer's directory and lock. If the disk fails, sweeps remove them later."""
        if self._writer_fd is not None:
            with suppress(OSError), layout.open_folder(self.root_fd, self.tmp_dir) as folder:
                for name in os.listdir(folder):
                    os.unlink(name, dir_fd=folder)
            with suppress(OSError):
                os.rmdir(self.tmp_dir, dir_fd=self.root_fd)
            with suppress(OSError):
                os.unlink(f"{self.tmp_dir}.lock", dir_fd=self.root_fd)
            close_lock(self._writer_fd)
            self._writer_fd = None

    def advance(self, beyond: int) -> OpenEpoch:
        """Start a new epoch for this opener alone, above ``beyond`` and every trace of an epoch.

        Its number is random: after files were removed by hand, another opener may be in one without a trace.
        Make the new epoch's lock file first: it needs no room for bytes. If writing the number then raises
        OSError, later openers start above this trace.
        """
        if self._refusal:
            raise OSError(self._refusal, os.strerror(self._refusal), self.name)
        with self._epoch_lock():
            highest = max(beyond, self._highest_trace(), layout.stored_epoch(self.root_fd, self.name) or 0)
            number = highest + 1 + secrets.randbelow(_EPOCHS_APART)
            self._require_number(number + 1)
            epoch = self._enter(number)
            try:
                self._write_small("epoch", layout.epoch_file(number + 1))
            except OSError:
                epoch.retire()
                raise
            return epoch

    def _join(self) -> OpenEpoch:
        try:
            self._make_writer()
        except OSError as error:
            self.accept_read_only(error)
        self.direct = self._probe_direct()
        with self._epoch_lock():
            return self._enter(self._current_epoch())

    def _agree_on_identity(self) -> None:
        """Compare the manifest with the identity; write it if there is none."""
        where, identity = f"{self.name}/{layout.MANIFEST}", self._context.identity
        try:
            try:
                found = layout.read_small(self.root_fd, where).decode(errors="replace")
            except FileNotFoundError:
                if self.read_only is not None:
                    raise
                self._write_small(layout.MANIFEST, identity.manifest)
                self.is_new = True
                return
            identity.require(found, str(self._config.root_dir / where))
        except IdentityError as error:
            raise TierError(f"tier {self._context.name}: {error}") from error
        except OSError as error:
            raise TierError(f"tier {self._context.name}: {where} ({errno_name(error.errno)})") from error

    def accept_read_only(self, refusal: OSError) -> None:
        """Only read the root from now on, because a part of it cannot be written.

        Raises ``refusal`` if nothing can be read either, or if it has another cause.
        """
        if refusal.errno not in _READ_ONLY or not self._exists(layout.MANIFEST):
            raise refusal
        self._refusal = refusal.errno
        self._remove_writer()
        where = self._config.root_dir / self.name
        added = _log_limit.allow(f"{where}: {self.read_only}", time.monotonic())
        if added is not None:
            what = "%s: %s cannot be written (%s)%s: it is only read until it can be written%s"
            whose = layout.owner_of(refusal, self._config.root_dir)
            _log.warning(what, self._context.name, where, self.read_only, whose, added)

    def _make_writer(self) -> None:
        """Make a directory for unfinished files, and a lock that shows that its owner is alive.

        The lock is made before the directory and removed after it, so a directory without a lock is a
        leftover. A file system without locks fails: several writers could not keep a common bound.
        """
        for name in (self.name, f"{self.name}/.tmp"):
            layout.make_folder(self.root_fd, name)
        self.writer, self._writer_fd = make_writer_lock(self.root_fd, f"{self.name}/.tmp")
        layout.make_folder(self.root_fd, self.tmp_dir)

    def _current_epoch(self) -> int:
        stored, highest = layout.stored_epoch(self.root_fd, self.name), self._highest_trace()
        if stored is not None and stored >= highest:
            return stored
        if self.read_only is not None:
            raise OSError(errno.EINVAL, "the epoch is not readable, and no new one can be written")
        if stored is not None or highest >= 0:
            what = "%s: the epoch of %s is missing, damaged or out of bounds; epoch %d starts"
            _log.warning(what, self._context.name, self.name, highest + 1)
        self._require_number(highest + 1)
        self._write_small("epoch", layout.epoch_file(highest + 1))
        return highest + 1

    def _highest_trace(self) -> int:
        """Return the highest epoch that left a trace; -1 if none did."""
        found = [
            trace[1]
            for name in layout.names_in(self.root_fd, ".", follow=True)
            if (trace := layout.parse_data_dir(name)) and trace[0] == self.name
        ]
        users = layout.epochs_of_users(layout.names_in(self.root_fd, self.name, follow=True))
        return max((*found, *users), default=-1)

    def _require_number(self, number: int) -> None:
        """Raise OSError if an epoch is above the maximum; only forged traces are that high."""
        if number > layout.MAX_EPOCH:
            what = f"no epoch can follow {number - 1}: remove its data directory, users lock and epoch file"
            raise OSError(errno.EOVERFLOW, what, self.name)

    def _enter(self, number: int) -> OpenEpoch:
        """Join an epoch. The caller holds the epoch's lock, which sweeps take too."""
        lock_fd: int | None = None
        # A root that cannot be written may lack the file, and is not swept.
        writable = self.read_only is None
        with nullcontext() if writable else suppress(FileNotFoundError):
            lock_fd = open_lock(self.root_fd, layout.users_lock(self.name, number), create=writable)
            try:
                if try_lock(lock_fd, shared=True) is False:
                    raise OSError(errno.EAGAIN, "the current epoch is locked by a sweep", self.name)
            except OSError:
                os.close(lock_fd)
                raise
        return OpenEpoch(number, self._place(number), lock_fd)

    def _place(self, epoch: int) -> Place:
        flags = _DURABILITY[self._config.durability] | (Flag.DIRECT if self.direct else Flag.NONE)
        flags |= Flag.SHARED if layout.is_shared(self.root_fd) else Flag.NONE
        return Place(
            root_fd=self.root_fd,
            data_dir=layout.data_dir(self.name, epoch),
            tmp_dir=self.tmp_dir,
            digest=self._context.identity.short_digest,
            chunk_bytes=self._context.chunk_bytes,
            flags=flags,
        )

    def _probe_direct(self) -> bool:
        if self._config.direct_io == "never":
            return False
        try:
            self._try_direct()
        except OSError as error:
            if self._config.direct_io == "always":
                where = self._config.root_dir
                raise TierError(
                    f"tier {self._context.name}: direct_io is 'always', and {where} has none "
                    f"({error.strerror}): use 'auto'"
                ) from error
            return False
        return True

    def _try_direct(self) -> None:
        if not _AWAITED_READS.fullmatch(kind := layout.file_system_of(self.root_fd)):
            why = f"on {kind or 'an unknown file system'} a direct read may outlive its process"
            raise OSError(errno.EOPNOTSUPP, why)
        if self.read_only is not None:
            path, flags = f"{self.name}/{layout.MANIFEST}", os.O_RDONLY
        else:
            path, flags = f"{self.tmp_dir}/probe", os.O_RDWR | os.O_CREAT
        fd = os.open(path, flags | os.O_DIRECT | layout.CAREFULLY, 0o600, dir_fd=self.root_fd)
        try:
            with mmap.mmap(-1, layout.BLOCK_BYTES) as block:
                if self.read_only is None:
                    os.pwritev(fd, [block], 0)
                os.preadv(fd, [block], 0)
        finally:
            os.close(fd)
            if self.read_only is None:
                os.unlink(path, dir_fd=self.root_fd)

    def _epoch_lock(self) -> AbstractContextManager[None]:
        if self.read_only is not None and not self._exists("epoch.lock"):
            return nullcontext()
        return wait_for_lock(self.root_fd, f"{self.name}/epoch.lock", create=self.read_only is None)

    def _exists(self, name: str) -> bool:
        try:
            os.stat(f"{self.name}/{name}", dir_fd=self.root_fd)
        except FileNotFoundError:
            return False
        return True

    def _write_small(self, name: str, text: str) -> None:
        """Write a small file completely or not at all, even in a power cut."""
        tmp = f"{self.tmp_dir}/{name}"
        fd = layout.create_file(self.root_fd, tmp, os.O_WRONLY | os.O_TRUNC | layout.CAREFULLY)
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(tmp, f"{self.name}/{name}", src_dir_fd=self.root_fd, dst_dir_fd=self.root_fd)
        with layout.open_folder(self.root_fd, self.name, follow=True) as folder:
            os.fsync(folder)


def _mount_above(path: Path) -> Path:
    """Return the mount point of a path's file system."""
    path = path.resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path


def _make_folder(path: Path) -> None:
    """Make a directory and its missing parents, for this user alone."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=layout.DIRECTORY_MODE, exist_ok=True)
