"""``kvtier top``: the activity of engines' caches, from their metrics."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtier._cli import JsonFlag, printable
from kvtier_tools import report
from kvtier_tools.report import Bytes, Share

_TIMEOUT_S: Final = 5.0
_PIECE_BYTES: Final = 2**16
_MAX_PAGE_BYTES: Final = 2**26
_LARGEST: Final = 2.0**63
_REASONS: Final = 6
_SAMPLE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_HOST_PORT: Final = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]+")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BREAKER: Final = {0: "closed", 1: "half open", 2: "open"}
_PRIMARY: Final = "cpu"

LOADED, MISSES = "kvtier_loaded_chunks_total", "kvtier_misses_total"
READ, WRITTEN = "vllm:kv_offload_tiering_read_bytes_total", "vllm:kv_offload_tiering_write_bytes_total"

_UP, _USED, _CAPACITY = "kvtier_tier_up", "kvtier_tier_used_bytes", "kvtier_tier_capacity_bytes"
_QUEUED, _IN_FLIGHT = "kvtier_queued_transfers", "kvtier_in_flight_transfers"
_BREAKER_STATE = "kvtier_breaker_state"
GAUGES: Final = (_UP, _USED, _CAPACITY, _QUEUED, _IN_FLIGHT, _BREAKER_STATE)

Samples = Sequence[tuple[str, Mapping[str, str], float]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of one engine at one time."""

    at: float  # monotonic, in seconds
    samples: Samples

    def by(
        self, label: str, name: str, join: Callable[[list[float]], float] = sum, **labels: str
    ) -> dict[str, float]:
        """Return a metric by the values of a label, joined over the samples with ``labels``.

        Several engines on one port have several samples.
        """
        found: dict[str, list[float]] = {}
        for sample, its, value in self.samples:
            if sample == name and labels.items() <= its.items():
                found.setdefault(its.get(label, ""), []).append(value)
        return {key: join(values) for key, values in found.items()}


@dataclass(frozen=True, slots=True)
class TierView:
    """The activity of one tier of an engine, in the order of the table's columns.

    Rates are per second; None if there is no earlier sample.
    """

    tier: str  # its name; "cpu" is the primary tier
    is_up: bool | None  # None for the primary tier
    used_bytes: Bytes | None  # None if unknown
    capacity_bytes: Bytes | None  # None if unbounded
    hit_share: Share | None  # share of all chunks looked up since the last sample or the start
    read_bytes_s: Bytes | None  # promoted from it
    written_bytes_s: Bytes | None
    queued: int  # waiting puts and gets
    in_flight: int  # running puts and gets
    breaker_get: str | None
    breaker_put: str | None
    read_per_written: float | None  # total bytes read per byte written


_COLUMNS: Final = (
    *("tier", "up", "used", "of", "hits", "read/s", "written/s"),
    *("queued", "in flight", "get breaker", "put breaker", "read / written"),
)


@dataclass(frozen=True, slots=True)
class EngineView:
    """The activity of one engine's cache."""

    source: str  # the URL or file of its metrics
    error: str | None = None  # why they could not be read; the rest is then empty
    seconds: float | None = None  # interval of rates and shares; None: since the engine started
    chunks: int = 0  # looked up for requests: hits and misses
    hit_share: Share | None = None  # hits in any tier, of these chunks
    misses: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by reason, the most frequent first
    tiers: Sequence[TierView] = ()  # the primary one first


