"""Complete the pages for the site: other files, diagrams. ``pages.py`` keeps the generated tables in them.

A page can be one file of the repository: ``<!-- include: CHANGELOG.md -->``. A fence ``mermaid`` with a
sequence diagram becomes an SVG drawing here, because mkdocs-material would load mermaid from the net.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

INCLUDED = re.compile(r"^<!-- include: (?P<path>\S+) -->$", re.MULTILINE)
_DIAGRAM = re.compile(r"^```mermaid\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKED = re.compile(r"^( *```\w+) [^\n`]+$", re.MULTILINE)  # with a word for the tests
_PICTURE = re.compile(  # those that follow the page's light or dark scheme
    r"^!\[(?P<label>[^]]*)\]\((?P<path>[\w./-]*architecture\.svg)\)$", re.MULTILINE
)
_ABSOLUTE_SOURCE = re.compile(r'<(?:script|link|img|iframe)[^>]*\s(?:src|href)="(?:https?:)?//')


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page's text with other files and diagrams in it. mkdocs calls this for each page."""
    if included := INCLUDED.search(markdown):
        return _as_page((ROOT / included["path"]).read_text(encoding="utf-8"))
    markdown = _MARKED.sub(r"\1", markdown)
    markdown = _DIAGRAM.sub(lambda match: drawing(match["text"]), markdown)
    folder = Path(page.file.abs_src_path).parent
    return _PICTURE.sub(lambda match: _inlined(folder / match["path"], match["label"]), markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Return the page as it is.

    Raises:
        ValueError: the page loads a file from another host.
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
