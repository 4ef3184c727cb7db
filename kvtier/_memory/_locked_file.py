"""Files that exist as long as a process holds a lock on them, and the removal of stale ones.

A region's file lives in memory, so a file that outlives its processes wastes memory. Every user holds a
shared ``flock`` on it, which ends with the process however it ends. A process that gets the exclusive lock
without waiting knows that the file has no user. Age, names and process ids prove nothing. These rules make it
safe while other processes start and stop at the same time:

* a file gets its final name only after its creator holds the lock, so a named file without a lock never
belongs to a process that is still starting;
* a name is removed only with the exclusive lock on the very file that it names;
* after a file was opened and locked, the name is checked again: it may mean another file by then.

A guard can keep a file for the next start of its engine, under a name that ends with ``KEPT``. At that moment
it holds the exclusive lock, so no process of the engine can still write to the file. The guard releases the
file when it is claimed. The file's modification time is the time of its removal by the guard. Its last
``NOTE_BYTES`` bytes are a note, which begins with ``KEPT_FOR`` and a word for the engine.

Each holder has its own open file description, so that two holders in one process count twice.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier._forks import keep_fd_from_children
from kvtier._log import GuardedLogger
from kvtier.errors import RegionError

logger = GuardedLogger("kvtier.memory")

PREFIX = "kvtier_"
KEPT = ".kept"
KEPT_FOR = "kept for "
NOTE_BYTES = 256
PATIENCE_S = 10.0  # Exclusive locks last microseconds, and a stopped process must not hang a start.
RETRY_S = 0.001
HANDOVER_S = 2.0  # A guard checks ten times a second whether its file was claimed.
PASSES = 2  # A guard may rename a file during the first attempt.
RENAME_S = 0.05  # A guard that starts to keep a file holds the exclusive lock for microseconds.
_NOBODY = 0
_CAREFULLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening the FIFO of another user would block


@dataclass(frozen=True, slots=True)
class LockedFile:
    """An open file that carries a shared lock of this process."""

    fd: int  # the open file description that holds the lock
    path: Path | None  # None if the file has no name and ends with its last descriptor
    pid: int  # The process that took the lock. Children forked from it do not have the file.


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file that is kept for the next start of an engine."""

    path: Path
    owner: str  # the engine
    contents: str
    bytes: int
    until: float  # Unix time of its removal


def kept_files(directory: Path) -> list[KeptFile]:
    """Return the kept files in a directory that this user may read."""
    found = []
    for path in sorted(directory.glob(f"{PREFIX}*{KEPT}")):
        with ExitStack() as undo, suppress(OSError):
            fd = os.open(path, os.O_RDONLY | _CAREFULLY)
            undo.callback(os.close, fd)
            note, status = _note_of(fd), os.fstat(fd)
            contents = _words(note).removeprefix(KEPT_FOR).partition(" ")[2]
            found.append(KeptFile(path, _owner_of(note), contents, status.st_size, status.st_mtime))
    return found


def remove_kept(path: Path) -> bool:
    """Remove a kept file; return whether that was possible. Its engine may have claimed it."""
    with ExitStack() as undo, suppress(OSError):
        if (fd := _open_existing(path)) is not None:
            undo.callback(os.close, fd)
            return _remove_kept(fd, path)
    return False


def create_or_join(path: Path, nbytes: int, note: bytes = b"") -> LockedFile:
    """Create the file ``path`` with ``nbytes`` zeros, or join it if a living process holds it.

    ``note``, of constant length, follows the zeros: all holders must agree on it and the size. RegionError if
    the file exists with another size, note or owner, the directory has no room, or the name stayed contested
    for ``PATIENCE_S`` seconds.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            found = _open_existing(path)
            fd = _create(path, nbytes, note) if found is None else _join(found, path, nbytes, note)
        except OSError as error:
            raise RegionError(f"{path} cannot be created or opened: {error.strerror or error}") from error
        if fd is not None:
            return LockedFile(fd, path, os.getpid())
        time.sleep(RETRY_S)
    raise RegionError(f"{path} is locked by another process that has not released it for {PATIENCE_S:g} s")


def adopt(path: Path, nbytes: int, note: bytes, cleared: range) -> LockedFile | None:
    """Rename an unused file of this size and note to ``path``, and return it; None if there is none.

    The bytes in ``cleared`` are set to zero. A file that is kept for the same engine is removed if its size
    or note differs. Files of running engines are left alone.
    """
    tried: set[Path] = set()
    for _ in range(PASSES):
        names = set(path.parent.glob(PREFIX + "*")) - tried
        for found in sorted(names):
            with suppress(OSError):
                fd = _open_existing(found)
                if fd is not None and _take_over(fd, found, path, nbytes, note, cleared):
                    return LockedFile(fd, path, os.getpid())
        tried |= names
    return None


def wait_for(path: Path) -> None:
    """Wait until a file exists, or for ``PATIENCE_S`` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(RETRY_S)


