"""Runs seeds: ``python -m kvtier_testing.sim --seeds 20000``; see ``--help``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

from kvtier_testing.sim.fleet import report, run
from kvtier_testing.sim.scenario import draw_count

_BLOCK = 25
_MODULE = "kvtier_testing.sim"


@dataclass
class Tally:
    """The results of some runs.

    Attributes:
        seen: counts of events.
        failures: failed seeds and their errors.
    """

    runs: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)


def run_block(seeds: Sequence[int], engines: int | None = 1) -> Tally:
    """Run seeds in turn, each with ``engines`` engines, or a drawn number if None."""
    tally = Tally(runs=len(seeds))
    for seed in seeds:
        try:
            tally.seen += run(seed, engines=engines or draw_count(seed)).seen
        except Exception as error:
            tally.failures[seed] = f"{type(error).__name__}: {error}"
    return tally


def run_many(
    first: int, count: int | None, minutes: float | None, jobs: int, engines: int | None = 1
) -> Tally:
    """Run seeds in several processes until one fails, all pass, or time runs out."""
    until_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    last = sys.maxsize if count is None else first + count
    total = Tally()
    block = _BLOCK if engines == 1 else 1
    with ProcessPoolExecutor(jobs) as pool:
        running: deque[Future[Tally]] = deque()
        while running or first < last:
            while first < last and len(running) < 2 * jobs:
                seeds = range(first, min(first + block, last))
                running.append(pool.submit(run_block, seeds, engines))
                first += block
            done = running.popleft().result()
            total.runs += done.runs
            total.seen += done.seen
            total.failures.update(done.failures)
            if total.failures or time.monotonic() >= until_s:
                last = first
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    given = _parser().parse_args(arguments)
    engines = None if given.engines == "many" else int(given.engines)
    if given.fleet is not None:
        print(report(given.fleet))
        return 0
    if given.seed is not None:
        run(given.seed, engines=engines or draw_count(given.seed), trace=print if given.trace else None)
        print(f"seed {given.seed}: nothing to complain about")
        return 0
    count = given.seeds if given.seeds is not None or given.minutes is not None else 20_000
    began_s = time.monotonic()
    total = run_many(given.first, count, given.minutes, given.jobs, engines)
    seconds = time.monotonic() - began_s
    each_ms = given.jobs * seconds / max(1, total.runs) * 1e3
    print(f"{total.runs} runs in {seconds:.0f} s, {each_ms:.1f} ms each on one of {given.jobs} processes")
    if given.show:
        for what, number in sorted(total.seen.items()):
            print(f"{number:10} {what}")
    for seed, what in sorted(total.failures.items()):
        again = f"python -m {_MODULE} --seed {seed} --engines {given.engines} --trace"
        print(f"\nseed {seed}: {what}\n  see it:  {again}")
    return 1 if total.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}", description="Simulates kvtier in virtual time, once for each seed."
    )
    add = parser.add_argument
    add("--seed", type=int, help="run this one alone")
    add("--trace", action="store_true", help="with --seed: show what happens, line by line")
    add("--seeds", type=int, help="how many to run (default: 20000, or as many as fit into --minutes)")
    add("--first", type=int, default=0, help="the first of them (default: 0)")
    add("--minutes", type=float, help="for how long")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each CPU)")
    add("--engines", default="1", help="how many share their tiers; many: 2 to 64, as the seed draws")
    add("--fleet", type=int, metavar="ENGINES", help="report how much they cost each other without faults")
    add("--show", action="store_true", help="say what was seen how often")
    return parser


if __name__ == "__main__":
    sys.exit(main())
