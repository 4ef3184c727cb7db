"""The commands hand over what they are given, show figures, and refuse before minutes are spent."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtier_bench import commands

Run = Callable[..., Result]


@dataclass(frozen=True)
class Speed:
    """How fast it is."""

    name: str
    gb_s: float


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(commands.bench, list(arguments))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the modules that measure were asked for; none of them measures anything."""
    calls: list[Any] = []

    def measure(*given: object, **chosen: object) -> list[Speed]:
        calls.append((given, chosen))
        return [Speed("put", 12345.6)]

    module = SimpleNamespace(run=measure, SIZES=(65536,), Work=lambda *given: given)
    monkeypatch.setattr(commands, "_lazy", lambda _: module)
    return calls


def test_figures_are_shown_and_as_json_printed(run: Run, calls: list[Any]) -> None:
    result = run("fs", "/data", "--chunk-bytes", "4096", "--rounds", "2")
    assert result.exit_code == 0, result.output
    assert calls == [((Path("/data"), [4096], 1.0, 2), {})]
    assert "12,346" in result.output
    result = run("fs", "/data", "--json")
    assert json.loads(result.stdout) == {"Speed": [{"name": "put", "gb_s": 12345.6}]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["overhead", "--model", "huge"], "'huge' is none of tiny, small, medium"),
        (["overhead", "--prompt-tokens", "31"], "--prompt-tokens"),
        (["convoy", "--chunk-tokens", "48"], "48 is no multiple of 32"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(
    run: Run, calls: list[Any], arguments: list[str], words: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert calls == []


def test_a_missing_engine_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(importlib, "import_module", absent)
    result = run("core")
    assert result.exit_code == 2
    assert "this command needs vllm, which is not installed" in result.output
