"""Commands of other distributions: found, run, and harmless to the others where they are broken."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from kvtier._cli import main as cli
from kvtier.errors import KVTierError
from tests.unit.conftest import InstallDistribution

Run = Callable[..., Result]

SOURCE = """
import typer

group = typer.Typer(help="Several of them.")


@group.command()
def one(count: int = 1):
    print(f"one {count}")


@group.command()
def two():
    raise typer.Exit(3)


def single(word: str):
    "Print a word."
    print(word.upper())


nothing = 42
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture(autouse=True)
def _installed(install_distribution: InstallDistribution) -> None:
    names = {"acme": "group", "shout": "single", "empty": "nothing", "tiers": "single"}
    install_distribution("acme-commands", SOURCE, names, group="kvtier.commands")


def test_apps_and_functions_are_commands(run: Run) -> None:
    assert run("acme", "one", "--count", "3").output == "one 3\n"
    assert run("acme", "two").exit_code == 3
    assert run("shout", "loud").output == "LOUD\n"
    listed = run("--help").output
    assert "Several of them." in listed
    assert "Print a word." in listed


def test_own_names_win(run: Run) -> None:
    assert "Eviction policies" in run("tiers").output


def test_broken_command_is_named(run: Run, install_distribution: InstallDistribution) -> None:
    install_distribution(
        "acme-broken", "raise RuntimeError('[red]no luck')", {"broken": "it"}, group="kvtier.commands"
    )
    listed = run("--help")
    assert listed.exit_code == 0
    assert "acme-broken 1.2 (acme_broken:it) cannot be imported: RuntimeError: [red]no luck" in listed.output
    assert "neither a Typer application nor a function: 42" in listed.output
    assert run("shout", "loud").output == "LOUD\n"
    with pytest.raises(KVTierError, match=r"'broken' of acme-broken 1\.2 .* RuntimeError"):
        raise run("broken", "--some", "option").exception or AssertionError


def test_command_imports_no_other(run: Run, install_distribution: InstallDistribution) -> None:
    install_distribution("acme-other", "def it(): pass", {"other": "it"}, group="kvtier.commands")
    assert run("shout", "loud").exit_code == 0
    assert "acme_other" not in sys.modules


@pytest.mark.parametrize(
    "arguments", [["bench"], ["bench", "core", "--json", "x"], ["demo", "--help"], ["simulate", "x"]]
)
def test_missing_command_names_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr("kvtier._cli.extensions.plugins.installed", lambda group: [])
    monkeypatch.setattr(sys, "argv", ["kvtier", *arguments])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "not installed: pip install ./plugins/kvtier-bench in a checkout" in capsys.readouterr().err
