"""``kvtier schema``: every setting of the installation."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvtier import _schema as schema
from kvtier._cli.report import JsonFlag


def command(
    table: Annotated[
        bool, typer.Option("--table", help="Print Markdown tables instead of a JSON schema.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print all settings, installed tiers included, as a JSON schema or as tables.

    Example: kvtier schema > kvtier.schema.json
    """
    if table and as_json:
        raise typer.BadParameter("--table and --json exclude each other: give one of them, or none")
    typer.echo(schema.table() if table else json.dumps(schema.json_schema(), indent=2))
