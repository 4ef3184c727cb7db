"""What the tools for roots have in common: tables for people, JSON for programs, progress on a terminal."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from kvtier.tiers.fs.root import Tick, no_tick

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OK: Final = 0
PROBLEMS: Final = 1
"""Exit status where something is wrong with the data; 2 is a wrong use or what cannot be done at all."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_EVERY_S: Final = 0.1
_WIDE: Final = 130


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Tick]:
    """Show on standard error how far long work is; nothing where that is no terminal.

    Args:
        what: what is counted, such as ``"files"``.
        total: how many there are, where that is known.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield no_tick
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        counted, told_at = 0, 0.0

        def tick(count: int) -> None:
            nonlocal counted, told_at
            counted += count
            if (now := time.monotonic()) - told_at >= _EVERY_S:
                bar.update(task, completed=counted)
                told_at = now

        yield tick


def as_json(record: DataclassInstance) -> None:
    """Print a record on standard output as one JSON document, with the fields' names as keys."""
    typer.echo(json.dumps(dataclasses.asdict(record), indent=2, default=str))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; numbers stand on the right. The first column is never broken."""
    cells = [list(row) for row in rows]
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[number], int | Bytes | None) for row in cells)
        side: JustifyMethod = "right" if numeric else "left"
        shown.add_column(column, justify=side, overflow="fold", no_wrap=not number)
    for row in cells:
        shown.add_row(*(Text(_cell(value)) for value in row))  # as text: names of files are no markup
    Console().print(shown)


def is_wide() -> bool:
    """Return whether there is room for a table of many columns."""
    return Console().width >= _WIDE


def say(text: str) -> None:
    """Print a line on standard output."""
    Console().print(Text(printable(text)), soft_wrap=True)


def printable(text: str) -> str:
    """Spell out what is no text: names of files that others have made may command a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


class Bytes(int):
    """A number of bytes, shown with its unit."""

    def __str__(self) -> str:
        """Return it in the largest unit that leaves a digit before the point."""
        value, unit = float(self), 0
        while abs(value) >= 1024 and unit < len(_UNITS) - 1:
            value, unit = value / 1024, unit + 1
        return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def ago(when: float | None, now: float | None = None) -> str:
    """Return how long ago a time was, in words."""
    if when is None:
        return "never"
    seconds = max(0.0, (time.time() if now is None else now) - when)
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def yes(value: bool | None) -> str:
    """Return yes, no, or unknown."""
    return "unknown" if value is None else "yes" if value else "no"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return yes(value)
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return printable(", ".join(map(str, value))) or "-"
    return printable(str(value))
