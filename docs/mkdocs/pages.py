"""Keep what the code already says in the pages: settings, metrics, commands, figures, install commands.

``python docs/mkdocs/pages.py`` rewrites the pages; a test fails while one is stale. A page asks for a table
with two comments, and this puts the table between them:

    <!-- generated: settings max_bytes ttl_s -->
    <!-- end -->

The requirements in ``pip install`` commands follow ``kvtier._plugins.IS_PUBLISHED``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main

from kvtier import _plugins as plugins
from kvtier._cli import app
from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES, Metric
from kvtier.tiers import _registry as registry
from kvtier_tools import settings_tables
from kvtier_tools.size import command as size

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
]

_GENERATED = re.compile(
    r"^<!-- generated: (?P<kind>\w+) ?(?P<rest>[^\n]*?) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL
)
_INSTALL = re.compile(r"\bpip install (?P<what>[^\n`#&|]+)")
_OURS = re.compile(
    r"(?P<quote>['\"]?)(?P<place>\.|(?:\./plugins/)?kvtier(?:-[a-z0-9]+)?)(?P<extra>\[[a-z,]+\])?(?P=quote)"
)


def refreshed(text: str) -> str:
    """Return a page's text with its tables and install commands as they are now."""
    return _INSTALL.sub(_installing, _GENERATED.sub(_filled, text))


def _filled(match: re.Match[str]) -> str:
    """Return a place with its table."""
    made = GENERATORS[match["kind"]](match["rest"]).strip("\n")
    request = match[0].partition("\n")[0]
    return f"{request}\n\n{made}\n\n<!-- end -->"


def _installing(command: re.Match[str]) -> str:
    """Return an install command; one with ``-e`` is for developers in that folder, and stays as it is."""
    words = command["what"].split(" ")
    if "-e" in words:
        return command[0]
    return "pip install " + " ".join(map(_requirement, words))


def _requirement(word: str) -> str:
    found = _OURS.fullmatch(word)
    if found is None:
        return word
    name = "kvtier" if found["place"] == "." else found["place"].removeprefix("./plugins/")
    return plugins.requirement(name, (found["extra"] or "")[1:-1])


def checkout(_: str) -> str:
    """Return where install commands are to be run, while kvtier is on no package index."""
    if plugins.IS_PUBLISHED:
        return ""
    return (
        "kvtier is not on a package index yet: run the `pip install` commands of all pages in a checkout of "
        "the repository. Building the native library takes a C compiler."
    )


