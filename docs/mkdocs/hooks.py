"""Put into the pages what the code already says: settings, metrics, commands, other files, diagrams.

A page asks for it with a comment on a line of its own, ``<!-- generated: settings max_bytes ttl_s -->``, or
is one file of the repository, ``<!-- include: CHANGELOG.md -->``. A fence ``mermaid`` with a sequence diagram
becomes an SVG drawing here, because mkdocs-material would load mermaid from the net.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import typer.main

from kvtier import _schema as schema
from kvtier._cli.main import app
from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES, Metric
from kvtier.tiers import _registry as registry

ROOT = Path(__file__).resolve().parents[2]
OWN_TIERS = ("fs", "dummy")

GENERATED = re.compile(r"^<!-- generated: (?P<kind>\w+) ?(?P<rest>.*?) -->$", re.MULTILINE)
INCLUDED = re.compile(r"^<!-- include: (?P<path>\S+) -->$", re.MULTILINE)
_DIAGRAM = re.compile(r"^```mermaid\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKED = re.compile(r"^( *```\w+) [^\n`]+$", re.MULTILINE)  # with a word for the tests
_PICTURE = re.compile(  # those that follow the page's light or dark scheme
    r"^!\[(?P<label>[^]]*)\]\((?P<path>[\w./-]*architecture\.svg)\)$", re.MULTILINE
)
_ABSOLUTE_SOURCE = re.compile(r'<(?:script|link|img|iframe)[^>]*\s(?:src|href)="(?:https?:)?//')


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page's text with everything generated in it. mkdocs calls this for each page."""
    if included := INCLUDED.search(markdown):
        return _as_page((ROOT / included["path"]).read_text(encoding="utf-8"))
    markdown = _MARKED.sub(r"\1", markdown)
    markdown = GENERATED.sub(lambda match: GENERATORS[match["kind"]](match["rest"]), markdown)
    markdown = _DIAGRAM.sub(lambda match: drawing(match["text"]), markdown)
    folder = Path(page.file.abs_src_path).parent
    return _PICTURE.sub(lambda match: _inlined(folder / match["path"], match["label"]), markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Return the page as it is.

    Raises:
        ValueError: the page would load something from another host.
    """
    if found := _ABSOLUTE_SOURCE.search(output):
        raise ValueError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output


def _as_page(text: str) -> str:
    """Return a file of the repository as a page: links to files that the site lacks become plain words."""
    return re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)


def _inlined(path: Path, label: str) -> str:
    """Return a drawing as a part of the page, so that it follows the page's light or dark scheme."""
    svg = path.read_text(encoding="utf-8")
    return f'<figure class="diagram" role="img" aria-label="{escape(label)}">\n{svg.strip()}\n</figure>'


# --- settings, metrics, commands ---------------------------------------------------------------------


def settings(rest: str) -> str:
    """Return a table of the named settings: kvtier's own, or with a first word ``fs:`` those of that tier."""
    kind, _, names = rest.rpartition(":")
    rows = {_name_of(row): row for row in schema.tables()[kind].splitlines()[2:]}
    chosen = names.split() or rows
    return "\n".join(
        ["| Setting | Type | Default | Meaning |", "|---|---|---|---|", *(rows[n] for n in chosen)]
    )


def _name_of(row: str) -> str:
    return row.split("`", 2)[1]


def metrics(_: str) -> str:
    """Return the tables of counters and gauges."""
    parts = []
    for title, found in (("Counters", [*COUNTERS.values(), *BYTES.values()]), ("Gauges", [*GAUGES.values()])):
        rows = [f"| `{one.name}` | {_code(one.labels)} | {one.documentation} |" for one in found]
        parts += [f"## {title}\n", "| Metric | Labels | Meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def reasons(_rest: str) -> str:
    """Return a table for each set of reasons: what the label can be, and what it means."""
    with_reasons = [metric for metric in COUNTERS.values() if metric.reasons]
    parts = []
    for _, group in itertools.groupby(sorted(with_reasons, key=_words), key=_words):
        found = list(group)
        parts.append(_reason_table(" and ".join(f"`{one.name}`" for one in found), found[0].reasons))
    for name in OWN_TIERS:
        parts.append(_reason_table(f"Transfers of tier `{name}`, besides", registry.load(name).reasons))
    return "\n".join(parts)


def _words(metric: Metric) -> tuple[str, ...]:
    return tuple(metric.reasons)


def _reason_table(title: str, words: Any) -> str:
    rows = [f"| `{word}` | {text} |" for word, text in words.items()]
    return "\n".join([f"### {title}\n", "| Reason | Meaning |", "|---|---|", *rows, ""])


def _code(words: Any) -> str:
    return ", ".join(f"`{word}`" for word in words)


def commands(_: str) -> str:
    """Return every command with its arguments and options."""
    return "\n".join(_described(typer.main.get_command(app), "kvtier"))


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each command and its path, ``kvtier`` first."""
    yield path, command
    if hasattr(command, "list_commands"):
        context = command.make_context(path, [], resilient_parsing=True)
        for name in command.list_commands(context):
            yield from walk(command.get_command(context, name), f"{path} {name}")


def _described(root: Any, name: str) -> Iterator[str]:
    for path, command in walk(root, name):
        if path == name:
            continue
        yield f"## {path}\n\n{_plain(command.help)}\n"
        if command.params:
            yield from (
                "| Parameter | Default | Meaning |",
                "|---|---|---|",
                *map(_parameter, command.params),
                "",
            )


def _plain(text: str | None) -> str:
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text or "").replace("[", "\\[").strip()


def _parameter(one: Any) -> str:
    names = ", ".join(one.opts) if one.opts[0].startswith("-") else ""
    value = "" if getattr(one, "is_flag", False) else one.metavar or one.name.upper()
    default = "" if one.default in (None, False) or callable(one.default) else f"`{one.default}`"
    meaning = (one.help or "").replace("|", "\\|")
    return f"| `{f'{names} {value}'.strip()}` | {'required' if one.required else default} | {meaning} |"


def speed(name: str) -> str:
    """Return the table of the times in what ``kvtier bench versus --json`` wrote: a line for each measure."""
    rows = _versus(name)["Speed"]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    lines = [f"| measure | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for measure in dict.fromkeys(row["measure"] for row in rows):
        cells = {row["system"]: _compared(row) for row in rows if row["measure"] == measure}
        lines.append(f"| {measure} | {' | '.join(cells.get(system, '') for system in systems)} |")
    return "\n".join(lines)


def _compared(row: dict[str, Any]) -> str:
    """Return a median, and the ratio with its bounds where there is one."""
    value = f"{row['value']:.3g}" if row["value"] < 100 else f"{row['value']:.0f}"
    if row["ratio"] is None:
        return value
    bounds = "" if row["low"] is None else f", {row['low']:.2f} to {row['high']:.2f}"
    other = "" if row["against"] == "kvtier" else f" of *{row['against']}*"
    return f"{value} ({row['ratio']:.2f}{other}{bounds})"


def faults(name: str) -> str:
    """Return the table of the faults in what ``kvtier bench versus --json`` wrote."""
    data = _versus(name)
    names = list(dict.fromkeys(row["fault"] for row in data["Outcome"]))
    words = ("fault", "system", "wrong", "failed", "longest_s", "from_cache", "recovers")
    lines = ["| fault | system | wrong | failed | longest wait, s | tokens from the cache | recovers |"]
    lines.append("|---" * len(words) + "|")
    for row in sorted(data["Outcome"], key=lambda row: names.index(row["fault"])):
        lines.append(f"| {' | '.join(row[word] for word in words)} |")
    lines.append("")
    lines += [f"- {row['system']}: not run: {row['reason']}." for row in data["NotRun"]]
    return "\n".join(lines)


def _versus(name: str) -> Any:
    return json.loads((ROOT / f"docs/assets/{name}.json").read_text(encoding="utf-8"))


GENERATORS: dict[str, Callable[[str], str]] = {
    "settings": settings,
    "metrics": metrics,
    "reasons": reasons,
    "commands": commands,
    "speed": speed,
    "faults": faults,
}

# --- sequence diagrams -------------------------------------------------------------------------------

_ACTOR = re.compile(r"participant (\w+)(?: as (.+))?")
_NOTE = re.compile(r"Note over (\w+)(?:, ?(\w+))?: (.+)")
_MESSAGE = re.compile(r"(\w+)(-->>|->>)(\w+): (.+)")
_CHARACTER, _LINE, _MARGIN = 6.7, 34, 12


def drawing(text: str) -> str:
    """Return a sequence diagram in mermaid's notation as an SVG drawing.

    Raises:
        ValueError: a line is neither a participant, a message nor a note.
    """
    actors: dict[str, str] = {}
    steps: list[tuple[str, str, str, str]] = []
    for line in filter(None, map(str.strip, text.splitlines()[1:])):
        if found := _ACTOR.fullmatch(line):
            actors[found[1]] = found[2] or found[1]
        elif found := _NOTE.fullmatch(line):
            steps.append(("note", found[1], found[2] or found[1], found[3]))
        elif found := _MESSAGE.fullmatch(line):
            steps.append((found[2], found[1], found[3], found[4]))
        else:
            raise ValueError(f"not a line of a sequence diagram: {line}")
    return _drawn(actors, steps)


def _drawn(actors: dict[str, str], steps: list[tuple[str, str, str, str]]) -> str:
    at = dict(zip(actors, _columns(actors, steps), strict=True))
    width = max(at.values()) + _half(actors[[*actors][-1]]) + _MARGIN
    width = max(width, *(_right(at, *step) for step in steps))
    height = 2 * _LINE + _LINE * len(steps)
    parts = [f'<svg viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}">']
    for name, x in at.items():
        half = _half(actors[name])
        parts.append(f'<line class="life" x1="{x}" y1="30" x2="{x}" y2="{height - 6}"/>')
        parts.append(f'<rect class="actor" x="{x - half}" y="4" width="{2 * half}" height="26" rx="4"/>')
        parts.append(f'<text class="name" x="{x}" y="21">{escape(actors[name])}</text>')
    for row, step in enumerate(steps):
        parts += _step(at, 2 * _LINE + _LINE * row, *step)
    return '<figure class="diagram sequence">' + "".join(parts) + "</svg></figure>"


def _columns(actors: dict[str, str], steps: list[tuple[str, str, str, str]]) -> Iterator[float]:
    """Yield the middle of each column, as far apart as the labels between two neighbours need."""
    names = [*actors]
    x = _MARGIN + _half(actors[names[0]])
    yield x
    for left, right in itertools.pairwise(names):
        needed = [
            len(label)
            for kind, one, other, label in steps
            if {one, other} == {left, right} or (kind != "note" and one == other == left)
        ]
        labels = max(needed, default=0) * _CHARACTER + 24
        x += max(labels, _half(actors[left]) + _half(actors[right]) + 16)
        yield round(x)


def _half(label: str) -> float:
    return round(len(label) * _CHARACTER / 2 + 10)


def _right(at: dict[str, float], kind: str, one: str, other: str, label: str) -> float:
    if kind == "note":
        return (at[one] + at[other]) / 2 + _half(label) + _MARGIN
    return at[one] + len(label) * _CHARACTER + 2 * _MARGIN if one == other else 0


def _step(at: dict[str, float], y: int, kind: str, one: str, other: str, label: str) -> Iterator[str]:
    left, right = at[one], at[other]
    middle = (left + right) / 2
    if kind == "note":
        half = max(_half(label), abs(right - left) / 2 + 10)
        yield f'<rect class="note" x="{middle - half}" y="{y - 16}" width="{2 * half}" height="24" rx="3"/>'
        yield f'<text class="name" x="{middle}" y="{y}">{escape(label)}</text>'
        return
    style = "reply" if kind == "-->>" else "call"
    if one == other:
        yield f'<path class="{style}" d="M{left} {y - 8}h14v12h-8"/>'
        yield f'<path class="head" d="M{left + 2} {y + 4}l8 -4v8z"/>'
        yield f'<text x="{left + 20}" y="{y + 2}">{escape(label)}</text>'
        return
    step = 1 if right > left else -1
    yield f'<line class="{style}" x1="{left}" y1="{y}" x2="{right - 6 * step}" y2="{y}"/>'
    yield f'<path class="head" d="M{right} {y}l{-8 * step} -4v8z"/>'
    yield f'<text class="name" x="{middle}" y="{y - 6}">{escape(label)}</text>'
