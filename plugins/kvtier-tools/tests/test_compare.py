"""``kvtier compare``: the settings that tell two caches of a root apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier import Identity
from tests.caches import Kvtier

ENGINE = {"kv_cache": {"dtype": "float16"}, "settings": {"model_config": {"dtype": "float16"}}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root without chunks."""
    return tmp_path / "root"


def make(root: Path, fields: dict[str, Any]) -> str:
    """Write the manifest of a cache; return the name of the cache."""
    identity = Identity.make("org/model", fields)
    (root / identity.namespace).mkdir(parents=True)
    (root / identity.namespace / "config.json").write_text(identity.manifest)
    return identity.namespace


def test_difference_shows_both_values(kvtier: Kvtier, root: Path) -> None:
    one = make(root, ENGINE)
    other = make(root, {**ENGINE, "kv_cache": {"dtype": "fp8"}, "settings": {"lora_config": {"rank": 8}}})
    said = kvtier("compare", root, one, other, "--json")
    assert said.status == 1
    assert said.json["differing"] == [
        {"setting": "kv_cache.dtype", "one": "float16", "other": "fp8", "is_set": [True, True]},
        {"setting": "settings.lora_config", "one": None, "other": {"rank": 8}, "is_set": [False, True]},
        {
            "setting": "settings.model_config",
            "one": {"dtype": "float16"},
            "other": None,
            "is_set": [True, False],
        },
    ]
    shown = kvtier("compare", root, one, other)
    assert shown.status == 1
    words = ["kv_cache.dtype", "fp8", "settings.lora_config", "not set"]
    assert [word for word in words if word not in shown.out] == []


def test_unknown_cache_lists_known(kvtier: Kvtier, root: Path) -> None:
    name = make(root, ENGINE)
    said = kvtier("compare", root, name, "nobody")
    assert said.status == 2
    assert [word for word in ("nobody", name) if word not in said.err] == []


def test_unreadable_manifest_is_named(kvtier: Kvtier, root: Path) -> None:
    one, other = make(root, ENGINE), make(root, {})
    (root / other / "config.json").write_text("{")
    said = kvtier("compare", root, one, other)
    assert said.status == 2
    assert other in said.err
    assert json.loads((root / one / "config.json").read_text())
