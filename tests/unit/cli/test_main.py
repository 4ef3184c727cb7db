"""The command line: lists, prints, hands over, and says in one line what went wrong."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvtier import schema
from kvtier.cli import figures, room
from kvtier.cli import main as cli
from kvtier.errors import ConfigError, KVTierError


def replace(monkeypatch, module, **functions):
    """Put a double in the place of a module that is imported late."""
    double = types.ModuleType(module)
    for name, function in functions.items():
        setattr(double, name, function)
    monkeypatch.setitem(sys.modules, module, double)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"kvtier {importlib_metadata.version('kvtier')}\n"


def test_without_a_command_the_help_is_shown(run):
    assert "Usage: kvtier" in run().output


def test_tiers_lists_tiers_and_policies_and_whether_they_load(run, acme, install_distribution):
    install_distribution("acme-broken", "raise RuntimeError('[red]no luck[/red]')", {"broken": "Tier"}, "0.3")
    result = run("tiers")
    assert result.exit_code == 0
    rows = {}
    for line in result.output.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        rows[cells[0]] = cells[1:]
    assert rows["acme"] == ["acme-tiers", "1.2", "yes"]
    assert rows["dummy"] == ["kvtier", importlib_metadata.version("kvtier"), "yes"]
    assert rows["broken"][:2] == ["acme-broken", "0.3"]
    assert rows["broken"][2].startswith("no: ")
    assert "RuntimeError: [red]no luck[/red]" in rows["broken"][2]
    assert rows["lru"][2] == rows["arc"][2] == "yes"


def test_schema_is_json(run, acme):
    assert json.loads(run("schema").output) == schema.json_schema()


def test_schema_as_a_table(run, acme):
    assert run("schema", "--table").output == schema.table() + "\n"


@pytest.mark.parametrize("status", [0, 1])
def test_demo_hands_over_and_ends_with_its_status(run, monkeypatch, status):
    calls = []

    def demo(json_file):
        calls.append(json_file)
        return status

    replace(monkeypatch, "kvtier.cli.demo", main=demo)
    assert run("demo").exit_code == status
    assert run("demo", "--json", "out.json").exit_code == status
    assert calls == [None, Path("out.json")]


@dataclass(frozen=True)
class Speed:
    """How fast it is.

    Attributes:
        gb_s: not a part of the title.
    """

    name: str
    gb_s: float


@dataclass(frozen=True)
class Cost:
    us: float


FIGURES = ([Speed("put", 1.23456), Speed("get", 12345.6)], Cost(0.5))


@pytest.mark.parametrize(
    ("command", "arguments", "options"),
    [
        (["core"], (), {}),
        (["fs", "/data"], (Path("/data"),), {"isolation": "process"}),
        (["fs", "/data", "--isolation", "thread"], (Path("/data"),), {"isolation": "thread"}),
        (["device"], (None,), {"host_only": False, "mib": None}),
        (
            ["device", "--backend", "cpu", "--host-only", "--mib", "64"],
            ("cpu",),
            {"host_only": True, "mib": 64},
        ),
    ],
)
def test_measurements_are_shown_and_written(run, monkeypatch, tmp_path, command, arguments, options):
    calls = []

    def measure(*given, **chosen):
        calls.append((given, chosen))
        return FIGURES

    replace(monkeypatch, f"kvtier.cli.bench_{command[0]}", run=measure)
    result = run("bench", *command, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0
    assert calls == [(arguments, options)]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.output.splitlines()]
    assert ["How fast it is"] in cells
    assert ["put", "1.23"] in cells
    assert ["get", "12,346"] in cells
    assert ["0.5"] in cells
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "Speed": [{"name": "put", "gb_s": 1.23456}, {"name": "get", "gb_s": 12345.6}],
        "Cost": [{"us": 0.5}],
    }


def test_what_is_no_record_is_refused():
    with pytest.raises(TypeError, match="a measurement returns records, not dict"):
        figures.show([{"put": 1}], Console())


def test_missing_engine_is_named(run, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(importlib, "import_module", absent)
    result = run("demo")
    assert result.exit_code == 2
    assert "this command needs vllm, which is not installed" in result.output


def test_errors_of_kvtier_end_it_in_one_line(monkeypatch, capsys):
    def fail():
        raise ConfigError("secondary_tiers[1].root is not a setting")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == "kvtier: secondary_tiers[1].root is not a setting\n"


def test_the_installed_command_needs_neither_torch_nor_an_engine():
    code = (
        "import sys; sys.modules.update(torch=None, vllm=None, numpy=None); sys.argv = ['kvtier', 'tiers'];"
        "from kvtier.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "dummy" in done.stdout


def test_what_a_path_cannot_be_used_for_is_said_in_one_line(monkeypatch, capsys):
    def fail():
        raise FileNotFoundError(2, "No such file or directory", "/nowhere/figures.json")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == "kvtier: [Errno 2] No such file or directory: '/nowhere/figures.json'\n"


@pytest.mark.parametrize("file", ["nowhere/figures.json", "."])
def test_figures_that_could_not_be_written_are_not_measured(run, monkeypatch, tmp_path, file):
    monkeypatch.setattr(cli, "_lazy", lambda module: pytest.fail(f"{module} was run"))
    result = run("bench", "core", "--json", str(tmp_path / file))
    assert result.exit_code == 2
    assert "cannot be written" in result.output
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(KVTierError, match="cannot be made: Not a directory"):
        room.make_directory(tmp_path / "file" / "below")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_asked_to_end_removes_what_it_has_made(tmp_path: Path, number: int) -> None:
    code = """
import signal, sys
from kvtier.cli import main
for number in (signal.SIGTERM, signal.SIGHUP):  # which may be ignored where the tests run
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["kvtier", "bench", "root", "--root", sys.argv[1], "--chunks", "100000"]
main.main()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as bench:
        try:
            while bench.poll() is None and not any(tmp_path.rglob("*.bin")):
                time.sleep(0.01)
            bench.send_signal(number)
            said, _ = bench.communicate(timeout=60)
        finally:
            bench.kill()
    assert bench.returncode == 128 + number, said.decode()
    assert list(tmp_path.iterdir()) == []


def test_what_a_command_is_told_to_ignore_stays_ignored() -> None:
    code = """
import os, signal
from kvtier.cli import ending
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with ending.in_order():
    os.kill(os.getpid(), signal.SIGHUP)
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
