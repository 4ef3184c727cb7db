"""``--memory`` of ``kvtier ls`` and ``kvtier gc``: host memory kept for the next start of an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvtier._memory._locked_file import KeptFile, kept_files, remove_kept
from kvtier._memory.region import SHARED_MEMORY
from kvtier_tools.report import Bytes, finish, number_of, print_line, table

MemoryFlag = Annotated[
    bool,
    typer.Option(
        "--memory", help=f"Host memory kept by keep_host_memory_s, in place of a root. ROOT: {SHARED_MEMORY}."
    ),
]
RootOrMemory = Annotated[
    Path | None, typer.Argument(metavar="ROOT", show_default=False, help="The root_dir of a file tier.")
]


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Kept host memory, and for ``kvtier gc`` what could not be removed of it."""

    directory: str
    kept: Sequence[KeptFile]
    failed: Sequence[str]  # claimed by its engine meanwhile, or of another user


def require_root_argument(root: Path | None) -> Path:
    """Return the root; fail as for a missing argument without one."""
    if root is None:
        raise typer.BadParameter("name a root, or give --memory", param_hint="ROOT")
    return root


def list_memory(root: Path | None, *, as_json: bool) -> NoReturn:
    """Show the kept host memory, and exit."""
    directory = root or SHARED_MEMORY
    finish(KeptMemory(str(directory), kept_files(directory), ()), _show, as_json=as_json, is_healthy=True)


def remove_memory(root: Path | None, *, dry_run: bool, as_json: bool) -> NoReturn:
    """Remove the kept host memory, and exit."""
    directory = root or SHARED_MEMORY
    found = kept_files(directory)
    failed = [str(one.path) for one in found if not (dry_run or remove_kept(one.path))]
    result = KeptMemory(str(directory), found, failed)
    finish(result, lambda it: _show_removed(it, dry_run), as_json=as_json, is_healthy=not failed)


def summary(kept: Sequence[KeptFile]) -> str:
    nbytes = Bytes(sum(one.bytes for one in kept))
    return f"{nbytes} of host memory kept for the next start of {number_of(len(kept), 'engine')}"


def _show(found: KeptMemory) -> None:
    rows = [
        (one.owner, Bytes(one.bytes), f"{max(0.0, one.until - time.time()):.0f} s", one.contents)
        for one in found.kept
    ]
    table(found.directory, ("engine", "bytes", "time left", "contents"), rows)


def _show_removed(found: KeptMemory, dry_run: bool) -> None:
    print_line(f"{summary(found.kept)}: {'would be removed' if dry_run else 'removed'}")
    for path in found.failed:
        print_line(f"{path} was not removed: its engine has it again, or it is another user's")
