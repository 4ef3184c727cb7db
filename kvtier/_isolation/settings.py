"""A tier's settings as plain values that its own model reads again, secrets included."""

from __future__ import annotations

from kvtier._isolation import wire
from kvtier._isolation.wire import TierSettings
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers import _registry as registry
from kvtier.tiers._activity import NamedTier


def pack(named: NamedTier) -> TierSettings:
    """Return the settings of a tier for the tier process.

    Raises ConfigError if the process could not build the same tier from them.
    """
    try:
        packed = TierSettings(named.name, {**wire.plain(named.tier.config), "type": named.tier.config.type})
        if not (problem := _mismatch(named, unpack(packed))):
            return packed
    except (KVTierError, NotImplementedError, OverflowError, TypeError) as error:
        problem = str(error)
    raise ConfigError(f"tier {named.name} cannot run in a tier process: {problem}; set isolation to 'thread'")


def _mismatch(named: NamedTier, again: NamedTier) -> str:
    config = named.tier.config
    if type(again.tier) is not type(named.tier):
        return f"type {config.type!r} does not name its class"
    return "" if again.tier.config == config else "its settings differ when they are read again"


def unpack(packed: TierSettings) -> NamedTier:
    """Make the tier that ``pack`` was given, or raise KVTierError."""
    make = registry.maker(registry.validate(packed.settings))
    return NamedTier(packed.name, make(), make)
