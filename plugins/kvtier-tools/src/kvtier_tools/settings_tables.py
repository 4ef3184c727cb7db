"""Markdown tables of settings, for the pages of kvtier and the READMEs of tiers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic import ByteSize, TypeAdapter

from kvtier._settings.quantities import SIZE_PATTERN
from kvtier.tiers import TierConfig
from kvtier_tools.schema import Schema, json_schema

_BYTE_SIZE = TypeAdapter(ByteSize).json_schema()["anyOf"][0]["pattern"]  # other distributions have it
_SIZES = (SIZE_PATTERN, _BYTE_SIZE)


def tables() -> dict[str, str]:
    """Return a table of kvtier's own settings, under "", and one for each installed tier."""
    schema = json_schema()
    tiers = schema["properties"]["secondary_tiers"]["items"]["discriminator"]["mapping"]
    return {"": _table(schema), **{name: _table(schema["$defs"][f"tier-{name}"]) for name in sorted(tiers)}}


def own_table(kind: str) -> str:
    """Return a Markdown table of one tier's settings, without those that every tier has."""
    definition = json_schema()["$defs"][f"tier-{kind}"]
    own = {
        name: field for name, field in definition["properties"].items() if name not in TierConfig.model_fields
    }
    return _table({**definition, "properties": own})


def _table(schema: Schema) -> str:
    required = set(schema.get("required", ()))
    lines = ["| Setting | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        default = "required" if name in required else _default(field)
        meaning = field.get("description", "").replace("|", "\\|")
        lines.append(f"| `{name}` | {' or '.join(dict.fromkeys(_types(field)))} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _types(field: Schema) -> Iterator[str]:
    if any(option.get("pattern") in _SIZES for option in field.get("anyOf", ())):
        yield "size"
    elif "$ref" in field:
        yield "object"
    elif "enum" in field:
        yield from (f"`{value}`" for value in field["enum"])
    elif options := field.get("anyOf"):
        for option in options:
            yield from (kind for kind in _types(option) if kind != "null")
    else:
        yield field.get("type", "any")


def _default(field: Schema) -> str:
    value = field.get("default")
    if value is None:
        return "none"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"
