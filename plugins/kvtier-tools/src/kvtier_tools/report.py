"""The output of the commands: tables for people, JSON for programs, progress on standard error."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import typer
from pydantic import ByteSize
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

from kvtier._cli import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
Tick = Callable[[int], None]
"""Called with the number of files read since the last call."""

OK: Final = 0
PROBLEMS: Final = 1  # exit status if a problem was found; ``kvtier --help`` lists all

LINE_EVERY_S: Final = 10.0
_UNBOUNDED_WIDTH: Final = 10_000


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Tick]:
    """Show the progress of long work on standard error: on a terminal a bar, else a line every 10 seconds.

    Threads update it, even while the count stands still. ``what`` names the unit, such as "files".
    """
    shown, ended, began_s = console(stderr=True), threading.Event(), time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=shown, transient=True)
    bar.add_task(what, total=total)
    (task,) = bar.tasks
    of_all = "" if total is None else f" of {total:,}"

    def tick(count: int) -> None:
        task.completed += count  # not through the bar: that is slower than reading a file's status

    def write_lines() -> None:
        while not ended.wait(LINE_EVERY_S):
            line = f"kvtier: {task.completed:,}{of_all} {what}, {time.monotonic() - began_s:.0f} s"
            with suppress(OSError):  # its reader is gone
                typer.echo(line, err=True)

    writer = threading.Thread(target=write_lines, daemon=True)
    with bar if shown.is_terminal else nullcontext():
        if not shown.is_terminal:
            writer.start()
        try:
            yield tick
        finally:
            ended.set()
            if writer.ident is not None:
                writer.join()


def finish(record: R, show: Callable[[R], None], *, as_json: bool, is_healthy: bool) -> NoReturn:
    """Print a command's result, as one JSON document or with ``show``, and exit with its status."""
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(record), indent=2, default=str))
    else:
        show(record)
    raise typer.Exit(OK if is_healthy else PROBLEMS)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print_line(title)
    console().print(grid(columns, rows))


def grid(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table with numbers aligned right. The first column never wraps."""
    cells = [list(row) for row in rows]
    shown = Table()
    for number, column in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[number], int | float | None) for row in cells)
        side: JustifyMethod = "right" if numeric else "left"
        shown.add_column(Text(printable(column)), justify=side, overflow="fold", no_wrap=not number)
    for row in cells:
        shown.add_row(*(Text(_cell(value)) for value in row))  # as text: file names are not markup
    return shown


def console(*, stderr: bool = False) -> Console:
    """Return a console. Off a terminal its lines never wrap, unless COLUMNS is set."""
    made = Console(stderr=stderr)
    is_unknown = not made.is_terminal and not os.environ.get("COLUMNS")
    if is_unknown or not made.width:  # terminals without a size report 0
        made.width = _UNBOUNDED_WIDTH
    return made


def print_line(text: str) -> None:
    console().print(Text(printable(text)), soft_wrap=True)


class Bytes(int):
    """A number of bytes, shown with its unit."""

    def __str__(self) -> str:
        return ByteSize(self).human_readable(separator=" ")


class Share(float):
    """A share of a whole, shown in percent."""

    def __str__(self) -> str:
        return f"{100 * self:.1f} %"


def number_of(count: int, noun: str) -> str:
    """Return a number with its noun, whose plural ends in s."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def ago(when: float | None) -> str:
    if when is None:
        return "never"
    seconds = max(0.0, time.time() - when)
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def yes_no(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return yes_no(value)
    if type(value) is int:
        return f"{value:,}"
    if type(value) is float:
        return f"{value:.2f}"
    if isinstance(value, list | tuple):
        return printable(", ".join(map(str, value))) or "-"
    return printable(str(value))
