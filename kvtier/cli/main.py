"""The command ``kvtier``: tools for operators, and the commands that other distributions bring.

It works without torch and an engine.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import importlib_metadata
import typer
from rich.console import Console

from kvtier import schema
from kvtier.cli import doctor, extensions, new_tier, roots, signals, tiers
from kvtier.cli.report import JsonFlag
from kvtier.errors import KVTierError

app = typer.Typer(
    name="kvtier",
    cls=extensions.Commands,
    help="Keep the KV cache of an LLM engine in host memory and in slower, larger tiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; an error that a user can act on ends it in one line, with exit status 2."""
    try:
        with signals.exit_on_signals():
            app()
    except (KVTierError, OSError) as error:
        Console(stderr=True).print(
            f"kvtier: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {importlib_metadata.version('kvtier')}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def _schema(
    table: Annotated[
        bool, typer.Option("--table", help="Print Markdown tables instead of a JSON schema.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print every setting, those of the installed tiers included: as a JSON schema, or as tables."""
    if table and as_json:
        raise typer.BadParameter("--table and --json exclude each other: give one of them, or none")
    typer.echo(schema.table() if table else json.dumps(schema.json_schema(), indent=2))


app.command(name="tiers")(tiers.command)
app.command(name="doctor")(doctor.command)
app.command(name="new-tier")(new_tier.command)
app.command(name="schema")(_schema)
roots.add_to(app)
