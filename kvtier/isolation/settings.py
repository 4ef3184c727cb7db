"""A tier's settings as plain values that its own model reads again, secrets included."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr

from kvtier import plugins
from kvtier.errors import ConfigError, KVTierError
from kvtier.isolation.wire import TierSettings
from kvtier.tiers import registry
from kvtier.tiers.activity import NamedTier


def pack(named: NamedTier) -> TierSettings:
    """Spell the settings of a tier for another process.

    Raises:
        ConfigError: what the other process would make of them is not the same tier.
    """
    config = named.tier.config
    spelled = TierSettings(named.name, {**_plain(config), "type": config.type})
    problem = ""
    try:
        again = unpack(spelled).tier
        if type(again) is not type(named.tier):
            problem = f"type {config.type!r} does not name its class"
        elif again.config != config:
            problem = "its settings are others when they are read again"
    except KVTierError as error:
        problem = str(error)
    if problem:
        raise ConfigError(
            f"the tier {named.name} cannot run in another process: {problem}; set isolation to 'thread'"
        )
    return spelled


def unpack(spelled: TierSettings) -> NamedTier:
    """Make the tier that ``pack`` has spelled.

    Raises:
        KVTierError: it is not installed, or cannot be made.
    """
    config = registry.validate(spelled.settings)

    def make() -> Any:
        return plugins.make(plugins.TIERS, config.type, registry.load(config.type), config)

    return NamedTier(spelled.name, make(), make)


def _plain(value: Any) -> Any:
    """Return ``value`` in the types that a message can carry."""
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in sorted(value.model_fields_set)}
    if isinstance(value, SecretStr | SecretBytes):
        return value.get_secret_value()
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)  # of a class of its own, perhaps
    return str(value) if isinstance(value, str | PurePath) else value