def command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="URL|FILE...", help="Metrics of engines: host:port, a URL, or a saved page."),
    ],
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between samples.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and exit.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show engines' cache activity: hits by tier, misses by reason, throughput, room, queues, breakers.

    Runs until Ctrl-C; off a terminal it prints a table every interval. Files are read once, and show sums
    since the engine started. With --json it prints one document per interval, each in a line. Exit status 1
    if metrics cannot be read.

    Example: kvtier top localhost:8000 localhost:8001
    """
    earlier: dict[str, Snapshot] = {}
    views = _views(sources, earlier)
    if once and earlier and any(map(_is_url, sources)):
        time.sleep(interval)
        views = _views(sources, earlier)
    if once or not any(map(_is_url, sources)):
        _print(views, as_json)
        raise typer.Exit(report.PROBLEMS if any(view.error for view in views) else report.OK)
    console = report.console()
    is_live = console.is_terminal and not as_json
    live = Live(console=console, screen=True, auto_refresh=False) if is_live else None
    with suppress(KeyboardInterrupt), live or nullcontext():
        while True:
            if live is not None:
                live.update(_shown(views), refresh=True)
            else:
                _print(views, as_json)
            time.sleep(interval)
            views = _views(sources, earlier)


def _print(views: Sequence[EngineView], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"engines": [dataclasses.asdict(view) for view in views]}))
    else:
        report.console().print(_shown(views))


def _is_url(source: str) -> bool:
    return "://" in source or _HOST_PORT.fullmatch(source) is not None


def _views(sources: Sequence[str], earlier: dict[str, Snapshot]) -> list[EngineView]:
    """Return all engines' views, read in parallel: a hung engine delays neither the others nor Ctrl-C."""
    views = [EngineView(_named(source), error="cannot be read") for source in sources]

    def read(place: int, source: str) -> None:
        views[place] = _view(source, earlier)

    # Not a pool: the interpreter would wait for its threads at exit.
    readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate(sources)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return views


def _view(source: str, earlier: dict[str, Snapshot]) -> EngineView:
    """Return the view of one engine, and keep its snapshot for the next call."""
    try:
        now = Snapshot(time.monotonic(), parse(_read(source)))
    except (OSError, ValueError, OverflowError, HTTPException) as error:
        return EngineView(_named(source), error=f"cannot be read: {str(error) or type(error).__name__}")
    if not any(name.startswith("kvtier_") for name, _, _ in now.samples):
        remedy = "configure KVTierOffloadingSpec in vLLM, or register kvtier.prometheus_collector(manager)"
        return EngineView(source, error=f"has no metrics of kvtier: {remedy}")
    before = earlier.get(source) if _is_url(source) else None
    earlier[source] = now
    return view_of(source, now, before)


def _named(source: str) -> str:
    """Return a source without credentials."""
    return re.sub(r"(?<=://)[^/?#]*@|^[^/?#]*:[^/?#]*@", "", source)


def _read(source: str) -> str:
    if _named(source) != source:
        raise ValueError("credentials in a URL are not supported: save the page, and name the file")
    if not _is_url(source):
        return Path(source).read_text(encoding="utf-8")
    url = source if "://" in source else f"http://{source}"
    if not url.startswith(("http://", "https://")):
        raise ValueError("neither a file nor a URL of http or https")
    if urlsplit(url).path in ("", "/"):
        url = f"{url.rstrip('/')}/metrics"
    page, end_s = bytearray(), time.monotonic() + _TIMEOUT_S
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        # Read in pieces: a slow server can meet the timeout of each read and still take for ever.
        while piece := response.read1(_PIECE_BYTES):
            page += piece
            if len(page) > _MAX_PAGE_BYTES:
                raise ValueError(f"the page has more than {Bytes(_MAX_PAGE_BYTES)}")
            if time.monotonic() > end_s:
                raise TimeoutError(f"the page has not ended within {_TIMEOUT_S:g} s")
        if response.length:  # read1() does not tell
            raise ValueError(f"the page has ended {response.length} bytes early")
    return str(page, "utf-8")


def parse(text: str) -> Samples:
    """Return the samples of a page in Prometheus' text format.

    Omits other lines, and values that no engine has: NaN, infinity, and values whose sum may be infinite.
    """
    samples = []
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            labels = {name: re.sub(r"\\(.)", r"\1", value) for name, value in _LABEL.findall(found[2] or "")}
            with suppress(ValueError):
                value = float(found[3])
                if abs(value) <= _LARGEST:
                    samples.append((found[1], labels, value))
    return samples


