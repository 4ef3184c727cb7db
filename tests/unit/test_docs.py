"""The documentation is correct: its Python runs, its JSON is accepted, and its names exist."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvtier import TieringConfig, errors
from kvtier import _plugins as plugins
from kvtier import _reasons as reasons
from kvtier._cli import app
from kvtier._config import ENGINE_KEYS
from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES
from kvtier.errors import KVTierError
from kvtier.tiers import _registry as registry
from kvtier.tiers.fs import FsTier
from kvtier_tools import settings_tables
from tests.common import load_file

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

TELEMETRY = {
    name
    for module in ("kvtier/_telemetry/*.py", "kvtier/adapters/vllm/_telemetry/explain.py")
    for file in ROOT.glob(module)
    for name in re.findall(r'"(kvtier\.\w+)[".]', file.read_text())
}
"""Names of loggers, spans and attributes that look like modules."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL
)
_SHELL = ("bash", "console", "sh", "shell")
_IN_SHELL = re.compile(r"--kv-transfer-config[ =]+'(\{.*?\})'", re.DOTALL)
_SHOWN_BY = re.compile(r"`(test_\w+)`(?:: ([^`]+?))?(?=, `|, through|$)")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, first line number, info string and text."""

    page: Path
    line: int
    info: tuple[str, ...]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def excerpt_of(self) -> Path | None:
        """The file below examples/ whose part the block shows, after ``file=``."""
        return next((EXAMPLES / word[5:] for word in self.info if word.startswith("file=")), None)


def blocks_of(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = [
        Block(
            page,
            text.count("\n", 0, match.start()) + 2,
            tuple(match["info"].split()),
            textwrap.dedent(match["text"]),
        )
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if not languages or (block.info and block.info[0] in languages)]


# --- code and configurations --------------------------------------------------------------------------


@every_page
def test_page_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks run one after the other in one namespace and on one event loop; they may await."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks_of(page, "python"):
            if block.excerpt_of:
                continue
            source = "\n" * (block.line - 1) + block.text  # so a traceback names the page's line
            code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(_awaited(eval(code, namespace)))
            else:
                exec(code, namespace)


async def _awaited(coroutine: Any) -> None:
    await coroutine


@every_page
def test_page_configurations_work(page: Path) -> None:
    texts = [(block.where, block.text) for block in blocks_of(page, "json")]
    texts += [
        (block.where, found)
        for block in blocks_of(page, *_SHELL)
        for found in _IN_SHELL.findall(block.text.replace("\\\n", ""))
    ]
    installed = {info.name for info in registry.installed()}
    absent = set(plugins._OWN_TIERS) - installed  # in CI they have their own environments
    for where, text in texts:
        value = json.loads(text)
        for child in value.get("kv_connector_extra_config", {}).get("connectors", ()):  # of a MultiConnector
            value = child if "kv_connector_extra_config" in child else value
        try:
            if value.get("type") in installed:
                registry.validate(value, where)
            elif settings := value if "cpu_bytes_to_use" in value else value.get("kv_connector_extra_config"):
                tiers = [tier for tier in settings.get("secondary_tiers", ()) if tier["type"] not in absent]
                TieringConfig.from_extra_config({**settings, "secondary_tiers": tiers})
        except KVTierError as error:
            raise AssertionError(f"{where}: {error}") from error


@every_page
def test_excerpts_match_files(page: Path) -> None:
    for block in blocks_of(page):
        if block.excerpt_of:
            shown = [textwrap.indent(block.text, indent) for indent in ("", " " * 4)]
            assert any(text in block.excerpt_of.read_text() for text in shown), block.where


# --- generated parts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages() -> Any:
    """The module that maintains the generated parts of the pages."""
    return load_file("pages", DOCS / "mkdocs" / "pages.py")


def test_generated_parts_of_the_pages_are_current(pages: Any) -> None:
    stale = [page.name for page in pages.PAGES if pages.refreshed(page.read_text()) != page.read_text()]
    assert stale == [], "run python docs/mkdocs/pages.py"


def test_one_variable_changes_all_install_commands(pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from_checkout = "pip install . './plugins/kvtier-s3[tests]' torch  # pip install ./plugins/kvtier-redis"
    published = "pip install kvtier 'kvtier-s3[tests]' torch  # pip install kvtier-redis"
    assert pages.refreshed(published) == from_checkout
    monkeypatch.setattr(plugins, "IS_PUBLISHED", True)
    assert pages.refreshed(from_checkout) == published
    for page in pages.PAGES:
        assert "./plugins/kvtier-" not in "".join(
            re.findall("pip install(?! -e).*", pages.refreshed(page.read_text()))
        )


def test_configuration_page_is_complete() -> None:
    told = re.findall(r"^\| `(\w+)` \|", (DOCS / "configure.md").read_text(), re.MULTILINE)
    settings = [*TieringConfig.model_fields, *FsTier.Config.model_fields]
    assert sorted(told) == sorted(settings), "name each setting in one table of docs/configure.md"


def test_error_page_is_complete() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    public = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert set(re.findall(r"^## (\w+)", page, re.MULTILINE)) == public - {"KVTierError"}


# --- names --------------------------------------------------------------------------------------------

_CODE = re.compile(r"`([^`\n]+)`")
_VLLM_KEYS = {"enable_kv_cache_events", "publisher", "medium", "locality", "kv_connector_extra_config",
              "kv_connector_module_path", "kv_load_failure_policy", "kv_transfer_params", "kvtier",
              "explain", "session"}  # fmt: skip
_OWN_TO_VLLM = {"vllm:kv_offload_config_info"}
_SOURCES = {"kvtier": ROOT / "kvtier"} | {
    folder.name: folder for folder in (ROOT / "plugins").glob("*/src/kvtier_*") if folder.suffix == ""
}


def metrics() -> Mapping[str, Any]:
    return {metric.name: metric for metric in (*COUNTERS.values(), *BYTES.values(), *GAUGES.values())}


@pytest.fixture(scope="module")
def commands(pages: Any) -> dict[str, set[str]]:
    """Every command, and its options."""
    found = pages.walk(typer.main.get_command(app), "kvtier")
    return {path: {name for one in command.params for name in one.opts} for path, command in found}


def code_of(page: Path) -> str:
    """Return the code in a page's sentences, one piece per line, and its shell commands."""
    sentences = _FENCE.sub("", page.read_text())
    return "\n".join([*_CODE.findall(sentences), *(block.text for block in blocks_of(page, *_SHELL))])


