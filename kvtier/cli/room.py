"""The room that measurements have on a file system: too little is said before they begin."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from kvtier.errors import KVTierError

REMEDY: Final = "name a directory on a file system with more room, or make some there"


def make_directory(path: Path) -> None:
    """Make the directory that files are to go to, where it is missing.

    Raises:
        KVTierError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVTierError(f"{path} cannot be made: {error.strerror}; name another directory") from error


def require(folder: Path, needed: int, what: str) -> None:
    """Look whether there is room below a directory.

    Args:
        folder: the directory, which is there.
        needed: bytes.
        what: what needs them.

    Raises:
        KVTierError: there is not as much.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise KVTierError(
            f"{folder}: {_gib(needed)} are needed for {what}, and {_gib(free)} are free: {REMEDY}"
        )


def files_below(folder: Path) -> dict[str, Any]:
    """Return the settings of a tier of files for a measurement: it may use all that the file system has.

    By default a tier keeps some of it free, and on a disk that is nearly full stores nothing.

    Args:
        folder: the tier's root, which is thrown away afterwards.
    """
    return {"type": "fs", "root_dir": str(folder), "min_free_bytes": 0}


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
