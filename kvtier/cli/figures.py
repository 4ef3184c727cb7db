"""Figures of a measurement, shown as tables and written as JSON.

A measurement returns records, which are frozen dataclasses: one, a sequence of them, or a tuple of such
sequences. Records of one class become the rows of one table, whose title is the class's docstring.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def show(result: object, console: Console) -> None:
    """Print one table for each class of record in ``result``."""
    for name, rows in _by_class(result).items():
        table = Table(title=_title(rows[0]) or name, title_justify="left")
        for field in dataclasses.fields(rows[0]):
            table.add_column(field.name, justify="right")
        for row in rows:
            table.add_row(*(_cell(getattr(row, field.name)) for field in dataclasses.fields(row)))
        console.print(table)


def write(result: object, path: Path) -> None:
    """Write ``{class name: [record, ...], ...}`` to ``path``."""
    tables = {name: [dataclasses.asdict(row) for row in rows] for name, rows in _by_class(result).items()}
    path.write_text(json.dumps(tables, indent=2, default=str) + "\n")


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


def _title(record: DataclassInstance) -> str:
    return (type(record).__doc__ or "").strip().partition("\n")[0].rstrip(".")


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