def settings(rest: str) -> str:
    """Return a table of the named settings: kvtier's own, or a tier's after a first word such as ``fs:``."""
    kind, _, names = rest.rpartition(":")
    rows = {_name_of(row): row for row in settings_tables.tables()[kind].splitlines()[2:]}
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
    """Return a table of words and meanings for each set of reasons."""
    with_reasons = [metric for metric in COUNTERS.values() if metric.reasons]
    parts = []
    for _, group in itertools.groupby(sorted(with_reasons, key=_words), key=_words):
        found = list(group)
        parts.append(_reason_table(" and ".join(f"`{one.name}`" for one in found), found[0].reasons))
    parts.append(_reason_table("Transfers of tier `fs`, besides", registry.load("fs").reasons))
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
    cells = (f"`{f'{names} {value}'.strip()}`", "required" if one.required else default, one.help or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def speed(name: str) -> str:
    """Return the times of a report of ``kvtier bench versus --json``, a line for each measure."""
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
    """Return the faults of a report of ``kvtier bench versus --json``."""
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


_NAMES = {"kvtier": "kvtier", "vLLM native": "vLLM's own tiering", "LMCache": "LMCache"}
_FAULTS = {
    "one bit flipped": "one bit flips in each stored chunk",
    "second half zeros": "a crash leaves zeros in half of each file",
    "weights replaced in place": "the weights are replaced in place",
    "kill -9 of the cache's process": "the cache's process is killed",
    "SIGSTOP of the cache's process for 15 s": "the cache's process hangs for 15 s",
    "one bit flipped in kept host memory, engine restarted": "one bit flips in a restarted engine's memory",
    "disk full": "the disk is full",
    "two tensor-parallel sizes, one directory": "two tensor-parallel sizes share a directory",
}


def outcomes(name: str) -> str:
    """Return a short outcome of each fault and system, of a report of ``kvtier bench versus --json``."""
    found = {(row["fault"], row["system"]): _outcome(row) for row in _versus(name)["Outcome"]}
    lines = [f"| what happens | {' | '.join(_NAMES.values())} |", "|---" * (len(_NAMES) + 1) + "|"]
    for fault, words in _FAULTS.items():
        cells = [found.get((fault, system), "not run") for system in _NAMES]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fleet(name: str) -> str:
    """Return the times of a report of ``kvtier bench fleet --json``."""
    lines = ["| way | TTFT, ms | ratio | tokens from the cache | wrong |", "|---" * 5 + "|"]
    for row in _versus(name)["Served"]:
        bounds = f" ({row['low']:.2f} to {row['high']:.2f})" if row["low"] != row["high"] else ""
        cells = (
            row["way"],
            f"{row['ttft_ms']:.0f}",
            f"{row['ratio']:.2f}{bounds}",
            row["from_cache"],
            row["wrong"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fleet_faults(name: str) -> str:
    """Return the faults of a report of ``kvtier bench fleet --kvcr PYTHON --json``."""
    lines = ["| fault | way | wrong | tokens from the cache | longest wait, s |", "|---" * 5 + "|"]
    rows = _versus(name)["Fault"]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        for row in rows:
            if row["fault"] == fault:
                cells = (fault, row["way"], row["wrong"], row["from_cache"], f"{row['longest_s']:.2g}")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _outcome(row: dict[str, Any]) -> str:
    wrong, failed = (row[word].partition(",")[0] for word in ("wrong", "failed"))
    later = max(map(int, re.findall(r"(\d+) s later", row["recovers"])), default=0)
    when = " when the engine is restarted" if "started again" in row["recovers"] else ""
    parts = [
        "0 wrong" if wrong.startswith("0 ") else f"**{wrong} wrong**",
        "0 failed" if failed.startswith("0 ") else f"**{failed} failed**",
        f"{row['longest_s']} s",
        "**stays wrong**"
        if row["recovers"].startswith("no")
        else f"recovers{f' in {later} s' * bool(later)}{when}",
    ]
    return ", ".join(parts)


def first_token(name: str) -> str:
    """Return the times to the first token of a report of ``kvtier bench versus --json``."""
    rows = _versus(name)["Speed"]
    lines = [f"| time to the first token | {' | '.join(_NAMES.values())} |", "|---" * (len(_NAMES) + 1) + "|"]
    kinds = {"cold": "computed", "host hit": "from host memory", "storage hit": "from files, after a restart"}
    for kind, words in kinds.items():
        times = {row["system"]: row["value"] for row in rows if row["measure"] == f"TTFT {kind}, ms"}
        lines.append(f"| {words} | {' | '.join(f'{times[system]:.0f} ms' for system in _NAMES)} |")
    return "\n".join(lines)


def first_token_gpu(name: str) -> str:
    """Return the times to the first token on a GPU, of a report of ``nox -s gpu -- --json``."""
    data = _versus(name)
    rows = data["first_token"]["result"]["FirstToken"]
    ms = {it["place"]: it["ttft_ms"] for it in rows if (it["system"], it["tokens"]) == ("kvtier", 8192)}
    return (
        f"On a GPU ({data['machine']['device'].partition(',')[0]}, vLLM 0.33, an 8B model, 8,192 tokens): "
        f"computed {ms['computed']:.0f} ms, from host memory {ms['host memory']:.0f} ms, "
        f"from that machine's slow disk {ms['files']:.0f} ms."
    )


def models(_: str) -> str:
    """Return what ``kvtier size`` computes for well-known models, from fields of their configurations."""
    lines = [
        "| model | layers | KiB per token | chunk | tokens in 64 GiB | 32,768 tokens |",
        "|---|---|---|---|---|---|",
    ]
    for model in _versus("models"):
        found = size.sizes_of(model["config"], model["name"])
        kinds = ", ".join(f"{layers} {kind}" for kind, layers in _layers(found.groups).items())
        chunk, room, load = found.groups[0], found.rooms[0], found.loads[-1]
        lines.append(
            f"| {model['name']} | {kinds} | {found.bytes_per_token / 1024:.4g} | "
            f"{chunk.tokens_per_chunk} tokens, {chunk.chunk_bytes} | {room.tokens:,} | {load.loaded} |"
        )
    return "\n".join(lines)


def _layers(groups: Sequence[size.Chunks]) -> Counter[str]:
    """Return the number of layers of each kind."""
    layers: Counter[str] = Counter()
    for group in groups:
        layers[group.group] += group.layers
    return layers


def _versus(name: str) -> Any:
    return json.loads((ROOT / f"docs/assets/{name}.json").read_text(encoding="utf-8"))


GENERATORS: dict[str, Callable[[str], str]] = {
    "checkout": checkout,
    "settings": settings,
    "metrics": metrics,
    "reasons": reasons,
    "commands": commands,
    "speed": speed,
    "faults": faults,
    "outcomes": outcomes,
    "fleet": fleet,
    "fleet_faults": fleet_faults,
    "first_token": first_token,
    "first_token_gpu": first_token_gpu,
    "models": models,
}


def main() -> None:
    """Rewrite the pages that are stale."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := refreshed(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"rewrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
