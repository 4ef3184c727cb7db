"""``kvtier explain``: explains hits and misses of requests, from an engine's log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, BinaryIO, Final

import msgspec
import typer

from kvtier._cli import JsonFlag
from kvtier._telemetry.explanation import PREFIX, Explanation
from kvtier_tools.report import finish, print_line, table

_LONGEST_LINE: Final = 2**20
_BEGIN = PREFIX + "{"
_decoder = msgspec.json.Decoder(Explanation)
_json = json.JSONDecoder()  # says where a value ends


class DamagedLine(msgspec.Struct, frozen=True):
    """A line that has the prefix, and no explanation that can be read behind it."""

    problem: str


@dataclass(frozen=True, slots=True)
class ExplainedLog:
    """The explanations in a log."""

    requests: list[dict[str, Any]]  # fields of the lines, in the log's order
    damaged: int  # lines that begin like an explanation but cannot be read
    other: int


def command(
    log: Annotated[
        typer.FileBinaryRead, typer.Argument(metavar="LOG", help="An engine's log; `-` is standard input.")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Show what each tier had of the prompts of explained requests, and why their prefixes ended.

    A request asks with `"kv_transfer_params": {"kvtier": {"explain": true}}`; the setting `explain_rate`
    explains a share of all. Exit status 1 if lines are damaged.

    Example: kvtier explain engine.log
    """
    found = explain(log)
    finish(found, _show, as_json=as_json, is_healthy=not found.damaged)


def explain(log: BinaryIO) -> ExplainedLog:
    requests: list[dict[str, Any]] = []
    damaged = other = 0
    # Even a file without line ends must fit into memory.
    for found in read(iter(partial(log.readline, _LONGEST_LINE), b"")):
        if isinstance(found, Explanation):
            requests.append(msgspec.to_builtins(found))
        elif isinstance(found, DamagedLine):
            damaged += 1
        else:
            other += 1
    return ExplainedLog(requests, damaged, other)


def read(lines: Iterable[bytes]) -> Iterator[Explanation | DamagedLine | None]:
    """Yield the explanation in each line of a log; None for other lines."""
    for line in lines:
        yield _found_in(line.decode(errors="replace"))


def _found_in(line: str) -> Explanation | DamagedLine | None:
    """Return the first explanation in a line that can be read."""
    problem, may_be_escaped = None, True
    start = line.find(_BEGIN)
    while start >= 0:
        text = line[start + len(PREFIX) :]
        is_escaped = text.startswith('{\\"')  # in a log whose lines are JSON themselves
        may_be_escaped = may_be_escaped and not text.startswith('{"')  # then it is part of a request's id
        try:
            if may_be_escaped or not is_escaped:
                text = _json.raw_decode('"' + text)[0] if is_escaped else text
                return _decoder.decode(text[: _json.raw_decode(text)[1]])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            problem = problem or DamagedLine(str(error))
        start = line.find(_BEGIN, start + 1)
    return problem


def _show(log: ExplainedLog) -> None:
    if not log.requests:
        print_line(
            "no explained request in the log: set explain_rate, or have a request ask for it (see --help)"
        )
    tiers = list(dict.fromkeys(tier for one in log.requests for tier in one["tokens"]))
    rows = [
        (
            one["request"],
            *(one["tokens"].get(tier, 0) for tier in tiers),
            *(one["prefix_end"], one["reason"]),
            [f"{tier}: {why}" for tier, why in one["tiers"].items()],
            f"{one['waited_s']:.3f}",
            one["hints"],
        )
        for one in log.requests
    ]
    table(
        "tokens found, by tier",
        ("request", *tiers, "prefix end", "reason", "why not from the tiers", "waited s", "hints"),
        rows,
    )
    if log.damaged:
        print_line(f"{log.damaged} damaged lines skipped")
