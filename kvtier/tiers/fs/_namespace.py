"""One identity's directories below a root: the epoch that is joined, and the writer that an opener is.

Everything here blocks and runs in the tier's own threads.

**Epochs.** Chunks live in a directory of their epoch. A reset starts an epoch for the opener that resets, and
raises the number in the file ``epoch`` beyond it, so that later openers start another one: the reset may have
been for weights that this process alone has. Other openers keep their epoch until they reset or open again.
An older epoch whose lock is free is removed in the background.

The number never goes back: if the file is missing, unreadable or behind a trace of a higher epoch, a number
above all traces is taken. Old bytes are lost then, and never mixed up.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Final

from kvtier._core.tiers.backoff import Backoff
from kvtier._log import GuardedLogger
from kvtier._telemetry.log_limit import LogLimit
from kvtier.errors import IdentityError, TierError
from kvtier.tiers._base import TierContext
from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._config import FsConfig
from kvtier.tiers.fs._epoch import Epoch
from kvtier.tiers.fs._files.call import Flag, Place, errno_name
from kvtier.tiers.fs._locks import close_lock, make_writer_lock, open_lock, try_lock, wait_for_lock
from kvtier.tiers.fs._quota import ledger

_READ_ONLY: Final = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOLCK}
)
_DURABILITY: Final = {
    "none": Flag.NONE,
    "data": Flag.SYNC_DATA,
    "full": Flag.SYNC_DATA | Flag.SYNC_DIRECTORY,
}
_FIRST_TRY_PAUSE_S: Final = 2.0
_LONGEST_TRY_PAUSE_S: Final = 60.0
_LINES_EVERY_S: Final = 30.0
_log = GuardedLogger("kvtier.tiers.fs")
_log_limit = LogLimit(_LINES_EVERY_S)  # of the process: each attempt to open makes another tier


class Namespace:
    """One identity's directories below a root, opened."""

    def __init__(self, config: FsConfig, context: TierContext, root_fd: int) -> None:
        self.name = context.identity.namespace
        self.root_fd = root_fd
        self._refusal = 0  # errno of the first write, if it failed
        self._next_try_s, self._try_pause = 0.0, Backoff(_FIRST_TRY_PAUSE_S, _LONGEST_TRY_PAUSE_S)
        self.is_new = False  # whether it had no manifest
        self.direct = False  # whether files bypass the page cache
        self._mount = _mount_above(config.root_dir)
        self._config = config
        self._context = context
        self.writer = ""  # name of this opener's lock and directory for unfinished files
        self._writer_fd: int | None = None

    @staticmethod
    def open(config: FsConfig, context: TierContext) -> tuple[Namespace, Epoch]:
        """Make or open the directories, join the epoch, and compare or write the manifest.

        Raises:
            TierError: the root can be neither written nor read, ``direct_io`` is ``always`` and not possible,
                or the directory belongs to another cache: the message lists what differs.
        """
        root = config.root_dir
        try:
            _make_folder(root)
            root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with ExitStack() as undo:
                namespace = Namespace(config, context, root_fd)
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
        """Why nothing can be written, as an errno's name; None if it can."""
        return errno_name(self._refusal) if self._refusal else None

    @property
    def can_evict(self) -> bool:
        """Whether files may be removed: also where nothing can be written for want of room."""
        return not self._refusal or self._refusal in ledger.NO_ROOM

    @property
    def tmp_dir(self) -> str:
        """This writer's own directory for unfinished files."""
        return f"{self.name}/.tmp/{self.writer}"

    def is_replaced(self) -> bool:
        """Return whether the directory at the root's path should be used in place of this one, or be made.

        A root that was moved away stays in use. So does one after an unmount: the directory under the mount
        point is on another disk, which must not be filled. A root that was removed is made again.
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
        except OSError:  # its file system is gone
            return True
        return not is_same or not self._exists(layout.MANIFEST)

    def _is_removed(self) -> bool:
        try:
            return not os.fstat(self.root_fd).st_nlink and os.path.ismount(self._mount)
        except OSError as error:  # a share that hangs or is gone, or whose server has no such directory
            return error.errno == errno.ESTALE and os.path.ismount(self._mount)

    def try_to_write(self) -> int | None:
        """Return 0 if a root that was read-only at opening can be written, its ledger too, or the errno.

        Return None without a try: tries come at growing intervals, as each may make a file.
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
        """Give back the root and this writer's directory. The epoch is retired before."""
        self._remove_writer()
        os.close(self.root_fd)

    def _remove_writer(self) -> None:
        """Remove this writer's directory and lock. Sweeps remove the rest after a disk failure."""
        if self._writer_fd is not None:
            with suppress(OSError):
                for name in layout.names_in(self.root_fd, self.tmp_dir, follow=True):
                    os.unlink(f"{self.tmp_dir}/{name}", dir_fd=self.root_fd)
            with suppress(OSError):
                os.rmdir(self.tmp_dir, dir_fd=self.root_fd)
            with suppress(OSError):
                os.unlink(f"{self.tmp_dir}.lock", dir_fd=self.root_fd)
            close_lock(self._writer_fd)
            self._writer_fd = None

    def advance(self, beyond: int) -> Epoch:
        """Start a new epoch, above ``beyond`` and every trace of an epoch, for this opener alone.

        The new epoch's lock file comes first. It needs no room for bytes; if writing the number
        raises OSError, later openers start above this trace.
        """
        if self._refusal:
            raise OSError(self._refusal, os.strerror(self._refusal), self.name)
        with self._epoch_lock():
            number = max(beyond, self._highest_trace(), layout.stored_epoch(self.root_fd, self.name) or 0) + 1
            self._require_number(number + 1)
            epoch = self._enter(number)
            try:
                self._write_small("epoch", f"{number + 1}\n")
            except OSError:
                epoch.retire()
                raise
            return epoch

    # ------------------------------------------------------------------------------ opening

    def _join(self) -> Epoch:
        try:
            self._make_writer()
        except OSError as error:
            self.accept_read_only(error)
        self.direct = self._probe_direct()
        with self._epoch_lock():
            return self._enter(self._current_epoch())

    def _agree_on_identity(self) -> None:
        """Compare the manifest with the identity; write it where there is none."""
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

        Raises:
            OSError: ``refusal``, if there is nothing to read, or it has another cause.
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

        A directory without a lock is left over: the lock is made before it, and removed after it. It fails
        on a file system without locks: no bound would hold for several writers.
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
        self._write_small("epoch", f"{highest + 1}\n")
        return highest + 1

    def _highest_trace(self) -> int:
        """Return the highest epoch that left a trace, -1 where none did."""
        found = [
            trace[1]
            for name in layout.names_in(self.root_fd, ".", follow=True)
            if (trace := layout.parse_data_dir(name)) and trace[0] == self.name
        ]
        users = layout.epochs_of_users(layout.names_in(self.root_fd, self.name, follow=True))
        return max((*found, *users), default=-1)

    def _require_number(self, number: int) -> None:
        """Raise OSError for an epoch above the last one; only a forged trace leads there."""
        if number > layout.MAX_EPOCH:
            what = f"no epoch can follow {number - 1}: remove its data directory, users lock and epoch file"
            raise OSError(errno.EOVERFLOW, what, self.name)

    def _enter(self, number: int) -> Epoch:
        """Join an epoch. Under the epoch's lock, which sweeps take too."""
        lock_fd: int | None = None
        # A root that cannot be written may lack the file, and has no sweeps.
        writable = self.read_only is None
        with nullcontext() if writable else suppress(FileNotFoundError):
            lock_fd = open_lock(self.root_fd, layout.users_lock(self.name, number), create=writable)
            try:
                if try_lock(lock_fd, shared=True) is False:
                    raise OSError(errno.EAGAIN, "the current epoch is locked by a sweep", self.name)
            except OSError:
                os.close(lock_fd)
                raise
        return Epoch(number, self._place(number), lock_fd)

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
                    f"({error.strerror}); use 'auto'"
                ) from error
            return False
        return True

    def _try_direct(self) -> None:
        direct = getattr(os, "O_DIRECT", None)
        if direct is None:
            raise OSError(errno.EOPNOTSUPP, "this platform has no direct I/O")
        if self.read_only is not None:
            path, flags = f"{self.name}/{layout.MANIFEST}", os.O_RDONLY
        else:
            path, flags = f"{self.tmp_dir}/probe", os.O_RDWR | os.O_CREAT
        fd = os.open(path, flags | direct | os.O_CLOEXEC, 0o600, dir_fd=self.root_fd)
        try:
            with mmap.mmap(-1, layout.BLOCK_BYTES) as block:
                if self.read_only is None:
                    os.pwritev(fd, [block], 0)
                os.preadv(fd, [block], 0)
        finally:
            os.close(fd)
            if self.read_only is None:
                os.unlink(path, dir_fd=self.root_fd)

    # -------------------------------------------------------------------------- small files

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
        """Write a file completely or not at all, even at a power cut."""
        tmp = f"{self.tmp_dir}/{name}"
        fd = layout.create_file(self.root_fd, tmp, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(tmp, f"{self.name}/{name}", src_dir_fd=self.root_fd, dst_dir_fd=self.root_fd)
        with layout.open_folder(self.root_fd, self.name, follow=True) as folder:
            os.fsync(folder)


def _mount_above(path: Path) -> Path:
    """Return where the file system is mounted that a path is on."""
    path = path.resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path


def _make_folder(path: Path) -> None:
    """Make a directory and those above it that are missing, for this user alone."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=layout.DIRECTORY_MODE, exist_ok=True)
