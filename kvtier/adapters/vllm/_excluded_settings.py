"""The reviewed list of settings that cannot change the bytes of a chunk: ``excluded_settings.toml``.

Any other setting is part of the cache's identity (``_canonical``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

_REVIEWED: Final[Mapping[str, Any]] = tomllib.loads(
    (files("kvtier.adapters.vllm") / "excluded_settings.toml").read_text(encoding="utf-8")
)


def _reasons(table: str) -> Mapping[str, str]:
    return {name: entry["reason"] for entry in _REVIEWED[table] for name in entry["names"].split()}


SETTINGS: Final = _reasons("settings")
"""Fields of vLLM's configurations, each with the reason why it cannot change the bytes of a chunk."""

ENVIRONMENT: Final = _reasons("environment")
"""Environment variables of vLLM, likewise."""

LENGTH_SETTINGS: Final = _reasons("length_settings")
"""Fields that count only for the models that compute with them: see ``computes_with_length``."""

LENGTH_INDEPENDENT_ROPES: Final = frozenset(_REVIEWED["models"]["length_independent_ropes"].split())
"""Kinds of rotary embedding whose angles do not depend on ``max_model_len``."""

LENGTH_DEPENDENT_MODELS: Final = tuple(_REVIEWED["models"]["length_dependent"].split())
"""Architectures, as patterns, that compute with ``max_model_len`` or with the generation config."""

SAME_MODELS: Final = frozenset(_REVIEWED["models"]["same_in_reviewed_releases"].split())
"""Architectures whose code computes the same KV in all releases of a KV format generation."""

SAME_BACKENDS: Final = frozenset(_REVIEWED["backends"]["same_in_reviewed_releases"].split())
"""Attention backends, likewise: those whose code arranges the bytes of a page alike."""
