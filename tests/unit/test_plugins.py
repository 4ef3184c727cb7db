"""Eviction policies of other distributions, and their errors, whose wording matches that of tiers."""

from __future__ import annotations

import pytest

from kvtier import TieringConfig
from kvtier import _plugins as plugins
from kvtier._build import make_core, make_tiers
from kvtier._plugins import POLICIES
from kvtier.errors import ConfigError, TierError
from kvtier.policies import LRU, EvictionPolicy

LRU_IMPORT = "from kvtier.policies._lru import LRU\n"


@pytest.fixture
def install_policy(install_distribution):
    """Install a distribution whose entry point ``name`` names ``Policy`` of the given source."""

    def install(name: str, source: str, distribution: str = "") -> None:
        install_distribution(
            distribution or f"acme-{name}", source, {name: "Policy"}, group="kvtier.policies"
        )

    return install


def load(name: str) -> type[EvictionPolicy]:
    return plugins.load(POLICIES, name, EvictionPolicy, "eviction_policy")


def test_policy_is_used_by_name(install_policy):
    install_policy("mine", f"{LRU_IMPORT}class Policy(LRU): pass")
    config = TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", "eviction_policy": "mine"})
    assert type(make_core(config, 4096).table.orders[1]).__name__ == "Policy"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import acme_missing", r"acme-bad 1\.2 .*cannot be imported: ModuleNotFoundError.*acme_missing"),
        ("raise SystemExit(3)", r"acme-bad 1\.2 .*cannot be imported: SystemExit: 3"),
        ("", r"acme-bad 1\.2 .*cannot be imported: AttributeError"),
        ("class Policy: pass", r"acme-bad 1\.2 .*is not a subclass of EvictionPolicy"),
        (
            "from kvtier.policies._base import EvictionPolicy\nclass Policy(EvictionPolicy): pass",
            r"acme-bad 1\.2 .*Policy does not define __contains__, __len__, add, clear, evict, pin",
        ),
    ],
    ids=["needs what is missing", "exits", "has no such name", "is no policy", "is not complete"],
)
def test_broken_policy_is_named(install_policy, source, words):
    install_policy("bad", source)
    with pytest.raises(ConfigError, match=words):
        load("bad")
    assert load("lru") is LRU
    assert {"arc", "bad", "lru"} <= {info.name for info in plugins.installed(POLICIES)}


def test_doubled_name_names_both(install_policy):
    install_policy("mine", f"{LRU_IMPORT}class Policy(LRU): pass")
    install_policy("mine", f"{LRU_IMPORT}class Policy(LRU): pass", "acme-rival")
    with pytest.raises(
        ConfigError, match=r"(?=.*acme-mine 1\.2)(?=.*acme-rival 1\.2).*uninstall all but one"
    ):
        load("mine")
    assert load("lru") is LRU


def test_unmakable_policy_is_named(install_policy):
    install_policy("bad", f"{LRU_IMPORT}class Policy(LRU):\n def __init__(self, ghosts): pass")
    config = TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", "eviction_policy": "bad"})
    with pytest.raises(
        ConfigError,
        match=r"eviction policy 'bad' of acme-bad 1\.2 .*cannot be constructed: TypeError.*ghosts",
    ):
        make_core(config, 4096)


def test_unmakable_tier_is_named(install_distribution):
    source = """
from kvtier_testing.dummy import DummyTier
class Tier(DummyTier):
    def __init__(self, config): raise OSError("no tape in the drive")
"""
    install_distribution("acme-tape", source, {"tape": "Tier"})
    config = TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [{"type": "tape"}]})
    with pytest.raises(
        TierError, match=r"tier 'tape' of acme-tape 1\.2 .*cannot be constructed: OSError: no tape"
    ):
        make_tiers(config)