def module_exists(dotted: str) -> bool:
    """Return whether a dotted name is one of our modules or defined in one. Imports nothing."""
    package, *names = dotted.split(".")
    place = _SOURCES.get(package)
    if place is None:
        return False
    while names and (place / names[0]).is_dir():
        place /= names.pop(0)
    if names and place.joinpath(f"{names[0]}.py").exists():
        place = place / f"{names.pop(0)}.py"
    file = place if place.suffix else place / "__init__.py"
    return all(re.search(rf"\b{name}\b", file.read_text()) for name in names)


@every_page
def test_page_names_exist(page: Path) -> None:
    code = code_of(page)
    groups = {group.name for group in vars(plugins).values() if isinstance(group, plugins.Group)}
    modules = (
        set(re.findall(r"(?<![\w/.-])kvtier(?:_\w+)?(?:\.\w+)+", code))
        - groups
        - {"kvtier.benchmarks"}
        - TELEMETRY
    )
    assert [name for name in modules if not module_exists(name)] == []

    paths = re.findall(r"(?<!\S)(?:tests|docs|examples|plugins|kvtier|\.ci)/[\w./-]+", code)
    assert [path for path in paths if not (ROOT / path).exists() and not path.endswith(".json")] == []

    sessions = re.findall(r"nox -s (\w+)", code)
    defined = (ROOT / "noxfile.py").read_text()
    assert [name for name in sessions if f"def {name}(" not in defined] == []

    known = metrics().keys() | _SOURCES.keys() | _OWN_TO_VLLM
    named = {name.removesuffix("_total") for name in re.findall(r"\b(?:kvtier_|vllm:)[a-z_]+[a-z]", code)}
    examples = {path.parent.name for path in EXAMPLES.glob("*/src/*/__init__.py")}
    if page.name != "metrics.md":  # compared with vLLM's
        assert named - known - examples == set()

    words = {word for name, table in vars(reasons).items() if name.isupper() and isinstance(table, Mapping)
             for word in table} | FsTier.reasons.keys()  # fmt: skip
    assert set(re.findall(r'reason="(\w+)"', code)) - words == set()

    settings = {
        name
        for table in settings_tables.tables().values()
        for name in re.findall(r"^\| `(\w+)`", table, re.M)
    }
    used = set(re.findall(r'"(\w+)": ', "\n".join(_CODE.findall(_FENCE.sub("", page.read_text())))))
    assert used - settings - ENGINE_KEYS - _VLLM_KEYS == set()


@every_page
def test_page_commands_exist(page: Path, commands: dict[str, set[str]]) -> None:
    for line in re.findall(r"^(?:\$ )?(kvtier [a-z-]+.*)", code_of(page), re.MULTILINE):
        *_, path = (path for path in itertools.accumulate(line.split(), "{} {}".format) if path in commands)
        assert path != "kvtier", line
        assert set(re.findall(r"(?<=\s)--[a-z-]+", line)) - {"--help"} <= commands[path], line


def test_named_tests_exist() -> None:
    lines = (DOCS / "vllm.md").read_text().splitlines()
    start = lines.index("| feature | vLLM's own tiering | kvtier | shown by |") + 2
    rows = [row.strip("| ").split("|") for row in itertools.takewhile(bool, lines[start:])]
    named = [found for row in rows for found in _SHOWN_BY.findall(row[-1].strip())]
    assert len(named) >= len(rows) - 1  # all of them share the first row
    for module, words in named:
        tests = (ROOT / "tests" / "integration" / f"{module}.py").read_text().replace("_", " ")
        assert [each for each in words.split(", ") if each.strip() and each not in tests] == [], module


def links_of(page: Path) -> Iterator[Path]:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", _FENCE.sub("", page.read_text())):
        yield page.parent / target


@every_page
def test_page_links_work(page: Path) -> None:
    assert [target for target in links_of(page) if not target.exists()] == []


def test_statistics_name_metrics() -> None:
    page = (DOCS / "python.md").read_text()
    rows = [row.split("|") for row in re.findall(r'^\| `\(".*', page, re.MULTILINE)]
    assert len(rows) > 10
    for _, keys, names, _ in rows:
        given = re.findall(r'\("(\w+)",? ?([\w, ]*)\)', keys)
        found = [(COUNTERS[word].name, ", ".join(COUNTERS[word].labels)) for word, _ in given]
        assert found == [
            (name, labels)
            for name, (_, labels) in zip(re.findall(r"`((?:kvtier_|vllm:)\w+)`", names), given, strict=True)
        ]
