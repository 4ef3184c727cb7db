"""``kvtier compare``: why two caches of a root share nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.report import print_line, table
from kvtier.errors import TierError
from kvtier.identity import ABSENT, Difference, differences
from kvtier.tiers.fs.root import Namespace, Root


@dataclass(frozen=True, slots=True)
class Differing:
    """A setting that two caches do not have in common.

    Attributes:
        setting: its name, from the outermost part inwards, joined by dots.
        one: its value in the first cache; None where it is not set, and so at its default.
        other: its value in the second one.
        is_set: whether it is set in the first and in the second.
    """

    setting: str
    one: object
    other: object
    is_set: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What tells two caches apart.

    Attributes:
        root: the directory.
        one: the name of the first cache.
        other: the name of the second.
        differing: what differs; empty for a cache and itself.
    """

    root: str
    one: str
    other: str
    differing: list[Differing]


def compare(path: Path, one: str, other: str) -> Comparison:
    """Return what differs in the manifests of two caches of a root.

    Raises:
        TierError: the root has no such cache, or a manifest cannot be read.
    """
    with Root(path) as root:
        known = {found.name: found for found in root.namespaces()}
        left, right = (_fields(path, known, name) for name in (one, other))
    differing = [_differing(found) for found in differences(left, right)]
    return Comparison(str(path), one, other, differing)


def _differing(found: Difference) -> Differing:
    is_set = (found.one is not ABSENT, found.other is not ABSENT)
    one, other = (None if value is ABSENT else value for value in (found.one, found.other))
    return Differing(found.path, one, other, is_set)


def _fields(path: Path, known: dict[str, Namespace], name: str) -> dict[str, object]:
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise TierError(f"{path} has no cache {name}; it has {names}")
    manifest = known[name].manifest
    if not manifest.fields:
        raise TierError(f"{path}: the manifest of {name} cannot be read: {manifest.problem}")
    return manifest.fields


def show(comparison: Comparison) -> None:
    """Print a comparison for people: a setting in a row."""
    if not comparison.differing:
        print_line("they are the same")
        return
    rows = [
        (found.setting, *(str(value) if there else "not set" for value, there in _values(found)))
        for found in comparison.differing
    ]
    table(comparison.root, ("setting", comparison.one, comparison.other), rows)


def _values(found: Differing) -> list[tuple[object, bool]]:
    return list(zip((found.one, found.other), found.is_set, strict=True))
