"""A log line never raises, and frequent messages are logged at a limited rate."""

from __future__ import annotations

import logging

import pytest

from kvtier._core.shared import Notice
from kvtier._core.tiering import Tiering
from kvtier._execution.driver import Driver
from kvtier.policies import LRU
from kvtier.tiers import GuardedLogger, LogLimit
from tests.common import failing_log_handler


def test_failing_handler_loses_only_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Other modules do not log directly: see ``banned-api`` in pyproject.toml."""
    logger = GuardedLogger("kvtier.test_log_limit")
    with failing_log_handler() as lines:
        logger.warning("one")
        try:
            raise ValueError("a bug")
        except ValueError:
            logger.exception("two")
    assert lines == ["one", "two"]
    assert capsys.readouterr().err.count("OSError: no room for the log") == 2


def test_next_line_counts_suppressed() -> None:
    seldom = LogLimit(10.0)
    assert seldom.allow("a", 100.0) == ""
    assert [seldom.allow("a", 100.0 + step) for step in range(1, 10)] == [None] * 9
    assert seldom.allow("b", 105.0) == "", "each subject is its own"
    assert seldom.allow("a", 110.0) == " (and 9 times since the line before)"
    assert seldom.allow("a", 120.0) == ""


def test_flapping_tier_spares_log(caplog: pytest.LogCaptureFixture) -> None:
    logger, times, core = GuardedLogger("kvtier.test_log_limit"), iter(range(10**6)), Tiering(LRU())
    driver = Driver(core, lambda commands: None, logger, clock=lambda: next(times) / 2)
    with caplog.at_level(logging.INFO, logger.name):
        for _ in range(60):
            core.shared.notices += [Notice("tier s3", "bad"), Notice("tier s3", "good")]
            driver.dispatch()
    lines = [(record.levelname, record.message) for record in caplog.records]
    assert lines[:2] == [("WARNING", "tier s3: bad"), ("WARNING", "tier s3: good")]
    assert len(lines) == 4
