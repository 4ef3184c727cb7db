"""Runs the soak: ``python -m tests.soak --minutes 60``; see ``--help``."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from kvtier_bench import figures
from kvtier_bench.engine.compared import EngineError
from tests.integration.conftest import ENVIRONMENT, LLAMA, VLLM_LINE
from tests.integration.harness import Engine, Launcher
from tests.soak import engine_soak
from tests.soak.engine_soak import EngineSoak, SoakError
from tests.soak.figures import Bound, Sample, judge, shared_memory

ISOLATIONS = ("thread", "process")

# oneDNN and torch keep primitives for each number of tokens, up to a thousand of them. That grows a CPU
# engine by some hundred MiB, with kvtier and without.
FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}

_folder = partial(tempfile.TemporaryDirectory, prefix="kvtier-soak-")


class Report:
    """Prints figures, and records failures.

    Args:
        seed: the seed of all choices.
    """

    def __init__(self, seed: int) -> None:
        self.failures: list[str] = []
        self._seed = seed
        self._console = Console(width=None if sys.stdout.isatty() else 150, highlight=False, markup=False)

    def fail(self, part: str, what: object) -> None:
        """Record a failure, without vLLM's own log lines."""
        lines = [line for line in f"{part}: {what}".splitlines() if not VLLM_LINE.match(line)]
        self.failures.append("\n  ".join(lines))

    def show(
        self, part: str, samples: Sequence[Sample], seen: Counter[str], bounds: Mapping[str, Bound]
    ) -> None:
        """Print the figures of one part of the soak, and judge them."""
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items()))
        self._console.print(f"\n{part}: {counts}")
        sampled = samples[0].figures if samples else {}
        try:
            trends = judge(samples, {name: bound for name, bound in bounds.items() if name in sampled})
        except ValueError as error:
            self.fail(part, error)
            return
        for trend in trends:
            if not trend.is_flat:
                grown = trend.last - trend.second
                self.fail(part, f"{trend.name} has grown by {grown:,.4g}, peak {trend.peak:,.4g}")
        self._console.print(f"{len(samples)} samples in {samples[-1].at_s / 60:.1f} minutes")
        figures.show(trends, self._console)

    def end(self) -> int:
        """Print the failures, and how to repeat them; return the exit status."""
        for failure in self.failures:
            self._console.print(f"FAILED: {failure}")
        if self.failures:
            self._console.print(f"the same choices again: nox -s soak -- --seed {self._seed}")
            return 1
        self._console.print(f"all is flat (seed {self._seed})")
        return 0


def _soak_engines(report: Report, seconds: float, isolations: Sequence[str], seed: int) -> None:
    if shutil.which("redis-server") is None:
        raise SoakError("redis-server is not installed: it is one of the tiers")
    with _folder() as folder, Launcher(Path(folder), {**ENVIRONMENT, **FEW_SHAPES}) as launcher:
        model = launcher.make_model(Path(folder, "model"), "LlamaConfig", "LlamaForCausalLM", LLAMA)
        with launcher.start(model, enable_prefix_caching=False, **engine_soak.ENGINE) as reference:
            for isolation in isolations:
                _soak(report, seconds / len(isolations), isolation, seed, launcher, model, reference)


def _soak(
    report: Report,
    seconds: float,
    isolation: str,
    seed: int,
    launcher: Launcher,
    model: Path,
    reference: Engine,
) -> None:
    with ExitStack() as stack:
        roots = Path(stack.enter_context(_folder()))
        server = stack.enter_context(engine_soak.redis_server(roots))
        earlier = shared_memory()
        settings = engine_soak.settings(roots, isolation)
        prepare = {"module": engine_soak.IN_ENGINE, "function": "hurry"}
        engine = stack.enter_context(launcher.start(model, settings, prepare=prepare, **engine_soak.ENGINE))
        soak = EngineSoak(engine, reference, server, roots, earlier, isolation, seed)
        try:
            soak.run(seconds)
        finally:
            report.show(f"engine, tiers in a {isolation}", soak.samples, soak.seen, engine_soak.BOUNDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line's soak; return the exit status."""
    given = _parser().parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if given.seed is None else given.seed
    report = Report(seed)
    started_s = time.monotonic()
    try:
        _soak_engines(report, 60 * given.minutes, given.isolation or ISOLATIONS, seed)
    except (SoakError, EngineError, AssertionError) as error:
        report.fail("the soak has ended early", error)
    print(f"{time.monotonic() - started_s:,.0f} s in all")
    return report.end()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="Runs engines whose tiers evict, fail and die all the time; checks that nothing leaks.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.5, help="for how long, starting engines aside (default: 1.5)")
    add("--seed", type=int, help="of all choices (default: a new one, which is printed)")
    add("--isolation", choices=ISOLATIONS, action="append", help="may be given again (default: each)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
