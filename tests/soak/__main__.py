"""Runs the soak: ``python -m tests.soak --minutes 60``; see ``--help``."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.integration.conftest import VLLM_LINE
from tests.integration.harness import EngineError
from tests.soak import engine_life, manager_life
from tests.soak.engine_life import SoakError, Stand
from tests.soak.flatness import Bound, Look, Verdict, judge
from tests.soak.inside import LEAKS

ISOLATIONS = ("thread", "process")
MANAGERS_SHARE = 0.15


class Report:
    """Shows figures, and remembers what has failed.

    Args:
        seed: of all choices.
        keep: where to keep all looks; None for nowhere.
    """

    def __init__(self, seed: int, keep: Path | None) -> None:
        self.failures: list[str] = []
        self._seed = seed
        self._keep = keep
        self._kept: dict[str, list[dict[str, object]]] = {}
        self._console = Console(width=None if sys.stdout.isatty() else 150)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False)

    def fail(self, part: str, what: object) -> None:
        """Note a failure. Of an engine's log that comes with it what vLLM says of itself is left out."""
        lines = [line for line in f"{part}: {what}".splitlines() if not VLLM_LINE.match(line)]
        self.failures.append("\n  ".join(lines))

    def show(self, part: str, looks: Sequence[Look], seen: Counter[str], bounds: Mapping[str, Bound]) -> None:
        """Print the figures of one part of the soak, and judge them."""
        self._kept[part] = [asdict(look) for look in looks]
        if self._keep is not None:
            self._keep.write_text(json.dumps(self._kept) + "\n")
        self.say(f"\n{part}: {', '.join(f'{count:,} {what}' for what, count in sorted(seen.items()))}")
        try:
            seen_at_all = looks[0].figures
            verdicts = judge(looks, {name: it for name, it in bounds.items() if name in seen_at_all})
        except (ValueError, IndexError) as error:
            self.fail(part, error)
            return
        self._console.print(_table(part, looks, verdicts))
        for verdict in verdicts:
            if not verdict.is_flat:
                self.fail(part, f"{verdict.name} has grown by {verdict.grown:,.4g}, peak {verdict.peak:,.4g}")

    def end(self) -> int:
        """Say what has failed, and how it is seen again; return the exit status."""
        for failure in self.failures:
            self.say(f"FAILED: {failure}")
        if self.failures:
            self.say(f"the same choices again: nox -s soak -- --seed {self._seed}")
            return 1
        self.say(f"all is flat (seed {self._seed})")
        return 0


def _table(part: str, looks: Sequence[Look], verdicts: Sequence[Verdict]) -> Table:
    title = f"{part}: {len(looks)} looks in {looks[-1].at_s / 60:.1f} minutes"
    table = Table(title=title, title_justify="left")
    for column in ("figure", "2nd third", "last third", "peak", "grown", "may grow", "would find", "flat"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for verdict in verdicts:
        figures = (verdict.second, verdict.last, verdict.peak, verdict.grown, verdict.allowed)
        cells = [f"{figure:,.4g}" if abs(figure) < 10_000 else f"{figure:,.0f}" for figure in figures]
        finds = "-" if not verdict.visible else f"{verdict.visible:,.2g} a {verdict.event.removesuffix('s')}"
        table.add_row(verdict.name, *cells, finds, "yes" if verdict.is_flat else "NO")
    return table


def _live_in_engines(report: Report, seconds: float, given: argparse.Namespace, seed: int) -> None:
    if shutil.which("redis-server") is None:
        raise SoakError("redis-server is not installed: it is one of the tiers")
    isolations = given.isolation or ISOLATIONS
    with _folder() as folder, Stand.opened(folder) as stand:
        for isolation in isolations:
            with _folder() as roots:
                _live_in_engine(report, stand, roots, isolation, seconds / len(isolations), seed, given.leak)


def _live_in_engine(
    report: Report,
    stand: Stand,
    folder: Path,
    isolation: str,
    seconds: float,
    seed: int,
    leak: str | None,
) -> None:
    """Run an engine and show its figures, also where it fails.

    Raises:
        SoakError, EngineError, AssertionError: it has failed.
    """
    with engine_life.opened(stand, folder, seed, isolation, leak) as life:
        try:
            life.run(seconds)
            life.require_work()
        finally:
            seen = life.seen | life.work[-1] if life.work else life.seen
            report.show(f"engine, tiers in a {isolation}", life.looks, seen, engine_life.BOUNDS)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as folder:
        yield Path(folder)


def _live_in_manager(report: Report, seconds: float, seed: int) -> None:
    with _folder() as folder:
        try:
            looks, seen = manager_life.run_apart(folder, seconds, seed)
        except subprocess.CalledProcessError as error:
            raise SoakError(f"the manager: {error}\n{error.stderr[-4000:]}") from error
        report.show("manager", looks, seen, manager_life.BOUNDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    given = _parser().parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    report = Report(seed, given.json)
    report.say(f"seed {seed}")
    began_s = time.monotonic()
    seconds = 60 * given.minutes
    try:
        if given.leak is None and not given.no_manager:
            _live_in_manager(report, MANAGERS_SHARE * seconds, seed)
            seconds -= MANAGERS_SHARE * seconds
        _live_in_engines(report, seconds, given, seed)
    except (SoakError, EngineError, AssertionError) as error:
        report.fail("the soak has ended early", error)
    report.say(f"{time.monotonic() - began_s:,.0f} s in all")
    return report.end()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Runs engines whose tiers evict, fail and die all the time, and sees that nothing leaks.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.5, help="for how long, starting engines aside (default: 1.5)")
    add("--seed", type=int, help="of all choices (default: a new one, which is printed)")
    add("--isolation", choices=ISOLATIONS, action="append", help="may be given again (default: each)")
    add("--no-manager", action="store_true", help="engines alone, without the part that needs none")
    add("--leak", choices=sorted(LEAKS), help="leak this on purpose, to see that it is found")
    add("--json", type=Path, metavar="FILE", help="write all that was looked at to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
