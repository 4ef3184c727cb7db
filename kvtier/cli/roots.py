"""The commands for the root of a file tier: without an engine or torch, while engines use it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.cli import compare, gc, ls, stat, verify
from kvtier.cli.report import OK, PROBLEMS, JsonFlag, as_json
from kvtier.errors import TierError
from kvtier.quantities import duration, size
from kvtier.tiers.fs.quota import ledger
from kvtier.tiers.fs.root import Root

RootArgument = Annotated[Path, typer.Argument(metavar="ROOT", help="The root_dir of a file tier.")]
NamespaceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="This cache alone; `kvtier ls` has the names.")
]

_OF_FILE_SYSTEMS: Final = {"lost+found"}


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (_ls, _compare, _stat, _verify, _gc, _du):
        app.command(name=command.__name__.removeprefix("_"))(command)


def _ls(root: RootArgument, json: JsonFlag = False) -> None:
    """List the caches of a root: models, epochs, chunks, bytes, who uses them.

    Exit status 1 where a cache has a manifest that does not belong to it, its epoch is not readable, or
    directories cannot be read.
    """
    found = ls.listing(root)
    as_json(found) if json else ls.show(found)
    _end(not any(one.problem for one in found.namespaces))


def _compare(
    root: RootArgument,
    one: Annotated[str, typer.Argument(metavar="NAMESPACE", help="A name that `kvtier ls` has.")],
    other: Annotated[str, typer.Argument(metavar="NAMESPACE", help="Another one.")],
    json: JsonFlag = False,
) -> None:
    """Show why two caches share nothing: the settings of their engines that differ.

    Exit status 1 where any does.
    """
    found = compare.compare(root, one, other)
    as_json(found) if json else compare.show(found)
    _end(not found.differing)


def _stat(
    path: Annotated[Path, typer.Argument(metavar="ROOT|CHUNK", help="A root, or one chunk's file.")],
    json: JsonFlag = False,
) -> None:
    """Show a root in a few numbers, or all that can be said of one chunk's file.

    Exit status 1 where something is wrong with it, or nothing can be proven.
    """
    if path.is_dir():
        _require_root(path)
        state = stat.of_root(path)
        as_json(state) if json else stat.show_root(state)
        _end(not state.problems)
    chunk = stat.of_chunk(path)
    as_json(chunk) if json else stat.show_chunk(chunk)
    _end(chunk.finding == "sound")


def _verify(
    root: RootArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move ill files to the quarantine; remove what dead writers and old epochs left.",
        ),
    ] = False,
    namespace: NamespaceOption = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Files that are read at once.")] = min(
        4, os.cpu_count() or 1
    ),
    json: JsonFlag = False,
) -> None:
    """Read every chunk and prove it: trailer, identity, checksum.

    Exit status 1 where something is wrong that was not repaired.
    """
    _require_root(root)
    logging.getLogger("kvtier.tiers.fs").addHandler(logging.NullHandler())  # what is wrong is in the table
    found = verify.verify(root, repair=repair, threads=threads, namespace=namespace)
    as_json(found) if json else verify.show(found)
    _end(found.is_well)


def _gc(
    root: RootArgument,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Remove chunks until no more is left, such as 200GiB; else none."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Remove chunks not used for so long, such as 12h or 30d."),
    ] = None,
    namespace: NamespaceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what would be.")] = False,
    json: JsonFlag = False,
) -> None:
    """Remove what nobody can use any more, and what is too much or too old.

    Exit status 1 where more than --max-bytes is left, or something could not be removed or read.
    """
    _require_root(root)
    wish = gc.Wish(
        max_bytes=None if max_bytes is None else _size(max_bytes),
        older_than_s=None if older_than is None else _duration(older_than),
    )
    done = gc.collect(root, wish, namespace=namespace, dry_run=dry_run)
    as_json(done) if json else gc.show(done)
    _end(done.is_well)


def _du(root: RootArgument, json: JsonFlag = False) -> None:
    """Add up what the parts of a root take on disk.

    Exit status 1 where directories cannot be read, so that the sums are too small.
    """
    _require_root(root)
    taken = ls.usage(root)
    as_json(taken) if json else ls.show_usage(taken)
    _end(not taken.unreadable)


def _end(is_well: bool) -> None:
    raise typer.Exit(OK if is_well else PROBLEMS)


def _require_root(path: Path) -> None:
    """Refuse another directory than a root: nothing wrong would be found in it for ever.

    Raises:
        TierError: there are files, and no cache of kvtier's.
    """
    with Root(path) as root:
        if root.namespaces() or not set(root.others()) - _OF_FILE_SYSTEMS:
            return
    above = (one for one in path.absolute().parents if (one / ledger.FOLDER).is_dir())
    hint = f"; did you mean {root_above}?" if (root_above := next(above, None)) else ""
    raise TierError(f"{path} is no root_dir: it has files, and no cache of kvtier's{hint}")


def _size(text: str) -> int:
    try:
        return size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint="--max-bytes") from None


def _duration(text: str) -> float:
    try:
        return duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint="--older-than") from None
