"""The command line: prints its version, and says in one line what went wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import importlib_metadata
import pytest
from typer.testing import CliRunner

from kvtier import _cli as cli
from kvtier.errors import ConfigError


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"kvtier {importlib_metadata.version('kvtier')}\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("secondary_tiers[1].root is not a setting"), "secondary_tiers[1].root is not a setting"),
        (FileNotFoundError(2, "No such file", "/nowhere"), "[Errno 2] No such file: '/nowhere'"),
        (ConfigError("a\x1b[31mb\nc"), "a\\x1b[31mb\\nc"),
        (RecursionError("maximum recursion depth exceeded"), "a file is nested too deeply to be read: "),
        (MemoryError(), "out of memory: "),
    ],
)
def test_error_is_one_line(monkeypatch, capsys, error: Exception, line: str) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"kvtier: {line}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_terminated_command_cleans_up(tmp_path: Path, number: int) -> None:
    code = """
import signal, sys, tempfile, time
from kvtier import __main__, _cli
for number in (signal.SIGTERM, signal.SIGHUP):  # which may be ignored where the tests run
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

@_cli.app.command()
def busy():
    with tempfile.TemporaryDirectory(dir=sys.argv[2]):
        print("busy", flush=True)
        while True:  # a signal just before a sleep is handled after it
            time.sleep(0.01)

sys.argv[:] = ["kvtier", "busy", sys.argv[1]]
_cli.app.registered_commands[-1].context_settings = {"allow_extra_args": True}
__main__.main()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as busy:
        try:
            assert busy.stdout is not None
            assert busy.stdout.readline() == b"busy\n"
            busy.send_signal(number)
            said, _ = busy.communicate(timeout=60)
        finally:
            busy.kill()
    assert busy.returncode == 128 + number, said.decode()
    assert list(tmp_path.iterdir()) == []
