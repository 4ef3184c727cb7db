"""What the documentation shows is true: its Python runs, its JSON is a configuration that is accepted."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import TieringConfig
from kvtier.errors import KVTierError
from kvtier.telemetry.catalogue import BYTES, COUNTERS, GAUGES
from kvtier.tiers.dummy import DummyTier
from kvtier.tiers.fs import FsTier

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL
)
_SHOWN_BY = re.compile(r"`(test_\w+)`(?:: ([^`]+?))?(?=, `|, through|$)")
_SHELL = ("bash", "console", "sh", "shell")
_IN_SHELL = re.compile(r"--kv-transfer-config[ =]+'(\{.*?\})'", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the number of its first line, what follows the fence, and its text."""

    page: Path
    line: int
    info: tuple[str, ...]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, match.start()) + 2,
            tuple(match["info"].split()),
            textwrap.dedent(match["text"]),
        )
        for match in _FENCE.finditer(text)
    ]


def python_of(page: Path) -> list[Block]:
    return [
        block
        for block in blocks_of(page)
        if block.info[:1] == ("python",) and "no-run" not in block.info and not excerpt_of(block)
    ]


def excerpt_of(block: Block) -> Path | None:
    """Return the file below examples/ that a block shows a part of, after ``file=``."""
    return next((EXAMPLES / word[5:] for word in block.info if word.startswith("file=")), None)


def run(blocks: list[Block]) -> None:
    """Run blocks one after the other in one namespace and on one event loop; they may await."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks:
            source = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
            code = compile(source, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(_awaited(eval(code, namespace)))
            else:
                exec(code, namespace)


async def _awaited(coroutine: Any) -> None:
    await coroutine


def json_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each JSON text of a page, and where it is: in blocks of its own and in commands."""
    for block in blocks_of(page):
        if block.info[:1] == ("json",):
            yield block.where, block.text
        elif block.info[:1] and block.info[0] in _SHELL:
            for found in _IN_SHELL.findall(block.text):
                yield block.where, found


def settings_in(value: object) -> Iterator[dict[str, Any]]:
    """Yield the settings of kvtier in a JSON value."""
    if not isinstance(value, dict):
        return
    if "kv_connector_extra_config" in value:
        extra = value["kv_connector_extra_config"]
        if extra.get("spec_name") == "KVTierOffloadingSpec" or "secondary_tiers" in extra:
            yield extra
    elif "secondary_tiers" in value:
        yield value
    else:
        for inner in value.values():
            yield from settings_in(inner)


def validate(where: str, text: str) -> int:
    """Check one JSON text; return how many configurations it has."""
    found = list(settings_in(json.loads(text)))
    for settings in found:
        try:
            TieringConfig.from_extra_config(settings)
        except KVTierError as error:
            raise AssertionError(f"{where}: {error}") from error
    return len(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(python_of(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_configurations_of_a_page_are_accepted(page: Path) -> None:
    for where, text in json_of(page):
        validate(where, text)


def table_of(page: Path, heading: str) -> list[tuple[str, ...]]:
    """Return the cells of the rows of a table, the heading's row not among them."""
    lines = page.read_text().splitlines()
    start = lines.index(heading) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def test_the_metrics_page_has_every_metric_and_no_other() -> None:
    told = table_of(ROOT / "docs" / "vllm.md", "| metric | labels | what it says |")
    metrics = [*COUNTERS.values(), *BYTES.values(), *GAUGES.values()]
    assert told == [(code([metric.name]), code(metric.labels), metric.documentation) for metric in metrics]


def test_the_metrics_page_has_every_reason_and_no_other() -> None:
    told = table_of(ROOT / "docs" / "vllm.md", "| metric | `reason` | meaning |")
    metrics: dict[tuple[str, str], list[str]] = {}
    for metric in COUNTERS.values():
        assert bool(metric.reasons) == ("reason" in metric.labels), metric.name
        for reason in metric.reasons.items():
            metrics.setdefault(reason, []).append(metric.name)
    own = [("tier " + code([name]), tier.reasons) for name, tier in (("fs", FsTier), ("dummy", DummyTier))]
    assert told == [
        *((code(names), code([word]), text) for (word, text), names in metrics.items()),
        *((name, code([word]), text) for name, words in own for word, text in words.items()),
    ]


def test_the_tests_that_are_to_show_a_feature_are_there() -> None:
    features = table_of(ROOT / "docs" / "vllm.md", "| feature | vLLM's own tiering | kvtier | shown by |")
    named = [found for row in features for found in _SHOWN_BY.findall(row[-1])]
    assert len(named) >= len(features) - 1  # the first row is shown by all
    for module, words in named:
        tests = (ROOT / "tests" / "integration" / f"{module}.py").read_text().replace("_", " ")
        assert [each for each in words.split(", ") if each.strip() and each not in tests] == [], module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_excerpts_of_a_page_are_in_their_files(page: Path) -> None:
    for block in blocks_of(page):
        file = excerpt_of(block)
        if file is not None:
            shown = [textwrap.indent(block.text, indent) for indent in ("", " " * 4)]
            assert any(text in file.read_text() for text in shown), f"{block.where}: not in {file}"


# --- the check itself ----------------------------------------------------------------------------

SAMPLE = """
Text.

```python
import asyncio
value = 1
```

- in a list

  ```python
  await asyncio.sleep(0)
  from pathlib import Path
  Path("out").write_text(str(value + 1))
  ```

```python no-run
raise RuntimeError
```

```json
{"kv_connector_extra_config": {"spec_name": "KVTierOffloadingSpec", "cpu_bytes_to_use": "1GiB"}}
```

```bash
serve --kv-transfer-config '{
  "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "dummy"}]}}'
```
"""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(SAMPLE)
    return page


def test_blocks_share_a_namespace_and_may_await(sample: Path, tmp_path: Path) -> None:
    assert [block.line for block in python_of(sample)] == [5, 12]
    run(python_of(sample))
    assert (tmp_path / "out").read_text() == "2"


def test_a_block_that_fails_is_told_with_its_line(sample: Path) -> None:
    sample.write_text("```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(python_of(sample))
    assert caught.traceback[-1].lineno + 1 == 3


def test_configurations_are_found_and_checked(sample: Path) -> None:
    assert [validate(where, text) for where, text in json_of(sample)] == [1, 1]
    sample.write_text(SAMPLE.replace("dummy", "dumy"))
    with pytest.raises(AssertionError, match=r"page.md:\d+: .*dumy"):
        [validate(where, text) for where, text in json_of(sample)]
    sample.write_text(SAMPLE.replace('"1GiB"', '"1GiB",'))
    with pytest.raises(json.JSONDecodeError):
        [validate(where, text) for where, text in json_of(sample)]
