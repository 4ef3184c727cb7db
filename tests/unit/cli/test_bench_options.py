"""The options of the benchmarks with engines reach them, and wrong ones are refused in words."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtier.cli import main as cli


@dataclass(frozen=True)
class Figure:
    value: float


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, list[Any]]]:
    """Run a benchmark's command with a double of what measures; return what that was given, too."""

    def run(name: str, *arguments: str) -> tuple[Result, list[Any]]:
        calls: list[Any] = []

        def measure(root: Path | None, **given: Any) -> Figure:
            calls.append((root, given))
            return Figure(1.0)

        double: Any = types.ModuleType(name)
        double.run = measure
        monkeypatch.setitem(sys.modules, f"kvtier.cli.bench_{name}", double)
        return CliRunner().invoke(cli.app, ["bench", name, *arguments]), calls

    return run


def test_options_of_overhead(run: Callable[..., tuple[Result, list[Any]]]) -> None:
    options = ["--root", "/data", "--model", "tiny", "--rounds", "3", "--prompts", "4", "--at-once", "2"]
    result, calls = run("overhead", *options, "--control", "--native")
    assert result.exit_code == 0, result.output
    ((root, given),) = calls
    assert root == Path("/data")
    assert given == {
        "model": "tiny",
        "rounds": 3,
        "prompts": 4,
        "prompt_tokens": 512,
        "output_tokens": 32,
        "at_once": 2,
        "control": True,
        "native": True,
    }


def test_options_of_convoy(run: Callable[..., tuple[Result, list[Any]]]) -> None:
    result, calls = run("convoy", "--requests", "8", "--prefix-tokens", "64", "--no-native")
    assert result.exit_code == 0, result.output
    ((root, given),) = calls
    assert root is None
    assert given == {
        "model": "small",
        "rounds": 5,
        "requests": 8,
        "prefix_tokens": 64,
        "output_tokens": 8,
        "native": False,
    }


def test_options_of_device(run: Callable[..., tuple[Result, list[Any]]]) -> None:
    result, calls = run("device", "--backend", "cpu", "--host-only", "--mib", "32")
    assert result.exit_code == 0, result.output
    assert calls == [("cpu", {"host_only": True, "mib": 32})]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["overhead", "--model", "huge"], "'huge' is none of tiny, small, medium"),
        (["overhead", "--rounds", "0"], "--rounds"),
        (["overhead", "--prompt-tokens", "31"], "--prompt-tokens"),
        (["convoy", "--requests", "0"], "--requests"),
        (["device", "--mib", "15"], "--mib"),
    ],
)
def test_wrong_options_are_refused_in_words(
    run: Callable[..., tuple[Result, list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result, calls = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert calls == []
