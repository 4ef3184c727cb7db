"""``kvtier tiers`` and ``kvtier schema``: the installed tiers and eviction policies, and all settings."""

from __future__ import annotations

import json
from dataclasses import dataclass

import typer

from kvtier import _plugins as plugins
from kvtier._cli import JsonFlag
from kvtier._plugins import Group
from kvtier.errors import KVTierError
from kvtier.policies._base import EvictionPolicy
from kvtier.tiers import _registry as registry
from kvtier_tools import report
from kvtier_tools.schema import json_schema


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed tier or policy."""

    name: str
    distribution: str
    version: str
    problem: str  # why it cannot be loaded; "" if it can


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed plug-ins."""

    tiers: list[Plugin]
    policies: list[Plugin]


def command(as_json: JsonFlag = False) -> None:
    """List installed tiers and eviction policies, and check that each loads.

    Exit status 1 if one does not.

    Example: kvtier tiers --json
    """
    found = Installed(_listed(plugins.TIERS), _listed(plugins.POLICIES))
    is_healthy = not any(plugin.problem for plugin in (*found.tiers, *found.policies))
    report.finish(found, _show, as_json=as_json, is_healthy=is_healthy)


def schema_command(as_json: JsonFlag = False) -> None:  # noqa: ARG001 (every command has it)
    """Print all settings, installed tiers included, as a JSON schema.

    Example: kvtier schema > kvtier.schema.json
    """
    typer.echo(json.dumps(json_schema(), indent=2))


def _show(found: Installed) -> None:
    for title, listed in (("Tiers", found.tiers), ("Eviction policies", found.policies)):
        rows = [
            (one.name, one.distribution, one.version, f"no: {one.problem}" if one.problem else "yes")
            for one in listed
        ]
        report.table(title, ("name", "distribution", "version", "loads"), rows)


def _listed(group: Group) -> list[Plugin]:
    return [
        Plugin(entry.name, *plugins.distribution_of(entry), _problem(group, entry.name))
        for entry in plugins.installed(group)
    ]


def _problem(group: Group, name: str) -> str:
    try:
        if group is plugins.TIERS:
            registry.load(name)
        else:
            plugins.load(group, name, EvictionPolicy, "name")
    except KVTierError as error:
        return str(error)
    return ""
