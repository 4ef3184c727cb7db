"""Memory for the pages of a region: allocated before use, with huge pages if the system grants them.

See ``madvise(2)`` for ``MADV_POPULATE_WRITE`` and ``MADV_HUGEPAGE``, ``tmpfs(5)`` for
the mount option ``huge``, ``Documentation/admin-guide/mm/transhuge.rst`` for ``shmem_enabled``.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from pathlib import Path

from kvtier import _native as native

_MADV_POPULATE_WRITE = 23
_MOUNTS = Path("/proc/self/mountinfo")
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_GRANTED = frozenset(("always", "within_size", "advise", "force", "madvise"))


def ask_for_huge(mapping: mmap.mmap, path: Path | None, *, shared: bool = False) -> bool:
    """Ask for huge pages in a mapping of ``path``; return whether the system grants them there.

    ``path`` is None for anonymous memory, and for a file without a name, which is ``shared``.
    """
    if not grants_huge(path, shared=shared):
        return False
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        # without room, a mere touch would kill the process
        mapping.madvise(_MADV_POPULATE_WRITE, 0, mmap.PAGESIZE)
    except (AttributeError, OSError):
        return False
    return True


def grants_huge(path: Path | None, *, shared: bool = False) -> bool:
    """Return whether the system grants huge pages to mappings of ``path`` that ask for them."""
    if path is None and not shared:
        return _setting(_SETTINGS / "enabled") in _GRANTED
    forced = _setting(_SETTINGS / "shmem_enabled")
    if path is None:
        return forced in _GRANTED
    return (forced if forced in ("deny", "force") else _huge_option(path.parent)) in _GRANTED


def _setting(path: Path) -> str:
    """Return the word in brackets of a setting such as ``always [madvise] never``."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _huge_option(directory: Path) -> str:
    """Return the option ``huge`` that the file system of ``directory`` is mounted with, or nothing."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text().splitlines():
        if line.split()[2] == number and (found := re.search(r"\bhuge=(\w+)", line)):
            return found[1]
    return ""


def back(address: int, nbytes: int, fd: int | None, offset: int, *, huge: bool) -> int:
    """Allocate memory for a part of a mapping, at ``offset`` of its file, and map it; return 0 or the errno.

    Its content stays. ``huge``: huge pages were asked for and are granted.
    """
    if huge:  # Only by touching, because an allocation through the file gets small pages.
        code = native.populate(address, nbytes)
        if code not in (errno.EINVAL, errno.ENOSYS):
            return code
    if fd is not None:
        # Without room this fails harmlessly on every kernel, unlike a touch, and allocates nothing.
        try:
            os.posix_fallocate(fd, offset, nbytes)
        except OSError as error:
            return error.errno or errno.EIO
    code = native.populate(address, nbytes)
    # an old kernel, on which first touches will be slow
    return 0 if code in (errno.EINVAL, errno.ENOSYS) else code
