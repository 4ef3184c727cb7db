"""The command line: lists, prints, hands over, and says in one line what went wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import importlib_metadata
import pytest
from typer.testing import CliRunner

from kvtier import schema
from kvtier.cli import main as cli
from kvtier.errors import ConfigError


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
    assert result.exit_code == 1
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_asked_to_end_removes_what_it_has_made(tmp_path: Path, number: int) -> None:
    code = """
import signal, sys, tempfile, time
from kvtier.cli import main
for number in (signal.SIGTERM, signal.SIGHUP):  # which may be ignored where the tests run
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

@main.app.command()
def busy():
    with tempfile.TemporaryDirectory(dir=sys.argv[2]):
        time.sleep(60)

sys.argv[:] = ["kvtier", "busy", sys.argv[1]]
main.app.registered_commands[-1].context_settings = {"allow_extra_args": True}
main.main()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as busy:
        try:
            while busy.poll() is None and not list(tmp_path.iterdir()):
                time.sleep(0.01)
            busy.send_signal(number)
            said, _ = busy.communicate(timeout=60)
        finally:
            busy.kill()
    assert busy.returncode == 128 + number, said.decode()
    assert list(tmp_path.iterdir()) == []


def test_what_a_command_is_told_to_ignore_stays_ignored() -> None:
    code = """
import os, signal
from kvtier.cli import signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with signals.exit_on_signals():
    os.kill(os.getpid(), signal.SIGHUP)
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
