"""Random lives on real engines: ``python -m tests.differential [--minutes N] [--seed N] [--config FILE]``."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier_bench.engine.compared import EngineError
from tests.differential.draws import LIVES_OF_A_MODEL, draw, features
from tests.differential.driver import DEADLOCK
from tests.differential.lives import Life, code, joined
from tests.differential.models import Model
from tests.differential.shrink import shrink, without
from tests.differential.world import Failure, Stage, Unfit
from tests.integration.conftest import ENVIRONMENT
from tests.integration.harness import Launcher


class Search:
    """Runs lives until the time is up.

    Args:
        bug: one of ``tests.differential.mutations`` to plant; "" for none.

    Attributes:
        ends: number of lives by outcome.
        found: reductions of the failed lives.
        lives: number of lives with each feature.
        loaded: number of chunks that the lives loaded.
    """

    def __init__(self, launcher: Launcher, folder: Path, options: argparse.Namespace, bug: str = "") -> None:
        self.ends: Counter[str] = Counter()
        self.found: list[str] = []
        self.lives: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()
        self._launcher, self._folder, self._options, self._bug = launcher, folder, options, bug
        self._lives: list[Life] = []  # of the running engine
        self._until_s = time.monotonic() + options.minutes * 60

    def run(self) -> None:
        """Run lives, starting with the first seed."""
        seeds = self._options.seeds or itertools.count(self._options.seed)
        for _, group in itertools.groupby(seeds, lambda seed: seed // LIVES_OF_A_MODEL):
            lives = ((seed, self._life(seed)) for seed in group)
            self._run_model(lives)
            if self._is_over():
                return

    def _life(self, seed: int) -> Life:
        life = without(draw(seed), self._options.without)
        if self._options.config is None:
            return life
        own = json.loads(Path(self._options.config).read_text())
        case = replace(
            life.case,
            model=Model(own["model"]) if "model" in own else life.case.model,
            connector=own.get("connector", "OffloadingConnector"),
            arguments={**life.case.arguments, **own.get("arguments", {})},
            settings={**life.case.settings, **own.get("settings", {})},
        )
        return replace(life, case=case)

    def _run_model(self, lives: Iterator[tuple[int, Life]]) -> None:
        stage: Stage | None = None
        try:
            for seed, life in lives:
                if self._is_over():
                    return
                if stage is None:
                    say(f"model {code(life.case.model)}")
                    folder = Path(tempfile.mkdtemp(dir=self._folder))
                    stage = Stage(self._launcher, folder, life.case.model, self._bug)
                self._run(stage, seed, life)
        except (Unfit, EngineError) as why:
            self.ends["model unfit"] += 1
            say(f"model not used: {str(why)[-1500:]}")
        finally:
            if stage is not None:
                stage.__exit__()

    def _run(self, stage: Stage, seed: int, life: Life) -> None:
        begun_s = time.monotonic()
        failure, life = self._failure(stage, life)
        for feature, has_it in features(life.case).items():
            self.lives[feature] += bool(has_it)
            self.loaded[feature] += stage.loaded.total() * bool(has_it)
        end = failure.kind if failure else "right"
        alone = stage.failure(life, connector=False) if failure else None
        if failure and alone and alone.kind == failure.kind:
            end = f"{alone.kind} without a connector, too"
        self.ends[end] += 1
        say(f"seed {seed}: {end}, loaded {dict(stage.loaded)} in {time.monotonic() - begun_s:.0f} s")
        if failure is not None:
            say(str(failure)[-3000:])
        if failure is not None and end == failure.kind != DEADLOCK:
            self._report(stage, seed, life, failure)

    def _failure(self, stage: Stage, life: Life) -> tuple[Failure | None, Life]:
        """Return a failure and its life. The life is all lives of the engine if only their sequence fails."""
        is_next = bool(self._lives) and self._lives[-1].case == life.case
        self._lives = [*self._lives, life] if is_next else [life]
        failure = stage.failure(life, warm=True)
        if failure is None:
            return None, life
        so_far, self._lives = joined(self._lives), []
        again = stage.failure(life)
        return (again, life) if again else (failure, so_far)

    def _report(self, stage: Stage, seed: int, life: Life, failure: Failure) -> None:
        until_s = time.monotonic() + (0 if self._bug else self._options.shrink_s)

        def fails_so(candidate: Life) -> bool:
            found = stage.failure(candidate)
            return found is not None and found.kind == failure.kind

        small = shrink(life, fails_so, lambda: time.monotonic() < until_s)
        text = f"seed {seed}: {failure.kind}\nlife = {code(small)}"
        if small is not life and stage.failure(small, connector=False) is not None:
            text += "\n(the engine alone fails in it, too: the life that was drawn is worth more)"
        say(text)
        self.found.append(text)

    def _is_over(self) -> bool:
        is_enough = self._options.first or self._bug
        return time.monotonic() > self._until_s or bool(is_enough and self.found)


def say(text: str) -> None:
    print(text, flush=True)


def parsed(arguments: list[str]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="the first; each life has the next one")
    parser.add_argument("--seeds", type=int, nargs="*", help="these lives only")
    parser.add_argument("--config", help="JSON of your own engine: model, arguments, settings")
    parser.add_argument("--without", nargs="*", default=(), help="fields of Ask and Case that stay plain")
    parser.add_argument("--first", action="store_true", help="end when something has been found")
    parser.add_argument("--shrink-s", type=float, default=120.0, help="seconds to make what fails smaller")
    parser.add_argument(
        "--bugs",
        nargs="*",
        default=[""],
        help="of tests/differential/mutations.py: plant one after the other",
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Run the command line's lives; the exit status is 1 if a life failed."""
    options, found = parsed(sys.argv[1:]), False
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-lives-") as name,
        Launcher(Path(name), ENVIRONMENT) as launcher,
    ):
        for bug in options.bugs:
            began_s, search = time.monotonic(), Search(launcher, Path(name), options, bug)
            search.run()
            ends = ", ".join(f"{count} {end}" for end, count in search.ends.most_common())
            say(f"{bug} lives: {ends}; in {time.monotonic() - began_s:.0f} s")
            for feature, count in search.lives.items() if not bug else ():
                loaded = search.loaded[feature]
                say(f"{feature}: {loaded} chunks loaded in {count} lives{'' if loaded else ': NOT TESTED'}")
            print(*search.found, sep="\n")
            found = found or bool(search.found)
    sys.exit(found)


if __name__ == "__main__":
    main()
