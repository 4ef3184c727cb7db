"""A tier's settings as plain values that its own model reads again, secrets included."""

from __future__ import annotations

from typing import Any

from kvtier import plugins
from kvtier.errors import ConfigError, KVTierError
from kvtier.isolation import wire
from kvtier.isolation.wire import TierSettings
from kvtier.tiers import registry
from kvtier.tiers.activity import NamedTier


def pack(named: NamedTier) -> TierSettings:
    """Return the settings of a tier for the tier process.

    Raises:
        ConfigError: the tier process would not make the same tier of them.
    """
    config = named.tier.config
    problem = ""
    try:
        packed = TierSettings(named.name, {**wire.plain(config), "type": config.type})
        again = unpack(packed).tier
        if type(again) is not type(named.tier):
            problem = f"type {config.type!r} does not name its class"
        elif again.config != config:
            problem = "its settings differ when they are read again"
    except (KVTierError, NotImplementedError, OverflowError, TypeError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(
            f"tier {named.name} cannot run in a tier process: {problem}; set isolation to 'thread'"
        )
    return packed


def unpack(packed: TierSettings) -> NamedTier:
    """Make the tier that ``pack`` was given.

    Raises:
        KVTierError: it is not installed, or cannot be made.
    """
    config = registry.validate(packed.settings)

    def make() -> Any:
        return plugins.make(plugins.TIERS, config.type, registry.load(config.type), config)

    return NamedTier(packed.name, make(), make)
