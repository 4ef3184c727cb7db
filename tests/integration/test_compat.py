"""A vLLM that is too old is refused in words, an unknown one is warned of."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

from kvtier.adapters.vllm.compat import refuse_too_old, release, warn_if_untested
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
