"""Every setting of the installation, as a JSON schema and as a table to read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ByteSize, TypeAdapter

from kvtier._config import TieringConfig
from kvtier._settings.quantities import SIZE_PATTERN
from kvtier.errors import KVTierError
from kvtier.tiers import _registry as registry
from kvtier.tiers._base import TierConfig

Schema = dict[str, Any]

_BYTE_SIZE = TypeAdapter(ByteSize).json_schema()["anyOf"][0]["pattern"]  # other distributions have it
_SIZES = (SIZE_PATTERN, _BYTE_SIZE)

_LEGEND = (
    "A *size* is a number of bytes, or text with a unit: `64GiB` (1024), `64GB` (1000). What ends in `_s` is "
    "in seconds."
)
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> Schema:
    """Return the JSON schema of the configuration, with the settings of every installed tier.

    An entry of ``secondary_tiers`` is told apart by its ``type``. A tier that cannot be loaded is left
    out, and named with the reason in ``$comment``.
    """
    schema = TieringConfig.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    definitions.pop(TierConfig.__name__, None)
    models, broken = _models()
    names = [f"tier-{name}" for name in models]
    for name, model in models.items():
        definitions.update(_definitions(name, model))
    schema["properties"]["secondary_tiers"]["items"] = _one_of(names)
    if broken:
        schema["$comment"] = "left out: " + "; ".join(broken)
    return {"$schema": _DIALECT, **schema}


def table() -> str:
    """Return all settings as Markdown: a table for kvtier's own and one for each installed tier."""
    own, *others = tables().items()
    parts = [f"{_LEGEND}\n\n{own[1]}"]
    parts += [f"Settings of a tier of type `{kind}`:\n\n{rows}" for kind, rows in others]
    return "\n".join(parts)


def tables() -> dict[str, str]:
    """Return a Markdown table for kvtier's own settings, under "", and one for each installed tier."""
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


def _models() -> tuple[dict[str, type[TierConfig]], list[str]]:
    models: dict[str, type[TierConfig]] = {}
    broken: list[str] = []
    for name in dict.fromkeys(info.name for info in registry.installed()):
        try:
            models[name] = registry.load(name).Config
        except KVTierError as error:
            broken.append(str(error))
    return models, broken


def _definitions(name: str, model: type[TierConfig]) -> dict[str, Schema]:
    """Return one tier's schema and its references, under names that are unique to the tier."""
    own = model.model_json_schema(ref_template=f"#/$defs/tier-{name}-{{model}}")
    inner = own.pop("$defs", {})
    own["properties"]["type"] = {**own["properties"]["type"], "const": name}
    own["properties"]["type"].pop("default", None)
    own["required"] = sorted({*own.get("required", ()), "type"})  # even if the model has a default
    return {f"tier-{name}": own, **{f"tier-{name}-{key}": value for key, value in inner.items()}}


def _one_of(definitions: list[str]) -> Schema:
    references = {name: f"#/$defs/{name}" for name in definitions}
    mapping = {name.removeprefix("tier-"): reference for name, reference in references.items()}
    return {
        "oneOf": [{"$ref": reference} for reference in references.values()],
        "discriminator": {"propertyName": "type", "mapping": mapping},
    }


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
