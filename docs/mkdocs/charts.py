"""Draw the charts of docs/benchmarks.md from what ``kvtier bench ... --json`` wrote.

``python docs/mkdocs/charts.py`` reads ``docs/assets/benchmarks/*.json`` and writes an SVG beside each file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "benchmarks"

_WIDTH, _LABELS, _VALUES = 790, 290, 165  # pixels: in all, left of the bars, right of them
_BAR, _GAP, _TOP = 15, 9, 48
_SERIES = "abc"
_COLOURS = {
    "": "--ink: #1d2733; --soft: #5b6775; --a: #2f6cab; --b: #9aa7b5; --c: #7a9e3f; --hot: #b3541e",
    "dark": "--ink: #e6ebf1; --soft: #a9b5c2; --a: #7fb2ea; --b: #5d6b7a; --c: #a9cf6a; --hot: #f0a36b",
}
_STYLE = f"""<style>
.chart {{ {_COLOURS[""]} }}
@media (prefers-color-scheme: dark) {{ .chart {{ {_COLOURS["dark"]} }} }}
[data-md-color-scheme="default"] .chart {{ {_COLOURS[""]} }}
[data-md-color-scheme="slate"] .chart {{ {_COLOURS["dark"]} }}
.chart text {{ fill: var(--ink) }}
.chart .end {{ text-anchor: end }}
.chart .soft {{ fill: var(--soft); font-size: 11px }}
.chart .a {{ fill: var(--a) }}
.chart .b {{ fill: var(--b) }}
.chart .c {{ fill: var(--c) }}
.chart .range {{ stroke: var(--ink); fill: none }}
.chart .limit {{ stroke: var(--hot); stroke-dasharray: 4 3 }}
.chart .hot {{ fill: var(--hot); font-size: 11px; text-anchor: middle }}
</style>"""
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
font-family="system-ui, sans-serif" font-size="12">
{style}
<g class="chart">
{body}
</g>
</svg>
"""


@dataclass(frozen=True)
class Bar:
    """One bar: its row, its series, its length as a ratio, the range of that, and the text behind it."""

    row: str
    series: str
    value: float
    low: float | None
    high: float | None
    text: str


def bars_of(data: dict[str, Any]) -> Iterator[Bar]:
    """Yield the bars of a benchmark's JSON document, in the order of the document."""
    for cost in data.get("Cost", ()):
        call = cost["call"].partition(": both")[0]
        if cost["ratio"] is not None and cost["policy"] == "lru" and cost["unit"] == "us" and ":" not in call:
            text = f"{cost['kvtier']:.2f} / {cost['vllm']:.2f} µs"
            yield Bar(call, f"tier: {cost['tier']}", cost["ratio"], None, None, text)
    for row in data.get("Throughput", ()):
        if row["ratio"] is not None:
            kib, text = row["chunk_bytes"] // 1024, f"{row['gb_s']:.2f} / {row['reference_gb_s']:.2f} GB/s"
            label = f"{row['verb']}, " + (f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB")
            yield Bar(label, row["subject"], row["ratio"], row["ratio_low"], row["ratio_high"], text)


def draw(data: dict[str, Any]) -> str:
    """Return a bar chart as an SVG document, which follows the reader's light or dark scheme."""
    bars = list(bars_of(data))
    names = list(dict.fromkeys(bar.series for bar in bars))
    scale = (_WIDTH - _LABELS - _VALUES) / max(1.0, *(bar.high or bar.value for bar in bars))
    parts, y = [_legend(names)] if len(names) > 1 else [], _TOP
    for label in dict.fromkeys(bar.row for bar in bars):
        row = [bar for bar in bars if bar.row == label]
        parts.append(_text(_LABELS - 8, y + len(row) * _BAR / 2 + 3, label, "end"))
        for bar in row:
            parts += _drawn(bar, y, scale, _SERIES[names.index(bar.series)])
            y += _BAR
        y += _GAP
    limit = _LABELS + scale
    parts.append(f'<path class="limit" d="M{limit:.0f} {_TOP - 8}V{y - 4}"/>')
    parts.append(_text(limit, _TOP - 13, "1.0", "hot"))
    parts += [_text(8, y + 16, _words(machine), "soft") for machine in data.get("Machine", ())]
    return _SVG.format(width=_WIDTH, height=y + 26, style=_STYLE, body="\n".join(parts))


def _drawn(bar: Bar, y: int, scale: float, colour: str) -> Iterator[str]:
    width = bar.value * scale
    yield f'<rect class="{colour}" x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR - 2}"/>'
    if bar.low is not None and bar.high is not None:
        low, high, middle = _LABELS + bar.low * scale, _LABELS + bar.high * scale, y + _BAR / 2 - 1
        yield f'<path class="range" d="M{low:.1f} {middle}H{high:.1f}m0 -3v6M{low:.1f} {middle - 3}v6"/>'
    yield _text(_WIDTH - _VALUES + 10, y + 10, f"{bar.value:.2f}", "")
    yield _text(_WIDTH - _VALUES + 42, y + 10, bar.text, "soft")


def _legend(names: list[str]) -> str:
    return "".join(
        f'<rect class="{colour}" x="{8 + 110 * index}" y="8" width="12" height="12"/>'
        + _text(25 + 110 * index, 18, name)
        for index, (name, colour) in enumerate(zip(names, _SERIES, strict=False))
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(text)}</text>'


def _words(machine: dict[str, Any]) -> str:
    parts = [
        machine["processor"],
        f"{machine['cores']} cores",
        f"load {machine['load']}",
        f"vLLM {machine['vllm']}",
    ]
    return ", ".join([*parts, *([machine["file_system"]] if machine["file_system"] else [])])


def write_all() -> None:
    """Write the chart of every JSON file in the folder."""
    for path in FOLDER.glob("*.json"):
        path.with_suffix(".svg").write_text(draw(json.loads(path.read_text())))


if __name__ == "__main__":
    write_all()
