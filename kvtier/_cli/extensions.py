"""The commands of distributions: entry points in the group ``kvtier.commands``.

Each names a ``typer.Typer`` application or a function, which becomes the command with the entry point's name:

    [project.entry-points."kvtier.commands"]
    bench = "kvtier_bench.commands:bench"

Only the command to run is imported; ``kvtier --help`` imports all. A command that cannot be imported is
listed with its error, and the others work.
"""

from __future__ import annotations

from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_group

from kvtier import _plugins as plugins
from kvtier.errors import KVTierError

Command = Any
"""A command of click, or of the copy in newer versions of typer."""

COMMANDS = {
    "kvtier-bench": ("bench", "demo", "simulate"),
    "kvtier-testing": ("new-tier",),
    "kvtier-tools": ("compare", "doctor", "du", "explain", "gc", "hint", "ls", "schema", "size", "stat",
                     "tiers", "top", "verify"),
}  # fmt: skip
"""The commands of each of kvtier's own distributions."""
_DISTRIBUTIONS = {name: distribution for distribution, names in COMMANDS.items() for name in names}


class Commands(TyperGroup):
    """The commands of all distributions; those that are not installed name the remedy."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names."""
        return sorted({*super().list_commands(ctx), *_installed(), *_DISTRIBUTIONS})

    def get_command(self, ctx: Any, cmd_name: str) -> Command:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in _installed():
            command = _load(cmd_name)
        if command is None and cmd_name in _DISTRIBUTIONS:
            remedy = plugins.install_command(_DISTRIBUTIONS[cmd_name])
            return _unusable(cmd_name, f"this command is not installed: {remedy}")
        return command


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