def view_of(source: str, now: Snapshot, before: Snapshot | None = None) -> EngineView:
    """Return an engine's activity between two snapshots, or since it started.

    If a counter fell, the engine was restarted: it counts from 0.
    """
    loaded, misses = _grown("tier", LOADED, now, before), _grown("reason", MISSES, now, before)
    chunks = sum(loaded.values()) + sum(misses.values())
    tiers = {*now.by("tier", _UP), *now.by("tier", _USED), *now.by("tier", _CAPACITY), *loaded}
    by_frequency = sorted(misses.items(), key=lambda item: -item[1])
    return EngineView(
        source,
        seconds=now.at - before.at if before is not None else None,
        chunks=int(chunks),
        hit_share=Share(sum(loaded.values()) / chunks) if chunks else None,
        misses={reason: int(count) for reason, count in by_frequency if count},
        tiers=[
            _tier(tier, now, before, Share(loaded.get(tier, 0.0) / chunks) if chunks else None)
            for tier in sorted(tiers, key=lambda tier: (tier != _PRIMARY, tier))
        ],
    )


def _grown(label: str, name: str, now: Snapshot, before: Snapshot | None) -> dict[str, float]:
    then = before.by(label, name) if before is not None else {}
    return {
        key: value - then.get(key, 0.0) if value >= then.get(key, 0.0) else value
        for key, value in now.by(label, name).items()
    }


def _tier(tier: str, now: Snapshot, before: Snapshot | None, hit_share: Share | None) -> TierView:
    def gauge(name: str, join: Callable[[list[float]], float] = sum, **labels: str) -> float | None:
        return now.by("tier", name, join, **labels).get(tier)

    def size(name: str) -> Bytes | None:
        # Engines share a root, but each has its own primary tier.
        value = gauge(name, sum if tier == _PRIMARY else max)
        return None if value is None else Bytes(value)

    def rate(name: str) -> Bytes | None:
        if before is None or tier not in now.by("tier", name):
            return None
        return Bytes(_grown("tier", name, now, before)[tier] / (now.at - before.at))

    def breaker(verb: str) -> str | None:
        state = gauge(_BREAKER_STATE, max, verb=verb)
        return None if state is None else _BREAKER.get(int(state))

    up, written = gauge(_UP, min), gauge(WRITTEN)
    return TierView(
        tier,
        is_up=None if up is None else up > 0,
        used_bytes=size(_USED),
        capacity_bytes=size(_CAPACITY),
        hit_share=hit_share,
        read_bytes_s=rate(READ),
        written_bytes_s=rate(WRITTEN),
        queued=int(gauge(_QUEUED) or 0),
        in_flight=int(gauge(_IN_FLIGHT) or 0),
        breaker_get=breaker("get"),
        breaker_put=breaker("put"),
        read_per_written=(gauge(READ) or 0.0) / written if written else None,
    )


def _shown(views: Sequence[EngineView]) -> Group:
    return Group(*(part for view in views for part in _engine(view)))


def _engine(view: EngineView) -> list[Text | Table]:
    source = printable(view.source)
    if view.error is not None:
        return [Text(f"{source}: {printable(view.error)}", style="bold red")]
    covered = "since it started" if view.seconds is None else f"in {view.seconds:.1f} s"
    hits = "-" if view.hit_share is None else view.hit_share
    misses = ", ".join(f"{name} {count:,}" for name, count in list(view.misses.items())[:_REASONS])
    table = report.grid(_COLUMNS, map(dataclasses.astuple, view.tiers))
    for row, tier in zip(table.rows, view.tiers, strict=True):
        row.style = "red" if tier.is_up is False else ""
    return [
        Text(f"{source}: {view.chunks:,} chunks looked up {covered}, {hits} hits", style="bold"),
        Text(f"misses: {printable(misses) or 'none'}"),
        table,
    ]
