"""Figures of a measurement, shown as tables and written as JSON.

A measurement returns records, which are frozen dataclasses: one, or a sequence of them. Records of one class
become the rows of one table, whose title is the class's docstring. Columns that no record has are left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_EDGE = 3  # spaces between two columns


def report(result: object, as_json: bool) -> None:
    """Print figures: tables, or JSON, ``{class name: [record, ...], ...}``."""
    if as_json:
        tables = _by_class(result).items()
        found = {name: [dataclasses.asdict(row) for row in rows] for name, rows in tables}
        print(json.dumps(found, indent=2, default=str))
    else:
        show(result, Console())


def show(result: object, console: Console) -> None:
    """Print one table for each class of record in ``result``."""
    for rows in _by_class(result).values():
        title = (type(rows[0]).__doc__ or "").strip().partition("\n")[0].rstrip(".")
        table = Table(title=title, title_justify="left")
        names = [field.name for field in dataclasses.fields(rows[0])]
        names = [name for name in names if any(getattr(row, name) is not None for row in rows)]
        needed = 1
        for name in names:
            title, cells = name.replace("_", " "), [_cell(getattr(row, name)) for row in rows]
            longest = max(len(word) for text in (title, *cells) for word in text.split())
            table.add_column(title, justify="right", min_width=longest)
            needed += longest + _EDGE
        for row in rows:
            table.add_row(*(_cell(getattr(row, name)) for name in names))
        # Each column fits its longest word, even beyond the console's width, so that no figure is truncated
        # or wrapped.
        console.width = max(console.width, needed)
        console.print(table, crop=False)


def _by_class(result: object) -> dict[str, list[DataclassInstance]]:
    tables: dict[str, list[DataclassInstance]] = {}
    for record in result if isinstance(result, Sequence) else [result]:
        assert dataclasses.is_dataclass(record)
        assert not isinstance(record, type)
        tables.setdefault(type(record).__name__, []).append(record)
    return tables


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
