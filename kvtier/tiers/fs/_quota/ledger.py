"""The ledger of a root: one small file that the writers of all processes share.

::

    <root>/.kvtier/ledger           the accounts, with a checksum
    <root>/.kvtier/<writer>.lock    held by a writer while it is alive; else its lease is ended
    <root>/.kvtier/evict.lock       held by the one process that evicts
    <root>/.kvtier/count.lock       held by the one process that counts

The ledger's own lock is held for one read, one write and one statvfs, never while chunks move. The ledger may
be lost, damaged or out of date at any time, and after a reboot it is, because it is not flushed. Until the
next count the root is then assumed to hold as much as the whole file system.

It is not mapped into memory: truncating the file would kill the process. It is not kept open: the process
would not see a replacement of the file, nor other hosts' writes on network file systems.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import crc32c
import msgspec

from kvtier._log import GuardedLogger
from kvtier.tiers.fs._layout import CAREFULLY, WRITER, create_file, make_folder, names_in
from kvtier.tiers.fs._locks import (
    close_lock,
    is_current,
    lock_with_timeout,
    make_writer_lock,
    open_lock,
    removed_lock,
    try_lock,
)
from kvtier.tiers.fs._quota.accounts import MAX_STORED, Accounts, FileSystem

FOLDER: Final = ".kvtier"
EVICTING: Final = f"{FOLDER}/evict.lock"
COUNTING: Final = f"{FOLDER}/count.lock"
LEDGER: Final = f"{FOLDER}/ledger"
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})  # files can still be removed
_PAGE_BYTES: Final = 4096
_MIN_FREE_INODES: Final = 64
_MAX_BYTES: Final = 1 << 20
_PATIENCE_S: Final = 2.0
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_log = GuardedLogger("kvtier.tiers.fs")


def stat_file_system(root_fd: int) -> FileSystem:
    """Return the state of an open directory's file system. Blocks.

    Reports no free bytes when inodes are nearly exhausted. Else puts would fail and nothing would be evicted.
    """
    found = os.fstatvfs(root_fd)
    unit = found.f_frsize
    # A total of 0 inodes means that the file system creates them as needed.
    has_inodes = found.f_files == 0 or found.f_favail > min(_MIN_FREE_INODES, found.f_files // 16)
    free = found.f_bavail * unit if has_inodes else 0
    return FileSystem(found.f_blocks * unit, (found.f_blocks - found.f_bfree) * unit, free)


class Ledger:
    """Accounts of one process alone, for a root that cannot be written. For one thread at a time.

    ``stat`` returns the file system's state; it blocks.
    """

    def __init__(self, stat: Callable[[], FileSystem]) -> None:
        self.stat = stat
        self.writer = "self"  # name of this writer's lease
        self.accounts = Accounts(stat().used)

    @contextmanager
    def change(self) -> Iterator[Accounts]:
        """Hold the accounts, and publish them at the end. OSError if that fails."""
        yield self.accounts

    def expire_dead_leases(self, accounts: Accounts) -> None:
        """End the leases of dead writers; the caller holds the accounts."""

    def close(self) -> None:
        """End this writer's lease, and count it as written."""


