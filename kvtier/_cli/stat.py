"""``kvtier stat``: one root in a few numbers, or all that is known of one chunk's file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvtier import _native as native
from kvtier._cli.du import usage
from kvtier._cli.ls import listing
from kvtier._cli.report import JsonFlag, finish, print_line, show_record
from kvtier._cli.roots import require_root
from kvtier.errors import TierError
from kvtier.tiers import _seal as seal
from kvtier.tiers._seal import Integrity
from kvtier.tiers.fs._checking import FileChecker, open_quietly
from kvtier.tiers.fs._files.base import key_of
from kvtier.tiers.fs._layout import BLOCK_BYTES
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._root import Root


@dataclass(frozen=True, slots=True)
class RootState:
    """A root in a few numbers.

    Attributes:
        root: the directory.
        total_bytes: of its file system.
        free_bytes: of its file system, for unprivileged users.
        bytes: what it takes on disk in all.
        ledger_bytes: what the engines that share it believe that it takes; None where they have not counted.
        leased_bytes: what they may write without asking each other again; None as well.
        writers: engines that have a lease now; None where nobody keeps a ledger.
        namespaces: how many caches it holds.
        in_use: how many of them a living process has open.
        chunks: of their current epochs.
        old_chunks: of other epochs.
        problems: what is wrong, one line each.
        native: whether the native helper is there.
    """

    root: str
    total_bytes: int
    free_bytes: int
    bytes: int
    ledger_bytes: int | None
    leased_bytes: int | None
    writers: int | None
    namespaces: int
    in_use: int
    chunks: int
    old_chunks: int
    problems: list[str]
    native: bool


@dataclass(frozen=True, slots=True)
class ChunkState:
    """All that is known of one chunk's file.

    Attributes:
        path: the file.
        finding: ``sound``, ``torn``, ``foreign`` (its trailer is another chunk's than its name says, or its
            namespace's name says), ``checksum``, ``unreadable``, or ``unverified`` where its
            name says nothing.
        hash: of its tokens, as its trailer says, in hexadecimal digits; None without a trailer.
        group: KV cache group, as its trailer says.
        digest: first half of the digest of its cache, as its trailer says, in hexadecimal digits.
        payload_bytes: bytes of the chunk, as its trailer says.
        file_bytes: length of the file.
        written: when it was written, in seconds since the epoch of Unix.
        used: when it was last used.
    """

    path: str
    finding: str
    hash: str | None
    group: int | None
    digest: str | None
    payload_bytes: int | None
    file_bytes: int
    written: float
    used: float


def command(
    path: Annotated[Path, typer.Argument(metavar="ROOT|CHUNK", help="A root, or one chunk's file.")],
    as_json: JsonFlag = False,
) -> None:
    """Show a root in a few numbers, or all that is known of one chunk's file.

    Exit status 1 where something is wrong with it, or nothing can be proven.

    Example: kvtier stat /var/cache/kvtier
    """
    if path.is_dir():
        require_root(path)
        root = of_root(path)
        finish(root, _show_root, as_json=as_json, is_healthy=not root.problems)
    chunk = of_chunk(path)
    finish(chunk, lambda it: show_record(it.path, it), as_json=as_json, is_healthy=chunk.finding == "sound")


def of_root(path: Path) -> RootState:
    """Return the state of a root.

    Raises:
        TierError: it cannot be read.
    """
    held, taken = listing(path), usage(path)
    with Root(path) as root:
        accounts = ledger.read(root.fd)
    problems = [f"{one.namespace}: {one.problem}" for one in held.namespaces if one.problem]
    if taken.unreadable:
        problems.append(f"{taken.unreadable} directories cannot be read")
    return RootState(
        root=str(path),
        total_bytes=taken.total_bytes,
        free_bytes=taken.free_bytes,
        bytes=taken.bytes,
        ledger_bytes=accounts.used if accounts is not None and accounts.is_exact else None,
        leased_bytes=accounts.leased if accounts is not None else None,
        writers=len(accounts.leases) if accounts is not None else None,
        namespaces=len(held.namespaces),
        in_use=sum(one.in_use is True for one in held.namespaces),
        chunks=sum(one.chunks for one in held.namespaces),
        old_chunks=sum(one.old_chunks for one in held.namespaces),
        problems=problems,
        native=native.available,
    )


def _show_root(state: RootState) -> None:
    show_record(state.root, state)
    for problem in state.problems:
        print_line(problem)


def of_chunk(path: Path) -> ChunkState:
    """Return the state of a chunk's file, wherever it is: in its place, in the quarantine, or a copy.

    That does not count as a use of the chunk, where the file is this user's or this user is root.

    Raises:
        TierError: it cannot be read, or is no chunk's file.
    """
    try:
        found = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise TierError(f"{path} is neither a directory nor a chunk's file")
        sealed = _sealed(path, found.st_size)
        finding = _finding(path.absolute(), sealed)
    except OSError as error:
        raise TierError(f"{path} cannot be read: {error.strerror}") from error
    return ChunkState(
        path=str(path),
        finding=finding,
        hash=sealed.key[:-4].hex() if sealed else None,
        group=int.from_bytes(sealed.key[-4:], "big") if sealed else None,
        digest=sealed.digest.hex() if sealed else None,
        payload_bytes=sealed.payload_bytes if sealed else None,
        file_bytes=found.st_size,
        written=found.st_mtime,
        used=max(found.st_atime, found.st_mtime),
    )


def _sealed(path: Path, length: int) -> seal.Sealed | None:
    fd = open_quietly(path)
    try:
        return seal.read(os.pread(fd, seal.TRAILER_BYTES, max(0, length - BLOCK_BYTES)))
    finally:
        os.close(fd)


def _finding(path: Path, sealed: seal.Sealed | None) -> Integrity:
    """Prove a file by its name where that is a chunk's, else by its trailer alone."""
    key = key_of("/".join(path.parts[-3:]))
    whose = path.parts[-4].rpartition("_r")[0].rpartition("_")[2] if key is not None else ""
    if key is None:
        if sealed is None and path.parent.name != "quarantine":
            raise TierError(f"{path} is no chunk's file: neither its name nor a trailer says so")
        if sealed is None:
            return Integrity.UNVERIFIED
        key = sealed.key
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with FileChecker(fd, lambda digest: digest.hex().startswith(whose[:32])) as checker:
            return checker.check(path.name, key).finding
    finally:
        os.close(fd)
