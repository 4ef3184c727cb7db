"""Commands of other distributions: found, run, and harmless to the others where they are broken."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtier import _cli as cli
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
    names = {"acme": "group", "shout": "single", "empty": "nothing"}
    install_distribution("acme-commands", SOURCE, names, group="kvtier.commands")


def test_apps_and_functions_are_commands(run: Run) -> None:
    assert run("acme", "one", "--count", "3").output == "one 3\n"
    assert run("acme", "two").exit_code == 3
    assert run("shout", "loud").output == "LOUD\n"
    listed = run("--help").output
    assert "Several of them." in listed
    assert "Print a word." in listed


def test_name_claimed_twice_is_refused(run: Run, install_distribution: InstallDistribution) -> None:
    install_distribution("acme-again", SOURCE, {"shout": "single"}, group="kvtier.commands")
    with pytest.raises(KVTierError, match=r"acme-again .* and acme-commands .* claimed 2 times"):
        raise run("shout", "loud").exception or AssertionError


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


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier._cli.plugins.installed", lambda group: [])


@pytest.mark.parametrize(
    ("arguments", "distribution"),
    [
        (["bench"], "kvtier-bench"),
        (["bench", "core", "--json", "x"], "kvtier-bench"),
        (["demo", "--help"], "kvtier-bench"),
        (["new-tier", "x"], "kvtier-testing"),
        (["doctor", "--tier", "{}"], "kvtier-tools"),
        (["ls"], "kvtier-tools"),
    ],
)
@pytest.mark.usefixtures("_nothing_installed")
def test_missing_command_names_package(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    distribution: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtier", *arguments])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    (said,) = capsys.readouterr().err.splitlines()
    assert f"not installed: pip install ./plugins/{distribution} in a checkout" in said


@pytest.mark.usefixtures("_nothing_installed")
def test_help_lists_missing_commands(run: Run) -> None:
    rows = [line.split() for line in run("--help").output.splitlines()]
    assert {name for names in cli.COMMANDS.values() for name in names} <= {
        row[1] for row in rows if "./plugins/kvtier-" in " ".join(row)
    }


def test_listed_commands_are_those_of_distributions() -> None:
    declared = {}
    for file in (Path(__file__).parents[3] / "plugins").glob("*/pyproject.toml"):
        points = tomllib.loads(file.read_text())["project"].get("entry-points", {})
        if names := points.get("kvtier.commands"):
            declared[file.parent.name] = tuple(sorted(names))
    assert declared == cli.COMMANDS
