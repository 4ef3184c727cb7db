"""Figures of a measurement, shown as tables and written as JSON.

A measurement returns records, which are frozen dataclasses: one, a sequence of them, or a tuple of such
sequences. Records of one class become the rows of one table, whose title is the class's docstring; where
that is wider than the console, its columns. What none of them has is left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Line = tuple[str, ...]

_EDGE = 3  # characters between two columns


def show(result: object, console: Console) -> None:
    """Print one table for each class of record in ``result``."""
    for name, rows in _by_class(result).items():
        title = _title(rows[0]) or name
        lines = list(zip(*_columns(rows), strict=True))
        if _width(lines) <= console.width:
            console.print(_table(title, lines))
            continue
        for part in _parts(lines, console.width):
            console.print(_table(title, list(zip(*part, strict=True))))


def as_json(result: object) -> str:
    """Return ``{class name: [record, ...], ...}``."""
    tables = {name: [dataclasses.asdict(row) for row in rows] for name, rows in _by_class(result).items()}
    return json.dumps(tables, indent=2, default=str)


def _by_class(result: object) -> dict[str, list[DataclassInstance]]:
    tables: dict[str, list[DataclassInstance]] = {}
    for record in _records(result):
        tables.setdefault(type(record).__name__, []).append(record)
    return tables


def _records(result: object) -> Iterator[DataclassInstance]:
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        yield result
    elif isinstance(result, list | tuple):
        for item in result:
            yield from _records(item)
    else:
        raise TypeError(f"a measurement returns records, not {type(result).__name__}")


def _columns(rows: Sequence[DataclassInstance]) -> list[list[str]]:
    """Return the cells of each field, its name above them."""
    names = [field.name for field in dataclasses.fields(rows[0])]
    columns = {name: [getattr(row, name) for row in rows] for name in names}
    had = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    return [[name, *map(_cell, values)] for name, values in had.items()]


def _parts(lines: Sequence[Line], width: int) -> Iterator[list[Line]]:
    """Share out lines so that each part is no wider when lines become columns; all have the first line."""
    head, *left = lines
    while left:
        count = len(left)
        while count > 1 and _width(list(zip(head, *left[:count], strict=True))) > width:
            count -= 1
        yield [head, *left[:count]]
        del left[:count]


def _width(lines: Sequence[Line]) -> int:
    """Return how wide a table is at least: text goes on in the next line, but no word and no figure does."""
    return sum(_longest_word(column) + _EDGE for column in zip(*lines, strict=True)) + 1


def _longest_word(column: Sequence[str]) -> int:
    return max((len(word) for cell in column for word in cell.split()), default=0)


def _table(title: str, lines: Sequence[Line]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in zip(*lines, strict=True):
        is_text = any(" " in cell for cell in column)  # which may be narrower than it is
        table.add_column(column[0], justify="right", no_wrap=not is_text)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _title(record: DataclassInstance) -> str:
    return (type(record).__doc__ or "").strip().partition("\n")[0].rstrip(".")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
