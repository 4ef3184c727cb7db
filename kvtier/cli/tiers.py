"""``kvtier tiers``: the installed tiers and eviction policies."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier import plugins
from kvtier.core.policies.base import EvictionPolicy
from kvtier.errors import KVTierError
from kvtier.plugins import Group
from kvtier.tiers import registry
from kvtier.tiers.base import SecondaryTier


def command() -> None:
    """List the installed tiers and eviction policies, and whether each one loads."""
    console = Console()
    console.print(_plugin_table(plugins.TIERS, "Tiers", SecondaryTier))
    console.print(_plugin_table(plugins.POLICIES, "Eviction policies", EvictionPolicy))


def _plugin_table(group: Group, title: str, base: type) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("name", "distribution", "version", "loads"):
        table.add_column(column, overflow="fold")
    for info in plugins.installed(group):
        cells = (info.name, info.distribution, info.version, _loads(group, info.name, base))
        table.add_row(*map(Text, cells))  # as text: what another distribution says is no markup
    return table


def _loads(group: Group, name: str, base: type) -> str:
    try:
        registry.load(name) if group is plugins.TIERS else plugins.load(group, name, base, "name")
    except KVTierError as error:
        return f"no: {error}"
    return "yes"
