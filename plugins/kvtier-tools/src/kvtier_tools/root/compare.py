"""``kvtier compare``: the settings that keep two caches apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvtier._cli import JsonFlag
from kvtier._identity import Difference, differences
from kvtier.errors import TierError
from kvtier_tools.report import finish, print_line, table
from kvtier_tools.root.contents import RootView
from kvtier_tools.root.roots import RootArgument


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two caches."""

    root: str
    one: str
    other: str
    differing: list[Difference]


def command(
    root: RootArgument,
    one: Annotated[str, typer.Argument(metavar="NAMESPACE", help="A cache, as `kvtier ls` lists it.")],
    other: Annotated[str, typer.Argument(metavar="NAMESPACE", help="Another cache.")],
    as_json: JsonFlag = False,
) -> None:
    """Show the settings that differ between the engines of two caches.

    Exit status 1 if there are any.

    Example: kvtier compare /var/cache/kvtier Llama-3.1-8B_0d4f1a6b2c3e5f70 Llama-3.1-8B_9a8b7c6d5e4f3021
    """
    with RootView(root) as opened:
        left, right = (_fields(opened, name) for name in (one, other))
    differing = differences(left, right)
    found = Comparison(str(root), one, other, differing)
    finish(found, _show, as_json=as_json, is_healthy=not differing)


def _fields(root: RootView, name: str) -> dict[str, object]:
    manifest = root.namespace(name).manifest
    if not manifest.fields:
        raise TierError(f"{root.path}: the manifest of {name} cannot be read: {manifest.problem}")
    return manifest.fields


def _show(comparison: Comparison) -> None:
    if not comparison.differing:
        print_line("no differences")
        return
    rows = []
    for found in comparison.differing:
        values = zip((found.one, found.other), found.is_set, strict=True)
        rows.append((found.setting, *(str(value) if is_set else "not set" for value, is_set in values)))
    table(comparison.root, ("setting", comparison.one, comparison.other), rows)
