"""The command line: lists, prints, hands over, and says in one line what went wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import importlib_metadata
import pytest
from typer.testing import CliRunner

from kvtier._cli import main as cli
from kvtier.errors import ConfigError


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"kvtier {importlib_metadata.version('kvtier')}\n"


def test_tiers_lists_what_loads(run, acme, install_distribution):
    install_distribution("acme-broken", "raise RuntimeError('[red]no luck[/red]')", {"broken": "Tier"}, "0.3")
    result = run("tiers")
    assert result.exit_code == 1
    rows = {}
    for line in result.output.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        rows[cells[0]] = cells[1:]
    assert rows["acme"] == ["acme-tiers", "1.2", "yes"]
    assert rows["fs"] == ["kvtier", importlib_metadata.version("kvtier"), "yes"]
    assert rows["broken"][:2] == ["acme-broken", "0.3"]
    assert rows["broken"][2].startswith("no: ")
    assert "RuntimeError: [red]no luck[/red]" in rows["broken"][2]
    assert rows["lru"][2] == rows["arc"][2] == "yes"


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


def test_tools_need_no_torch(cache) -> None:
    cache.put([0])
    code = f"""
import sys
sys.modules.update(torch=None, vllm=None, numpy=None)
from kvtier._cli.main import main
for words in (["tiers"], ["schema"], ["verify", {str(cache.root)!r}]):
    sys.argv = ["kvtier", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_terminated_command_cleans_up(tmp_path: Path, number: int) -> None:
    code = """
import signal, sys, tempfile, time
from kvtier._cli import main
for number in (signal.SIGTERM, signal.SIGHUP):  # which may be ignored where the tests run
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

@main.app.command()
def busy():
    with tempfile.TemporaryDirectory(dir=sys.argv[2]):
        print("busy", flush=True)
        while True:  # a signal just before a sleep is handled after it
            time.sleep(0.01)

sys.argv[:] = ["kvtier", "busy", sys.argv[1]]
main.app.registered_commands[-1].context_settings = {"allow_extra_args": True}
main.main()
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
