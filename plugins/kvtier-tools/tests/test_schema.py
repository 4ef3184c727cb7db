"""The printed schema accepts exactly what the configuration accepts."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from kvtier import TieringConfig
from kvtier.errors import KVTierError
from kvtier_tools import schema
from tests.unit.conftest import InstallDistribution

GOOD = [
    {"cpu_bytes_to_use": 1},
    {"cpu_bytes_to_use": "8GiB", "block_size": 32},
    {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "dummy", "seed": 3}]},
    {
        "cpu_bytes_to_use": 1,
        "secondary_tiers": [{"type": "acme", "root_dir": "/x", "logins": [{"token": "t"}]}],
    },
]
BAD = [
    {},
    {"cpu_bytes_to_use": 1, "block_sise": 32},
    {"cpu_bytes_to_use": 1, "promotion_budget": 2},
    {"cpu_bytes_to_use": 1, "secondary_tiers": [{"seed": 3}]},
    {"cpu_bytes_to_use": 1, "secondary_tiers": [{"root_dir": "/x"}]},
    {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "acme"}]},
    {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "dummy", "root_dir": "/x"}]},
    {
        "cpu_bytes_to_use": 1,
        "secondary_tiers": [{"type": "acme", "root_dir": "/x", "logins": [{"tok": "t"}]}],
    },
]


@pytest.fixture
def validator(acme: None) -> Any:
    document = schema.json_schema()
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


@pytest.mark.parametrize("raw", GOOD)
def test_accepts_valid_configurations(validator: Any, raw: Any) -> None:
    TieringConfig.from_mapping(raw)
    assert list(validator.iter_errors(raw)) == []


@pytest.mark.parametrize("raw", BAD)
def test_refuses_invalid_configurations(validator: Any, raw: Any) -> None:
    with pytest.raises(KVTierError):
        TieringConfig.from_mapping(raw)
    assert not validator.is_valid(raw)


def test_settings_are_described(acme: None) -> None:
    document = schema.json_schema()
    tiers = [document["$defs"]["tier-dummy"], document["$defs"]["tier-fs"]]
    for part in (document, *tiers):
        undescribed = [name for name, field in part["properties"].items() if not field.get("description")]
        assert undescribed == []


def test_broken_tier_is_named(install_distribution: InstallDistribution) -> None:
    install_distribution("acme-broken", "1 / 0", {"broken": "Tier"})
    document = schema.json_schema()
    assert "tier-broken" not in document["$defs"]
    assert "acme-broken 1.2" in document["$comment"]
    assert "ZeroDivisionError" in document["$comment"]
