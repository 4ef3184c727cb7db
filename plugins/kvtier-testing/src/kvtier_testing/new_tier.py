"""``kvtier new-tier``: a distribution with a working tier, to change into your own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from kvtier import _plugins as plugins
from kvtier._cli import JsonFlag
from kvtier.errors import ConfigError
from kvtier.tiers import _registry as registry

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PREFIX = "kvtier-"


class Template(StrEnum):
    """The examples to start from: one SQLite file, or a file per chunk through aiofiles."""

    SHELF = "shelf"
    FILES = "files"


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tier's type in configurations.")],
    directory: Annotated[Path, typer.Option(help="Directory in which to create kvtier-NAME.")] = Path(),
    template: Annotated[
        Template, typer.Option("--from", help="The tier to copy: one SQLite file, or a file per chunk.")
    ] = Template.SHELF,
    as_json: JsonFlag = False,
) -> None:
    """Create a distribution with a working tier and its tests, to change into your own.

    Example: kvtier new-tier shelf --directory ~/src
    """
    folder = create(name, directory, template)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder)}))
        return
    typer.echo(f"made {folder}; next: pip install -e '{folder}[tests]' && pytest {folder}")


def create(name: str, directory: Path, template: Template = Template.SHELF) -> Path:
    """Write the distribution ``kvtier-<name>`` into a folder of that name.

    Args:
        name: the tier's type in configurations: lower-case letters and digits, in words joined by ``-``.
        directory: parent of the new folder.
        template: the example to copy.

    Returns:
        The folder.

    Raises:
        ConfigError: the name does not suit a distribution and a module, a tier of this name is
            installed, or the folder cannot be created. Existing files are never overwritten.
    """
    _require_name(name)
    folder = directory / f"{_PREFIX}{name}"
    try:
        folder.mkdir(parents=True)
        for path, text in _files(files("kvtier_testing") / "templates" / template, PurePosixPath()):
            target = folder / _renamed(str(path), template, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_renamed(text, template, name), encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{folder} is there already, and is left as it is: give another name") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}") from error
    return folder


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        hint = f"; try {better}" if _NAME.fullmatch(better) else ""
        raise ConfigError(
            f"NAME = {name!r}: a tier's name has lower-case letters and digits, in words joined by '-', "
            f"and begins with a letter{hint}"
        )
    if name.startswith(_PREFIX):
        raise ConfigError(
            f"NAME = {name!r}: {_PREFIX} is put in front anyway; try {name.removeprefix(_PREFIX)}"
        )
    for entry in registry.installed():
        if entry.name == name:
            raise ConfigError(f"NAME = {name!r}: the tier of this name is that of {plugins.origin(entry)}")


def _files(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.startswith(("__", ".")):
            yield from _files(entry, path / entry.name)
        elif entry.is_file():
            yield path / entry.name, entry.read_text(encoding="utf-8")


def _renamed(text: str, template: Template, name: str) -> str:
    """Replace the example's name by ``name``, in the spelling that each place needs."""

    def spelled(match: re.Match[str]) -> str:
        if match[1]:
            return match[1] + name.replace("-", "_")
        return name if match[0].islower() else "".join(map(str.capitalize, name.split("-")))

    pattern = rf"(kvtier_|test_){template}|{template.capitalize()}|\b{template}\b"
    return re.sub(pattern, spelled, text)
