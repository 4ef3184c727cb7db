"""``kvtier stat``: the state of one chunk's file."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from kvtier._cli import JsonFlag
from kvtier.errors import TierError
from kvtier.keys import OffloadKey, group_index
from kvtier.tiers._seal import Integrity
from kvtier_tools.fs import FileCheck, FileChecker, layout
from kvtier_tools.report import ago, finish, table

_NO_KEY = OffloadKey(b"")


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """The state of one chunk's file. Fields from its trailer are None if it has none."""

    path: str
    finding: str  # a value of Integrity
    hash: str | None  # by its trailer: of its tokens, in hexadecimal
    group: int | None  # by its trailer: the KV cache group
    digest: str | None  # by its trailer: the first half of its cache's digest, in hexadecimal
    payload_bytes: int | None  # by its trailer
    file_bytes: int
    written: float  # Unix time
    used: float  # Unix time of the last use


def command(
    chunk: Annotated[Path, typer.Argument(metavar="CHUNK", help="A chunk's file.")], as_json: JsonFlag = False
) -> None:
    """Show the state of one chunk's file, in its place, in the quarantine or copied.

    Exit status 1 if the chunk is damaged or cannot be verified.

    Example: kvtier stat /var/cache/kvtier/model_0123456789abcdef_r0/3fa/91_g0/3fa91c.bin
    """
    state = _state_of(chunk)
    finish(state, _show, as_json=as_json, is_healthy=state.finding == Integrity.SOUND)


def _show(state: ChunkReport) -> None:
    shown = {**asdict(state), "written": ago(state.written), "used": ago(state.used)}
    del shown["path"]
    table(state.path, ("what", "value"), [(name.replace("_", " "), value) for name, value in shown.items()])


def _state_of(path: Path) -> ChunkReport:
    """Return the state of a chunk's file. TierError if it cannot be read or is not a chunk file."""
    try:
        found = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise TierError(f"{path} is not a regular file")
        check = _checked(path.absolute())
    except OSError as error:
        raise TierError(f"{path} cannot be read: {error.strerror}") from error
    sealed = check.sealed
    return ChunkReport(
        path=str(path),
        finding=check.finding,
        hash=sealed.key[:-4].hex() if sealed else None,
        group=group_index(sealed.key) if sealed else None,
        digest=sealed.digest.hex() if sealed else None,
        payload_bytes=sealed.payload_bytes if sealed else None,
        file_bytes=found.st_size,
        written=found.st_mtime,
        used=max(found.st_atime, found.st_mtime),
    )


def _checked(path: Path) -> FileCheck:
    """Check a file by its name if that is a chunk's, else by its trailer alone."""
    key = layout.key_of("/".join(path.parts[-3:]))
    digits = path.parts[-4].rpartition("_r")[0].rpartition("_")[2] if key is not None else ""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        checker = FileChecker(folder, digits[:32])
        check = checker.check(path.name, key or _NO_KEY)
        if key is None and check.sealed is not None:
            check = checker.check(path.name, check.sealed.key)
    finally:
        os.close(folder)
    if check.errno:
        raise OSError(check.errno, os.strerror(check.errno))
    if key is None and check.sealed is None:
        if path.parent.name != "quarantine":
            raise TierError(f"{path} is not a chunk file: its name is not a chunk's, and it has no trailer")
        return replace(check, finding=Integrity.UNVERIFIED)
    return check
