"""Plug-ins of other distributions: entry points, listed without importing and loaded one at a time.

A broken plug-in, or two that claim one name, must not harm an engine that uses neither. So a plug-in is
checked only when it is requested, and an error names its distribution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast

from importlib_metadata import EntryPoint, EntryPoints, entry_points
from pydantic import BaseModel

from kvtier._settings.validation import did_you_mean, hide
from kvtier.errors import ConfigError, KVTierError, TierError

BaseT = TypeVar("BaseT")


@dataclass(frozen=True, slots=True)
class Group:
    """A kind of plug-in."""

    name: str  # the group of its entry points
    noun: str  # the word for one of them in messages
    error: type[KVTierError]  # raised when a plug-in that is asked for cannot be used


TIERS = Group("kvtier.tiers", "tier", TierError)
POLICIES = Group("kvtier.policies", "eviction policy", ConfigError)
_OWN_TIERS = {"dummy": "testing"} | {name: name for name in ("mooncake", "nixl", "redis", "s3")}
COMMANDS = Group("kvtier.commands", "command", KVTierError)

IS_PUBLISHED = False
"""Whether kvtier's distributions are on a package index; else they are installed from a checkout."""


def requirement(distribution: str, extras: str = "") -> str:
    """Return the argument of ``pip install``, in a shell, for one of kvtier's own distributions."""
    place = distribution if IS_PUBLISHED else "." if distribution == "kvtier" else f"./plugins/{distribution}"
    return f"'{place}[{extras}]'" if extras else place


def install_command(distribution: str, extras: str = "") -> str:
    """Return how to install one of kvtier's own distributions, for messages."""
    where = "" if IS_PUBLISHED else " in a checkout of kvtier"
    return f"pip install {requirement(distribution, extras)}{where}"


def installed(group: Group) -> list[EntryPoint]:
    """Return the plug-ins of ``group``, sorted by name. A name that two distributions claim appears twice."""
    return sorted(_entries(group), key=lambda entry: entry.name)


def _entries(group: Group) -> EntryPoints:
    return _entries_of(tuple(sys.path)).select(group=group.name)


@lru_cache(maxsize=1)
def _entries_of(path: tuple[str, ...]) -> EntryPoints:  # noqa: ARG001 - the key
    """Return all entry points. Reading the metadata of 200 distributions takes 30 ms of an engine's start."""
    return entry_points()


def distribution_of(plugin: EntryPoint) -> tuple[str, str]:
    """Return the name and the version of a plug-in's distribution."""
    return (plugin.dist.name, plugin.dist.version) if plugin.dist else ("an unknown distribution", "?")


def origin(plugin: EntryPoint) -> str:
    """Return a plug-in's distribution, version and target in one line, for messages."""
    return f"{' '.join(distribution_of(plugin))} ({plugin.value})"


def require(group: Group, name: str, field: str) -> list[EntryPoint]:
    """Return the entry points of this name, usually one, without importing them.

    ConfigError if there is none; it names ``field``, the installed plug-ins and the nearest name.
    """
    found = _entries(group)
    if name not in found.names:
        listed = ", ".join(sorted(found.names)) or "none"
        hint = did_you_mean(name, found.names) or "; install the distribution that brings it"
        if group is TIERS and name in _OWN_TIERS:
            hint = f": {install_command(f'kvtier-{_OWN_TIERS[name]}')}"
        raise ConfigError(f"{field} = {name!r}: no such {group.noun}; installed are: {listed}{hint}")
    return list(found.select(name=name))


def load(group: Group, name: str, base: type[BaseT], field: str) -> type[BaseT]:
    """Import one plug-in, and no other, and check that it is a complete subclass of ``base``.

    ConfigError as ``require``. The group's own error, which names the distribution, if two distributions
    claim the name, the import failed, or its entry point is no such class.
    """
    plugin = load_object(group, name, field)
    if problem := _shape_problem(plugin, base):
        raise group.error(f"{_title(group, name)} cannot be used: {problem}")
    return cast("type[BaseT]", plugin)


def load_object(group: Group, name: str, field: str) -> object:
    """Import the object of one plug-in, and no other plug-in. Raises as ``load`` does; checks no class."""
    entry, *others = require(group, name, field)
    if others:
        what = f"the name is claimed {1 + len(others)} times; uninstall all but one of them"
        raise group.error(f"{_title(group, name)}: {what}")
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # a plug-in's import may raise anything
        text = f"cannot be imported: {type(error).__name__}: {error}"
        raise group.error(f"{_title(group, name)} {text}") from error


def make(group: Group, name: str, plugin: Callable[..., BaseT], *arguments: object) -> BaseT:
    """Make an instance of a loaded plug-in. If that fails, the group's error names the distribution."""
    try:
        return plugin(*arguments)
    except Exception as error:  # a plug-in may raise anything
        said = shown = f"{type(error).__name__}: {error}"
        cause: Exception | None = error
    for settings in arguments:
        shown = hide(shown, settings) if isinstance(settings, BaseModel) else shown
    # A chained error would be printed with the secrets hidden here.
    raise group.error(f"{_title(group, name)} cannot be constructed: {shown}") from (
        cause if shown == said else None
    )


def _title(group: Group, name: str) -> str:
    origins = " and ".join(origin(entry) for entry in installed(group) if entry.name == name)
    return f"the {group.noun} {name!r} of {origins}"


def _shape_problem(plugin: object, base: type) -> str:
    if not (isinstance(plugin, type) and issubclass(plugin, base)):
        return f"{plugin!r} is not a subclass of {base.__name__}"
    missing = ", ".join(sorted(getattr(plugin, "__abstractmethods__", ())))
    return f"{plugin.__qualname__} does not define {missing}" if missing else ""
