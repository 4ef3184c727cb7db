"""The command ``kvtier``: runs the commands of distributions. It needs neither torch nor an engine.

A distribution registers commands by entry points in the group ``kvtier.commands``. Each names an application
of typer or a function, which becomes the command with the entry point's name:

    [project.entry-points."kvtier.commands"]
    bench = "kvtier_bench.commands:bench"

Only the command to run is imported; ``kvtier --help`` imports all. A command that cannot be imported is
listed with its error, and the others work.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any, Final

import importlib_metadata
import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_group

from kvtier import _plugins as plugins
from kvtier.errors import KVTierError

Command = Any
"""A command of click, or of the copy in newer versions of typer."""

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output instead of text.")
]
"""The option of every command."""

COMMANDS: Final = {
    "kvtier-bench": ("bench", "demo", "simulate"),
    "kvtier-testing": ("new-tier",),
    "kvtier-tools": ("compare", "doctor", "du", "explain", "gc", "hint", "ls", "schema", "size", "stat",
                     "tiers", "top", "verify"),
}  # fmt: skip
"""The commands of each of kvtier's own distributions."""

_DISTRIBUTIONS: Final = {name: distribution for distribution, names in COMMANDS.items() for name in names}
_FAILED: Final = 2


class Commands(TyperGroup):
    """The commands of all distributions; those that are not installed name the remedy."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names."""
        return sorted({*super().list_commands(ctx), *_installed(), *_DISTRIBUTIONS})

    def get_command(self, ctx: Any, cmd_name: str) -> Command:
        if cmd_name in _installed():
            return _load(cmd_name)
        if cmd_name in _DISTRIBUTIONS:
            remedy = plugins.install_command(_DISTRIBUTIONS[cmd_name])
            return _unusable(cmd_name, f"this command is not installed: {remedy}")
        return super().get_command(ctx, cmd_name)


def _installed() -> set[str]:
    return {entry.name for entry in plugins.installed(plugins.COMMANDS)}


def _load(name: str) -> Command:
    try:
        found = plugins.load_object(plugins.COMMANDS, name, "command")
        if isinstance(found, typer.Typer) or callable(found):
            return _as_command(name, found)
    except Exception as error:  # typer has its own errors for bad signatures
        return _unusable(name, str(error) if isinstance(error, KVTierError) else f"{name}: {error!r}")
    return _unusable(name, f"the command {name!r} is neither a Typer application nor a function: {found!r}")


def _as_command(name: str, found: object) -> Command:
    outer = typer.Typer(callback=lambda: None)  # with a callback it stays a group
    if isinstance(found, typer.Typer):
        outer.add_typer(found, name=name)
    else:
        outer.command(name=name)(found)  # type: ignore[type-var]
    return get_group(outer).commands[name]


def _unusable(name: str, problem: str) -> Command:
    """Return a command that fails with ``problem`` for all arguments, and shows it as its help."""

    def fail() -> None:
        raise KVTierError(problem)

    lenient = {"ignore_unknown_options": True, "allow_extra_args": True}
    outer = typer.Typer(callback=lambda: None)
    outer.command(name=name, help=escape(problem), context_settings=lenient, add_help_option=False)(fail)
    return get_group(outer).commands[name]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"kvtier {importlib_metadata.version('kvtier')}")
        raise typer.Exit


_VersionFlag = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]

app = typer.Typer(
    name="kvtier",
    cls=Commands,
    help="Tools for operators of kvtier, which keeps the KV cache of an LLM engine in host memory and larger "
    "tiers.",
    epilog="Exit status: 0 everything works; 1 a problem was found; 2 wrong use, or it cannot be done; "
    "128 and more ended by a signal.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _common(_version: _VersionFlag = False) -> None:
    pass


def main() -> None:
    """Run the command line. An error that the user can fix ends it with one line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character may be missing in the encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except (KVTierError, OSError) as error:
        _fail(str(error))
    except RecursionError:
        _fail("a file is nested too deeply to be read: check that it is the right one")
    except MemoryError:
        _fail("out of memory: run this where more is free")


def _fail(message: str) -> None:
    text = f"kvtier: {printable(message)}"
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(_FAILED)


def printable(text: str) -> str:
    """Return text with control characters escaped: in file names they could control the terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
