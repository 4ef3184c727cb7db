"""Conventions of every command: common options, and no traceback on any interruption."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import kvtier_tools
from kvtier import _cli as cli
from kvtier_tools import report
from tests.caches import Cache, Kvtier

GROUP = typer.main.get_command(cli.app)


def commands(group: Any = GROUP, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands with their words, including subcommands and other distributions' commands."""
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands())
OWN = [words for words in ALL if words[0] not in ("bench", "demo", "simulate", "size")]
LOCAL = [words for words in OWN if words != ("hint",)]  # hint needs a server


@pytest.mark.parametrize("words", [(), *ALL], ids=lambda words: " ".join(words) or "kvtier")
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_commands_have_help(kvtier: Kvtier, words: tuple[str, ...], option: str) -> None:
    said = kvtier(*words, option)
    assert said.status == 0
    assert "Usage: " in said.out
    assert words not in OWN or f"Example: kvtier {words[0]}" in said.out


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_commands_have_json(words: tuple[str, ...]) -> None:
    (option,) = [one for one in ALL[words].params if "--json" in one.opts]
    assert option.is_flag


def arguments(words: tuple[str, ...], root: Path) -> list[str]:
    """Return arguments that give one of kvtier's own commands work to do."""
    (cache, *_) = [manifest.parent.name for manifest in root.glob("*/config.json")] or [""]
    given = {
        "compare": [str(root), cache, cache],
        "doctor": ["--tier", json.dumps({"type": "fs", "root_dir": str(root), "min_free_bytes": 0})],
        "stat": [str(next(root.glob("*/*/*/*.bin"), root))],
        "explain": [str(_saved_log(root))],
        "top": [str(_saved_metrics(root))],
        "new-tier": ["shelves", "--directory", str(root.parent)],
    }
    return given.get(words[0], [str(root)] if words[0] not in ("schema", "tiers") else [])


def _saved_metrics(root: Path) -> Path:
    page = root.with_name("metrics")
    page.write_text("kvtier_slots 8\n")
    return page


def _saved_log(root: Path) -> Path:
    log = root.with_name("engine.log")
    explained = {"request": "a", "tokens": {"fs": 64}, "prefix_end": 64, "reason": None, "tiers": {}}
    log.write_text(f"kvtier.explain: {json.dumps({**explained, 'waited_s': 0.1})}\n")
    return log


@pytest.mark.parametrize("words", LOCAL, ids=" ".join)
def test_json_is_one_document(kvtier: Kvtier, cache: Cache, words: tuple[str, ...]) -> None:
    cache.put(range(3))
    said = kvtier(*words, *arguments(words, cache.root), "--json")
    assert said.status == 0
    assert isinstance(said.json, dict)


@pytest.mark.parametrize("words", ["ls", "verify"])
@pytest.mark.parametrize("columns", ["", "0"])
def test_pipes_fold_no_row(
    kvtier: Kvtier, cache: Cache, monkeypatch: pytest.MonkeyPatch, words: str, columns: str
) -> None:
    cache.put(range(3))
    monkeypatch.setenv("COLUMNS", columns)
    rows = kvtier(words, cache.root).out.splitlines()
    assert words != "ls" or max(map(len, rows)) > 80
    assert not [row for row in rows if row.startswith("│ ") and not row.split("│")[1].strip()]


def test_colors_can_be_off(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b[31m" in kvtier("ls", "/nowhere").err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in kvtier("ls", "/nowhere").err


def test_one_module_knows_the_file_tiers_internals() -> None:
    sources = Path(kvtier_tools.__file__).parent
    assert [path.name for path in sources.rglob("*.py") if "tiers.fs._" in path.read_text()] == ["fs.py"]


# ------------------------------------------------------------------------------------ interruptions


def started(
    command: list[str], hook: str = "", folder: Path | None = None, **more: Any
) -> subprocess.Popen[str]:
    """Start ``python -m kvtier``; ``hook`` runs in it before anything of kvtier is imported."""
    env = {**os.environ, "COLUMNS": "100"}
    if folder is not None:
        restore = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        (folder / "usercustomize.py").write_text("")
        (folder / "sitecustomize.py").write_text(restore + textwrap.dedent(hook))
        env["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([sys.executable, "-m", "kvtier", *command], env=env, text=True, **pipes)


AT_IMPORT = """
    import os, signal, sys
    class Interrupt:
        def find_spec(self, name, path=None, target=None):
            if name == "{module}":
                os.kill(os.getpid(), signal.SIGINT)
    sys.meta_path.insert(0, Interrupt())
"""
AT_WORK = """
    import os, signal, sys
    def interrupt(event, arguments):
        if event == "{event}" and "{words}" in str(arguments):
            os.kill(os.getpid(), signal.SIGINT)
    sys.addaudithook(interrupt)
"""


@pytest.mark.parametrize("module", ["kvtier._cli", "kvtier._config"])
def test_interrupted_import_is_quiet(tmp_path: Path, module: str) -> None:
    with started(["tiers"], AT_IMPORT.format(module=module), tmp_path) as done:
        said, complaint = done.communicate(timeout=60)
    assert done.returncode == 130, complaint
    assert "Traceback" not in said + complaint


@pytest.mark.parametrize("words", ["verify", "doctor"])
def test_interrupted_work_is_quiet(cache: Cache, tmp_path: Path, words: str) -> None:
    cache.put(range(3))
    folder = tmp_path / "hooks"
    folder.mkdir()
    hook = AT_WORK.format(
        event="os.scandir" if words != "doctor" else "open", words="" if words != "doctor" else "epoch"
    )
    with started([words, *arguments((words,), cache.root)], hook, folder) as done:
        said, complaint = done.communicate(timeout=60)
    assert done.returncode == 130, complaint
    assert "Traceback" not in said + complaint


@pytest.mark.parametrize(
    "words",  # one that prints text, and one that prints a table and shows its progress
    [pytest.param(it, marks=() if it[0] in ("schema", "verify") else pytest.mark.full) for it in LOCAL],
    ids=" ".join,
)
@pytest.mark.parametrize("redirect", ["| true", "2>&1 | true", "> /dev/full", ">&-"])
def test_closed_output_is_quiet(cache: Cache, words: tuple[str, ...], redirect: str) -> None:
    cache.put(range(3))
    command = [sys.executable, "-m", "kvtier", *words, *arguments(words, cache.root)]
    script = f'set -o pipefail; "$@" {redirect}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if "|" not in redirect:
        assert done.returncode == (2 if redirect == "> /dev/full" else 0), done.stderr


@pytest.mark.parametrize("words", ["ls", "du", "verify", "gc", "doctor"])
def test_pipes_show_progress(
    kvtier: Kvtier, cache: Cache, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    cache.put(range(3))
    monkeypatch.setattr(report, "LINE_EVERY_S", 1000.0)
    said = kvtier(words, *arguments((words,), cache.root), "--json")
    assert said.err == "", "it did not take that long"
    monkeypatch.setattr(report, "LINE_EVERY_S", 0.0)
    said = kvtier(words, *arguments((words,), cache.root), "--json")
    assert said.json
    assert re.search(r"^kvtier: \d+.* \w+, \d+ s$", said.err, re.MULTILINE)
