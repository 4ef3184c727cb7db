"""The installed secondary tiers, and the validation of their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from importlib_metadata import EntryPoint

from kvtier import _plugins as plugins
from kvtier._core.messages import MAX_WORD
from kvtier._settings import validation
from kvtier.errors import ConfigError, TierError
from kvtier.tiers._adopted import ADOPTED, AdoptedConfig, AdoptedTier
from kvtier.tiers._base import SecondaryTier, TierConfig


def installed() -> list[EntryPoint]:
    """List the installed tiers by name, without importing any."""
    return plugins.installed(plugins.TIERS)


def load(name: str, field: str = "type") -> type[SecondaryTier[Any]]:
    """Import and check only the tier called ``name``, from setting ``field``. Raises as ``plugins.load``."""
    if name == ADOPTED:
        return AdoptedTier
    tier = plugins.load(plugins.TIERS, name, SecondaryTier, field)
    if problem := _problem(tier):
        origin = next(plugins.origin(entry) for entry in installed() if entry.name == name)
        raise TierError(f"the tier {name!r} of {origin} cannot be used: {problem}")
    return tier


def maker(config: TierConfig) -> Callable[[], SecondaryTier[Any]]:
    """Return a factory of tiers with these settings; it raises as ``plugins.make``. Raises as ``load``."""
    if isinstance(config, AdoptedConfig):
        return partial(AdoptedTier, config)
    return partial(plugins.make, plugins.TIERS, config.type, load(config.type), config)


def validate(
    raw: Mapping[str, object], where: str = "tier", places: Mapping[str, str] = MappingProxyType({})
) -> TierConfig:
    """Return an entry of ``secondary_tiers``, at path ``where``, as the settings of the tier it names.

    ConfigError names a wrong ``type`` or setting. TierError if the plug-in cannot be used. ``places`` says
    where settings belong that no tier has.
    """
    name = raw.get("type")
    if not isinstance(name, str):
        names = ", ".join(info.name for info in installed())
        raise ConfigError(f"{where}.type is missing; installed are: {names}")
    return validation.build(load(name, f"{where}.type").Config, raw, where, places)


def _problem(tier: type[SecondaryTier[Any]]) -> str:
    """Return why a tier cannot be used; "" if it can.

    Its settings model must accept no misspelled setting. The tier process must be able to send its reasons.
    """
    config = getattr(tier, "Config", None)
    if not (isinstance(config, type) and issubclass(config, TierConfig)):
        return f"{tier.__qualname__}.Config is not a subclass of TierConfig"
    if config.model_config.get("extra") != "forbid" or not config.model_config.get("frozen"):
        return f'{config.__qualname__} must keep extra="forbid" and frozen=True of TierConfig'
    reasons: object = tier.reasons
    if not isinstance(reasons, Mapping) or not all(map(_is_word, reasons)):
        return f"{tier.__qualname__}.reasons must map words of up to {MAX_WORD} characters to their meanings"
    return ""


def _is_word(word: object) -> bool:
    return isinstance(word, str) and 0 < len(word) <= MAX_WORD and word.isascii()
