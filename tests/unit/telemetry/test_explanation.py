"""The line that explains a request can be parsed back from any log format."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier._telemetry import explanation
from kvtier._telemetry.explanation import Explanation
from kvtier_tools.explain import DamagedLine, explain, read

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
TOKENS = st.integers(0, 2**40)
EXPLANATIONS = st.builds(
    Explanation,
    request=TEXT,
    tokens=st.dictionaries(TEXT, TOKENS, max_size=3),
    prefix_end=st.none() | TOKENS,
    reason=st.none() | TEXT,
    tiers=st.dictionaries(TEXT, TEXT, max_size=3),
    waited_s=st.floats(0, 1e6),
)


def explained(**fields: Any) -> Explanation:
    """Return an explanation with only the given fields set."""
    nothing: dict[str, Any] = {"tokens": {}, "prefix_end": None, "reason": None, "tiers": {}, "waited_s": 0.0}
    return Explanation(request="a", **{**nothing, **fields})


def line_of(one: Explanation) -> str:
    """Return the logged line."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler, logger = Keep(), explanation.logger.logger
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        explanation.write(one)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (line,) = lines
    return line


PIECES = ["kvtier.explain: ", "{", "}", '"', "\\", '{"', '\\"', "{}", "kvtier.explain: x", "\x1b[0m", " "]
AROUND = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))
).map("".join)


@given(EXPLANATIONS, AROUND, AROUND)
def test_line_parses_in_any_context(one: Explanation, before: str, after: str) -> None:
    line = line_of(one)
    assert "\n" not in line
    assert line.isascii()
    assert list(read([f"{before}{line}{after}\n".encode()])) == [one]


@given(EXPLANATIONS, AROUND, AROUND, st.booleans())
def test_line_parses_in_json_logs(one: Explanation, before: str, after: str, is_ascii: bool) -> None:
    fields = {"level": "INFO", "message": f"{before}{line_of(one)}{after}", "thread": after}
    line = json.dumps(fields, ensure_ascii=is_ascii)
    assert list(read([f"{line}\n".encode()])) == [one]


NAMES = ["kvtier.explain: x", "kvtier.explain: {", "}", line_of(explained(prefix_end=7)), "a\ud800b"]


@pytest.mark.parametrize("name", NAMES)
def test_request_id_is_escaped(name: str) -> None:
    line = line_of(msgspec.structs.replace(explained(), request=name))
    (one,) = read([line.encode()])
    assert isinstance(one, Explanation)
    assert one == msgspec.structs.replace(explained(), request=name.replace("\ud800", "?"))
    for whole in (line, json.dumps({"message": line})):
        for end in range(len(line) - 1):
            (cut,) = read([whole[:end].encode()])
            assert cut is None or isinstance(cut, DamagedLine)


@given(st.lists(st.binary() | st.builds(lambda end: b"kvtier.explain: {" + end, st.binary())))
@example([b'kvtier.explain: {"a": ' + b"[" * 100_000 + b"}"])
@example([b'kvtier.explain: {"request": "\xff"}', b"kvtier.explain: {}", b"kvtier.explain: {"])
def test_no_line_stops_reader(lines: list[bytes]) -> None:
    found = list(read(lines))
    assert len(found) == len(lines)
    for line, one in zip(lines, found, strict=True):
        assert (one is None) == (b"kvtier.explain: {" not in line)


def test_later_fields_are_ignored() -> None:
    line = line_of(explained()).replace("{", '{"new": 1, ', 1)
    (one,) = read([line.encode()])
    assert one == explained()


def test_log_is_counted_by_line() -> None:
    line = line_of(explained(tokens={"fs": 64}, tiers={"fs": "checksum"}))
    log = f"INFO engine started\n{line}\nkvtier.explain: {{\n\n{line}".encode()
    found = explain(io.BytesIO(log))
    assert [one["tiers"] for one in found.requests] == [{"fs": "checksum"}] * 2
    assert (found.damaged, found.other) == (1, 2)


@pytest.fixture
def bare_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger as in a process without logging configuration."""
    logger = logging.Logger("kvtier.explain")  # it has no parent, so it has none of pytest's handlers
    monkeypatch.setattr(explanation.logger, "logger", logger)
    yield logger
    logger.handlers.clear()


def test_lines_show_without_setup(bare_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        explanation.enable()
    explanation.write(explained())
    assert capsys.readouterr().err.count("kvtier.explain: {") == 1


def test_late_setup_shows_lines_once(bare_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    explanation.enable()
    explanation.write(explained())
    bare_logger.parent = logging.Logger("kvtier")
    bare_logger.parent.addHandler(logging.StreamHandler(sys.stderr))
    explanation.write(explained())
    assert capsys.readouterr().err.count("kvtier.explain: {") == 2


def test_set_level_is_kept(bare_logger: logging.Logger) -> None:
    bare_logger.setLevel(logging.ERROR)
    explanation.enable()
    assert bare_logger.level == logging.ERROR


@pytest.mark.parametrize(("level", "is_seen"), [(logging.ERROR, False), (logging.NOTSET, True)])
def test_kvtier_log_level_counts(bare_logger: logging.Logger, level: int, is_seen: bool) -> None:
    bare_logger.parent = logging.Logger("kvtier", level)
    bare_logger.parent.parent = logging.RootLogger(logging.WARNING)
    explanation.enable()
    assert bare_logger.isEnabledFor(logging.INFO) is is_seen
