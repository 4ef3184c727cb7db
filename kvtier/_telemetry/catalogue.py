"""The catalogue of metrics, read from ``catalogue.toml``: names, labels, help texts and reasons."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

from kvtier import _reasons as reasons


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Prometheus adds ``_total`` to a counter's name."""

    name: str
    documentation: str
    labels: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Possible values of the label ``reason`` and their meaning. For transfers a tier can add its own."""


_CATALOGUE: Final[Mapping[str, Any]] = tomllib.loads(
    (files("kvtier._telemetry") / "catalogue.toml").read_text(encoding="utf-8")
)


def _metrics(table: str) -> Mapping[str, Metric]:
    return {
        key: Metric(
            entry.get("name", key),
            entry["documentation"],
            tuple(entry.get("labels", "").split()),
            vars(reasons)[entry["reasons"]] if "reasons" in entry else {},
        )
        for key, entry in _CATALOGUE[table].items()
    }


COUNTERS: Final = _metrics("counters")
"""Counters, by the first element of the core's count keys."""

BYTES: Final = _metrics("bytes")
"""Counters of bytes, derived from the chunk count of this key."""

GAUGES: Final = _metrics("gauges")
"""Gauges, by name."""