class SharedLedger(Ledger):
    """The shared accounts of a root, open for one writer. The descriptor of the root stays the caller's.

    OSError if the ledger cannot be made, or the file system has no locks.
    """

    def __init__(self, root_fd: int, stat: Callable[[], FileSystem] | None = None) -> None:
        self._root_fd = root_fd
        self.stat = stat or partial(stat_file_system, root_fd)
        make_folder(root_fd, FOLDER)
        self.writer, self._fd = make_writer_lock(root_fd, FOLDER)
        try:
            with self.change() as accounts:
                self._join(accounts)
        except BaseException:
            self._unregister()
            raise

    def close(self) -> None:
        with suppress(OSError), self.change() as accounts:
            accounts.expire_leases((self.writer,))
        self._unregister()

    @contextmanager
    def change(self) -> Iterator[Accounts]:
        fd = self._open()
        try:
            lock_with_timeout(fd, LEDGER, _PATIENCE_S)
            before = os.pread(fd, min(os.fstat(fd).st_size, _MAX_BYTES), 0)
            accounts = parse(before) or self._new_accounts()
            if self.writer not in accounts.leases:
                self._register_again()
            yield accounts
            after = _encode(accounts)
            if after != before:
                _write(fd, after)
        finally:
            os.close(fd)

    def expire_dead_leases(self, accounts: Accounts) -> None:
        """End the leases of dead writers, and remove the lock files of all dead writers."""
        known = accounts.leases.keys() - {self.writer}
        others = known | writers(self._root_fd) - {self.writer}
        accounts.expire_leases({writer for writer in others if self._remove_if_dead(writer)} & known)

    def _open(self) -> int:
        flags = os.O_RDWR | CAREFULLY
        try:
            return create_file(self._root_fd, LEDGER, flags)
        except FileNotFoundError:  # the directory was removed
            make_folder(self._root_fd, FOLDER)
            return create_file(self._root_fd, LEDGER, flags)

    def _join(self, accounts: Accounts) -> None:
        self.expire_dead_leases(accounts)
        boot = _boot()
        if not accounts.leases and accounts.boot != boot:
            fresh = self._new_accounts()
            for name in accounts.__struct_fields__:
                setattr(accounts, name, getattr(fresh, name))
        accounts.leases[self.writer] = 0

    def _new_accounts(self) -> Accounts:
        return Accounts(self.stat().used, _boot())

    def _register_again(self) -> None:
        """Take a new name if this writer's lock file is gone. OSError if none can be made now."""
        if is_current(self._root_fd, f"{FOLDER}/{self.writer}.lock", self._fd):
            return
        gone = self._fd
        self.writer, self._fd = make_writer_lock(self._root_fd, FOLDER)
        os.close(gone)

    def _unregister(self) -> None:
        with suppress(OSError):
            os.unlink(f"{FOLDER}/{self.writer}.lock", dir_fd=self._root_fd)
        close_lock(self._fd)

    def _remove_if_dead(self, writer: str) -> bool:
        """Return whether another writer is dead, and if so remove its lock file."""
        try:
            with removed_lock(self._root_fd, f"{FOLDER}/{writer}.lock", create=False) as is_dead:
                return is_dead
        except PermissionError:  # another user is creating it at the moment
            return False
        except FileNotFoundError:
            return True


@contextmanager
def elected(root_fd: int, path: str) -> Iterator[int | None]:
    """Become the one process that does some work for the root.

    Yields the open lock file, or None if another process does the work.
    """
    try:
        fd = open_lock(root_fd, path, create=True)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        # If not even an empty file can be made, room is needed most: lock the directory instead.
        fd = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        yield fd if try_lock(fd) else None
    finally:
        os.close(fd)


def writers(root_fd: int) -> set[str]:
    """Return the writers, alive or dead, that have a lock file. OSError if they are unknown."""
    locks = (name for name in names_in(root_fd, FOLDER, follow=True) if name.endswith(".lock"))
    return {writer for lock in locks if WRITER.fullmatch(writer := lock.removesuffix(".lock"))}


def _boot() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"  # reboots cannot be detected


_decoder = msgspec.json.Decoder(Accounts)


def _encode(accounts: Accounts) -> bytes:
    body = msgspec.json.encode(accounts)
    text = b"%08x %s\n" % (crc32c.crc32c(body), body)
    # In whole pages: a file that keeps its length needs no room on a full file system.
    return text.ljust(-(-len(text) // _PAGE_BYTES) * _PAGE_BYTES)


def parse(text: bytes) -> Accounts | None:
    """Return the accounts that ``_encode`` encoded; None for any other text."""
    head, _, _ = text.partition(b"\n")
    checksum, _, body = head.partition(b" ")
    if checksum != b"%08x" % crc32c.crc32c(body):
        return None
    try:
        accounts = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return accounts if accounts.used + accounts.leased < MAX_STORED else None


def _write(fd: int, text: bytes) -> None:
    if os.pwrite(fd, text, 0) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), LEDGER)