def create_unnamed(nbytes: int) -> LockedFile:
    """Make a nameless file in memory, to be shared by its descriptor, or raise RegionError."""
    try:
        fd = os.memfd_create("kvtier", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
    except OSError as error:
        raise RegionError(f"{nbytes} bytes of shared memory cannot be allocated: {error.strerror}") from error
    keep_fd_from_children(fd)
    return LockedFile(fd, None, os.getpid())


def borrow(fd: int, nbytes: int) -> LockedFile:
    """Adopt a file from another process. RegionError if it is shorter than ``nbytes``.

    The other process keeps the locks: they end, and the file can be claimed again, when both processes have
    ended.
    """
    found = os.fstat(fd).st_size
    if found < nbytes:
        raise RegionError(f"the primary tier has {found} bytes, but this engine needs {nbytes} bytes")
    keep_fd_from_children(fd)
    return LockedFile(fd, None, _NOBODY)


def release(file: LockedFile, *, keeps: bool = False) -> None:
    """Release the file; the last holder removes it. Call it once.

    A file that a guard ``keeps`` stays locked until it has no mapping and no descriptor. Copies that hang,
    and a tier process that does not exit, may write to it until then.
    """
    # Otherwise the file is borrowed, or this is a forked child.
    has_lock = file.pid == os.getpid() and not keeps
    try:
        if has_lock and file.path is not None and _try_lock(file.fd, fcntl.LOCK_EX):
            _unlink_if_named(file.fd, file.path)
    finally:
        if has_lock:  # A mapping duplicates the descriptor and can outlive it, so close alone ends no lock.
            _set_claim(file.fd, fcntl.F_UNLCK)
            fcntl.flock(file.fd, fcntl.LOCK_UN)
        os.close(file.fd)


def claim(file: LockedFile) -> bool:
    """Become the file's only claimant until its release, by a record lock; return whether that worked."""
    try:
        _set_claim(file.fd, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def remove_stale_files(
    directory: Path, owner: str = "", keep: Callable[[Path, int], object] | None = None
) -> list[Path]:
    """Remove and return the ``kvtier_*`` files that no living process holds and this user may remove.

    With an ``owner``, files that dead guards kept for other engines stay; ``keep`` is called with each.
    """
    removed = []
    for path in sorted(directory.glob(PREFIX + "*")):
        with suppress(OSError):
            fd = _open_existing(path)
            if fd is not None and _remove_if_stale(fd, path, owner, keep):
                removed.append(path)
    return removed


def _remove_if_stale(fd: int, path: Path, owner: str, keep: Callable[[Path, int], object] | None) -> bool:
    """Remove the file if no process holds it, and close ``fd``."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or not _try_lock(fd, fcntl.LOCK_EX):
            return False
        if owner and _owner_of(_note_of(fd)) not in (owner, ""):
            if keep is not None:
                keep(path, fd)
            return False
        if not _unlink_if_named(fd, path):
            return False
        logger.info("removed %s (%d bytes): no living process holds it", path, os.fstat(fd).st_size)
        return True
    finally:
        os.close(fd)


def _take_over(fd: int, found: Path, path: Path, nbytes: int, note: bytes, cleared: range) -> bool:
    """Rename a file that no process uses, and lock it; close ``fd`` if that is impossible."""
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        status, is_kept = os.fstat(fd), found.name.endswith(KEPT)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        theirs = _note_of(fd)
        if (status.st_size, theirs) != (nbytes + len(note), note):
            if is_kept and _owner_of(theirs) == _owner_of(note):
                _remove_kept(fd, found)
                logger.info("removed %s (%s): this engine needs %s", found, _words(theirs), _words(note))
            return False
        if is_kept:
            _set_claim(fd, fcntl.F_WRLCK)  # the guard then releases the file
        if not _lock_within(fd, HANDOVER_S if is_kept else RENAME_S) or not _is_named(fd, found):
            return False
        os.pwrite(fd, bytes(len(cleared)), cleared.start)
        os.link(found, path)  # fails if another process was faster
        found.unlink()
        _set_claim(fd, fcntl.F_UNLCK)
        if not _try_lock(fd, fcntl.LOCK_SH) or not _is_named(fd, path):
            return False
        undo.pop_all()
        return True


def _remove_all_kept(directory: Path) -> int:
    """Remove the kept files that no engine has claimed; return their number."""
    removed = [found.path for found in kept_files(directory) if remove_kept(found.path)]
    for path in removed:
        logger.warning("removed %s, kept for its engine: there is no room for another", path)
    return len(removed)


def _remove_kept(fd: int, path: Path) -> bool:
    """Remove a kept file, and free its memory at once although its guard has it open.

    An engine that is killed while it claims the file can leave two names for it, and the next engine may use
    the other name. BlockingIOError if an engine has claimed it.
    """
    _set_claim(fd, fcntl.F_WRLCK)
    if not _unlink_if_named(fd, path):
        return False
    if not os.fstat(fd).st_nlink:
        os.ftruncate(fd, 0)
    return True


def _lock_within(fd: int, patience_s: float) -> bool:
    """Take the exclusive lock; return whether that was possible in time."""
    deadline = time.monotonic() + patience_s
    while not _try_lock(fd, fcntl.LOCK_EX):
        if time.monotonic() >= deadline:
            return False
        time.sleep(RETRY_S)
    return True


def _join(fd: int, path: Path, nbytes: int, note: bytes) -> int | None:
    """Take the shared lock on an existing file; None if the file vanished or the caller must retry."""
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        _require_own_file(fd, path)
        if _try_lock(fd, fcntl.LOCK_EX):  # The last holder died since the sweep.
            _unlink_if_named(fd, path)
        elif _try_lock(fd, fcntl.LOCK_SH) and _is_named(fd, path):
            _require_same(fd, path, nbytes, note)
            undo.pop_all()
            return fd
    return None


def _create(path: Path, nbytes: int, note: bytes) -> int | None:
    """Create the file, lock it, then name it; None if another process was first."""
    if not _has_room(path, nbytes + len(note)):
        return None
    fd, source = _new_file(path)
    keep = False
    try:
        os.ftruncate(fd, nbytes)
        if note:
            os.pwrite(fd, note, nbytes)
        keep = _try_lock(fd, fcntl.LOCK_SH) and _link(source, path)
    finally:
        if source.parent == path.parent:
            source.unlink(missing_ok=True)
        if not keep:
            os.close(fd)
    return fd if keep else None


def _new_file(path: Path) -> tuple[int, Path]:
    """Open a new file, nameless or with a temporary name; return it and the path to link from.

    A file that had another name before is "(deleted)" in the lists of mappings that operators read.
    """
    with suppress(OSError):  # some file systems have no unnamed files
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        source = Path(f"/proc/self/fd/{fd}")
        if source.exists():
            return fd, source
        os.close(fd)
    source = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    return os.open(source, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), source


def _link(source: Path, path: Path) -> bool:
    # With a directory descriptor, os.link follows the link in /proc to the file itself.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(source, path, src_dir_fd=directory, follow_symlinks=True)
    except (FileExistsError, FileNotFoundError):  # Another process was first, or swept the temporary name.
        return False
    finally:
        os.close(directory)
    return True


def _has_room(path: Path, nbytes: int) -> bool:
    """Return whether a new file fits; False if it already exists. Raise RegionError if there is no room."""
    system = os.statvfs(path.parent)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks == 0 or nbytes <= free:  # no blocks at all: a tmpfs without a limit
        return True
    if path.exists():
        return False
    if _remove_all_kept(path.parent):
        return _has_room(path, nbytes)
    raise RegionError(
        f"the primary tier needs {nbytes} bytes, but only {free} bytes are free in {path.parent}: "
        "lower cpu_bytes_to_use, or enlarge the file system"
    )


def _require_own_file(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise RegionError(f"{path} is not a regular file of this user; remove it and start the engine again")


def _require_same(fd: int, path: Path, nbytes: int, note: bytes) -> None:
    found, asked = os.fstat(fd).st_size, nbytes + len(note)
    theirs = os.pread(fd, len(note), max(found - len(note), 0))
    if (found, theirs) == (asked, note):
        return
    notes = f" ({_words(theirs)}; here {_words(note)})" if theirs != note else ""
    raise RegionError(
        f"{path} is in use with {found} bytes, this process needs {asked}{notes}: all processes of an engine "
        "need the same settings, and each engine a different engine_id"
    )


def _note_of(fd: int) -> bytes:
    return os.pread(fd, NOTE_BYTES, max(os.fstat(fd).st_size - NOTE_BYTES, 0))


def _owner_of(note: bytes) -> str:
    """Return the engine for which a file with this note is kept; "" if it must not be kept."""
    text = _words(note)
    return text.removeprefix(KEPT_FOR).split(" ")[0] if text.startswith(KEPT_FOR) else ""


def _words(note: bytes) -> str:
    return note.rstrip(b"\0").decode("ascii", errors="replace")


def _set_claim(fd: int, kind: int) -> None:
    # struct flock: type, whence, start, length (0: to the end), pid (0: owned by the description)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))


def _open_existing(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | _CAREFULLY)
    except FileNotFoundError:
        return None


def _try_lock(fd: int, kind: int) -> bool:
    keep_fd_from_children(fd)  # otherwise a child would hold the lock of a dead parent
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _unlink_if_named(fd: int, path: Path) -> bool:
    """Remove the name if it means this file. The caller has the exclusive lock, or claims a kept file."""
    if not _is_named(fd, path):
        return False
    path.unlink()
    return True
