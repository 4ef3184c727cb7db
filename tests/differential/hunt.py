"""How many lives it takes to find each planted bug: ``python -m tests.differential.hunt [--minutes N]``."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import Counter
from pathlib import Path

from kvtier_bench.engine.compared import EngineError
from tests.differential.draws import LIVES_OF_A_CASE, LIVES_OF_A_MODEL, draw
from tests.differential.mutations import MUTATIONS
from tests.differential.world import Stage, Unfit
from tests.integration.conftest import ENVIRONMENT
from tests.integration.harness import Launcher


class Hunt:
    """Runs the same lives with each bug until it has been found.

    Attributes:
        hidden: bugs that have not been found.
        lives: how many lives each has had.
    """

    def __init__(self, names: list[str], minutes: float) -> None:
        self.hidden = names
        self.lives: Counter[str] = Counter()
        self._until_s = time.monotonic() + minutes * 60

    @property
    def is_over(self) -> bool:
        return not self.hidden or time.monotonic() > self._until_s

    def run(self, launcher: Launcher, folder: Path, seed: int) -> None:
        """Run the lives of one model after the other."""
        for first in itertools.count(seed, LIVES_OF_A_MODEL):
            if self.is_over:
                return
            model = draw(first).case.model
            try:
                with Stage(launcher, Path(tempfile.mkdtemp(dir=folder)), model) as stage:
                    self._run_case(stage, first)
                    self._run_case(stage, first + LIVES_OF_A_CASE)
            except (Unfit, EngineError) as why:
                print(f"{model}: {str(why)[:300]}", flush=True)

    def _run_case(self, stage: Stage, first: int) -> None:
        for stage.bug in list(self.hidden):
            for seed in range(first, first + LIVES_OF_A_CASE):
                if time.monotonic() > self._until_s:
                    return
                self.lives[stage.bug] += 1
                if self._is_found(stage, seed):
                    self.hidden.remove(stage.bug)
                    break

    def _is_found(self, stage: Stage, seed: int) -> bool:
        life, begun_s = draw(seed), time.monotonic()
        failure = stage.failure(life, warm=True)
        took_s, loaded = time.monotonic() - begun_s, dict(stage.loaded)
        if failure is None:
            print(f"{stage.bug}: seed {seed} is right, loaded {loaded} in {took_s:.0f} s", flush=True)
            return False
        if failure.kind in ("tokens", "engine") and stage.failure(life, connector=False):
            return False  # the engine alone fails, too
        print(f"| {stage.bug} | {self.lives[stage.bug]} | {failure.kind}, seed {seed} |", flush=True)
        print(str(failure)[:400], flush=True)
        return True


def main() -> None:
    """Plant what the command line names, or each bug, and print which life finds it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=LIVES_OF_A_MODEL)
    parser.add_argument("bugs", nargs="*", default=[bug.name for bug in MUTATIONS])
    options = parser.parse_args()
    hunt = Hunt(list(options.bugs), options.minutes)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-hunt-") as name,
        Launcher(Path(name), ENVIRONMENT) as launcher,
    ):
        hunt.run(launcher, Path(name), options.seed)
    for bug in hunt.hidden:
        print(f"| {bug} | not in {hunt.lives[bug]} | |", flush=True)


if __name__ == "__main__":
    main()
