"""Every setting of the installation, as a JSON schema."""

from __future__ import annotations

from typing import Any

from kvtier._config import TieringConfig
from kvtier.errors import KVTierError
from kvtier.tiers import _registry as registry
from kvtier.tiers._base import TierConfig

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> Schema:
    """Return the JSON schema of the configuration, with the settings of every installed tier.

    Entries of ``secondary_tiers`` are distinguished by their ``type``. A tier that cannot be loaded is
    omitted, and named with the reason in ``$comment``.
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
