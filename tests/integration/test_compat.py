"""Versions: too old ones are refused, unknown ones warned of and kept apart; how a spec finds its engine."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.adapters.vllm._compat import (
    EngineContext,
    engine_context,
    is_reviewed,
    kv_format,
    making_spec_of,
    refuse_too_old,
    release,
    warn_if_untested,
)
from kvtier.errors import ConfigError

pytestmark = pytest.mark.releases


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("0.32.0", (0, 32)),
        ("0.33.0rc1", (0, 33)),
        ("0.31.0.post1+cpu", (0, 31)),
        ("0.34.0.dev12+g1a2b3c4d5", (0, 34)),
        ("1.0.0", (1, 0)),
        ("dev", None),
        ("0.1.dev5+g1a2b3c4d5", None),
        ("0.1.0.dev5+g1a2b3c4d5", None),
    ],
)
def test_a_version_tells_its_release_unless_it_was_built_without_tags(
    version: str, number: tuple[int, int] | None
) -> None:
    assert release(version) == number


@pytest.mark.parametrize("version", ["0.30.2", "0.9.2"])
def test_what_is_too_old_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        refuse_too_old(version)
    words = [version, "0.31", "0.33"]
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize("version", ["0.31.0", "0.33.1", "0.34.0", "dev", "0.1.dev5+g1a2b3c4d5"])
def test_what_may_do_is_not_refused(version: str) -> None:
    refuse_too_old(version)


@pytest.mark.parametrize(
    ("version", "warned"), [("0.31.0", False), ("0.33.1", False), ("0.34.0", True), ("dev", True)]
)
def test_what_is_untested_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, version: str, warned: bool
) -> None:
    warn_if_untested(version)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [version in warning for warning in warnings] == [True] * warned


def test_releases_that_read_each_other_have_one_kv_format() -> None:
    assert kv_format("0.31.0") == kv_format("0.32.0+cpu") == kv_format("0.33.0+cu130")
    assert is_reviewed("0.32.0+cpu")


@pytest.mark.parametrize("version", ["0.33.1", "0.34.0", "0.33.0rc1", "0.34.0.dev12+g1a2b3c4d5", "dev"])
def test_a_version_that_nobody_has_looked_at_has_a_kv_format_of_its_own(version: str) -> None:
    known = {kv_format("0.33.0"), kv_format("0.34.0.dev12+g000000000"), kv_format("0.35.0")}
    assert kv_format(version) not in known
    assert not is_reviewed(version)


def test_a_connector_gives_the_engine_to_its_spec() -> None:
    engine = EngineContext(object(), object())
    with making_spec_of(engine):
        assert engine_context() is engine
    with pytest.raises(ConfigError, match="use KVTierConnector"):
        engine_context()


def test_the_engine_of_vllms_own_connector_is_found_among_the_callers() -> None:
    found: list[EngineContext] = []

    def connector(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        found.append(engine_context())

    its, cache = object.__new__(VllmConfig), KVCacheConfig(1, [], [])
    connector(its, cache)
    assert found == [EngineContext(its, cache)]
