"""Tiers of other distributions: found without importing, loaded one at a time, refused with a clear error."""

from __future__ import annotations

import sys

import pytest

from kvtier import _plugins as plugins
from kvtier.errors import ConfigError, TierError
from kvtier.tiers import _registry as registry
from kvtier_testing.dummy import DummyTier

DUMMY = "from kvtier_testing.dummy import DummyConfig, DummyTier\n"


@pytest.fixture
def broken_neighbours(install_distribution):
    install_distribution("acme-broken", "import acme_missing_dependency", {"broken": "Tier"})
    install_distribution("acme-exits", "raise SystemExit(3)", {"exits": "Tier"})


def test_listing_imports_nothing(acme):
    (info,) = [info for info in registry.installed() if info.name == "acme"]
    assert plugins.origin(info) == "acme-tiers 1.2 (acme_tiers:Tier)"
    assert "acme_tiers" not in sys.modules


def test_loading_imports_one(acme, broken_neighbours):
    tier = registry.load("acme")
    assert issubclass(tier, DummyTier)
    assert tier.__module__ == "acme_tiers"
    assert "acme_broken" not in sys.modules


def test_unknown_type_lists_installed():
    with pytest.raises(
        ConfigError, match=r"^type = 'dumy': no such tier; installed are: .*dummy.*did you mean dummy\?"
    ):
        registry.load("dumy")


@pytest.mark.parametrize("config", ["None", "dict", "DummyConfig(type='x')"])
def test_missing_model_is_refused(install_distribution, config):
    install_distribution("acme-bare", f"{DUMMY}class Tier(DummyTier): Config = {config}", {"bare": "Tier"})
    with pytest.raises(TierError, match=r"acme-bare 1\.2.*Tier.Config is not a subclass of TierConfig"):
        registry.load("bare")


@pytest.mark.parametrize("setting", ["extra='ignore'", "extra='allow'", "frozen=False"])
def test_lenient_model_is_refused(install_distribution, setting):
    source = f"""
{DUMMY}
class Loose(DummyConfig, {setting}): pass
class Tier(DummyTier): Config = Loose
"""
    install_distribution("acme-loose", source, {"loose": "Tier"})
    with pytest.raises(TierError, match=r"acme-loose 1\.2.*Loose must keep extra=\"forbid\" and frozen=True"):
        registry.load("loose")


@pytest.mark.parametrize(
    "reasons", ["{'w' * 65: 'too long'}", "{'\\udce9': 'no text'}", "{7: 'no word'}", "['full']"]
)
def test_reasons_that_cannot_be_sent_are_refused(install_distribution, reasons):
    install_distribution(
        "acme-wordy", f"{DUMMY}class Tier(DummyTier): reasons = {reasons}", {"wordy": "Tier"}
    )
    with pytest.raises(TierError, match=r"acme-wordy 1\.2.*Tier.reasons must map words of up to 64"):
        registry.load("wordy")


@pytest.mark.parametrize("raw", [{}, {"type": 3}, {"root_dir": "/x"}])
def test_missing_type(raw):
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[1\]\.type is missing; installed are: .*dummy"):
        registry.validate(raw, "secondary_tiers[1]")


def refusal(**settings):
    with pytest.raises(ConfigError) as caught:
        registry.validate({"type": "acme", **settings}, "secondary_tiers[1]")
    # A log also shows the cause and the context: neither may contain the secret.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return str(caught.value)


def test_wrong_settings_are_named(acme):
    assert refusal(root_dirr="/x") == (
        "secondary_tiers[1].root_dir is missing (Where the files are); "
        "secondary_tiers[1].root_dirr is not a setting; did you mean root_dir?"
    )


def test_nested_setting_has_path(acme):
    message = refusal(root_dir="/x", logins=[{"token": "t", "usr": "me"}])
    assert message == "secondary_tiers[1].logins[0].usr is not a setting; did you mean user?"
