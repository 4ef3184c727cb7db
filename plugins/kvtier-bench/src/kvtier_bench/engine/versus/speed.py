"""Speed of the systems. All run at once; each round starts and queries them in a different order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from kvtier_bench.engine.compared import PLAIN, EngineError, make_prompt, say, spread_of_median
from kvtier_bench.engine.versus.systems import KEEP_S, KVTIER, NO_MORE_S, SYSTEMS, NotRun, System
from kvtier_bench.machine import drop_from_page_cache

COLD, HOST, STORAGE = "TTFT cold, ms", "TTFT host hit, ms", "TTFT storage hit, ms"
RESTARTED = "TTFT first hit of a restarted engine, ms"
CONVOY, CONVOY_TTFT = "convoy from storage, s", "convoy from storage, TTFT ms"
UNSEEN, READY, WRITTEN = "nothing reused, s", "until ready, s", "bytes written per byte served"
UNSEEN_CPU, CONVOY_CPU = "nothing reused, processor s", "convoy from storage, processor s"
MEMORY = "memory of all processes at the end, MiB"
WRONG = "hits with other tokens than computed"
AGAINST = dict.fromkeys((COLD, UNSEEN, UNSEEN_CPU, MEMORY, WRONG), PLAIN)
"""The system that a measure is compared with, if not kvtier. An engine without a cache has no hits."""

HOST_TURNS = 5
"""Times that prompts are loaded from host memory in a round: one load takes little time, and varies most."""

OUTPUT_TOKENS = 8
BATCH_OUTPUT, TAIL_TOKENS = 32, 48

Found = dict[str, dict[str, list[float]]]
"""Values by measure and system, one a round."""


@dataclass(frozen=True)
class Speed:
    """Speed: medians over rounds, ratios within a round

    Attributes:
        value: median; smaller is better.
        ratio: the system's value divided by the value of ``against`` in the same round; median over rounds.
        low, high: bounds of the central 95 % of the medians of resampled rounds.
        n: number of samples, one per round or start; a round's sample is the median of its requests.
        from_cache: prompt tokens that were not computed, out of all.
    """

    measure: str
    system: str
    value: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    against: str | None = None
    n: int = 1
    from_cache: str | None = None


@dataclass(frozen=True)
class Work:
    """The workload of each system in each round"""

    rounds: int
    single_tokens: int = 1280
    batch_tokens: int = 512
    prompts: int = 3
    batch: int = 8
    convoy: int = 16

    def single(self, kind: str, number: int) -> list[list[int]]:
        """Return the prompts that are sent one after the other."""
        return [make_prompt(f"{kind} {number} {i}", self.single_tokens) for i in range(self.prompts)]

    @property
    def stored_tokens(self) -> int:
        """Maximum number of tokens that each system stores, warm-up rounds included."""
        singles = 3 * self.prompts * self.single_tokens  # "storage", "cold" and "restarted"
        convoy = self.convoy * (self.batch_tokens + TAIL_TOKENS + OUTPUT_TOKENS)
        return 2 * self.rounds * (singles + convoy + self.batch * (self.batch_tokens + BATCH_OUTPUT))

    def together(self, kind: str, number: int) -> list[list[int]]:
        """Return the prompts that are sent at once."""
        count = self.convoy if kind == "convoy" else self.batch
        return [make_prompt(f"{kind} {number} {i}", self.batch_tokens) for i in range(count)]


class Speeds:
    """Measures the systems and keeps the figures."""

    def __init__(self, systems: Sequence[System], model: Path, work: Work) -> None:
        self._systems = {system.name: system for system in systems}
        self._model = model
        self._work = work
        self._found: Found = {}
        self._cached: dict[tuple[str, str], list[int]] = {}
        self._served = dict.fromkeys(self._systems, 0)
        self._first_answers: dict[tuple[str | int, ...], list[int]] = {}  # by system and prompt
        self._wrong: Counter[str] = Counter()
        self._not_run: list[NotRun] = []
        self._random = random.Random(0)

    def run(self, token_bytes: int) -> list[Speed | NotRun]:
        """Fill files, measure loads from memory, then from files, then by restarted engines.

        Args:
            token_bytes: bytes of KV cache of a token.
        """
        for system in self._shuffled():
            self._or_drop(system, self._fill)
        self._rounds(self._before)
        self._rounds(self._after)
        for name, system in self._systems.items():
            if served := self._served[name]:
                self._note(WRITTEN, name, system.bytes_written() / (served * token_bytes))
        self._systems.pop(PLAIN, None)
        self._turns(self._restart, range(-1, self._work.rounds))
        for name, system in self._systems.items():
            system.stop()
            self._note(WRONG, name, self._wrong[name])
        return [*table(self._found, self._cached), *self._not_run]

    def _rounds(self, ask: Callable[[System, int], None]) -> None:
        """Measure rounds, each with new engines. The order of their starts changes figures by 5 to 8 %."""
        for number in range(self._work.rounds):
            for system in self._shuffled():
                say(f"starting {system.name} alone")
                self._or_drop(system, lambda one: self._note(READY, one.name, one.start(self._model)))
            self._turns(ask, (-1 - number, number))  # the first round is the warm-up
            for name, system in self._systems.items():
                self._note(MEMORY, name, system.memory_mib())
                system.stop()

    def _or_drop(self, system: System, do: Callable[..., None], *arguments: int) -> None:
        """Call ``do`` with a system. Drop a system that fails, together with its figures."""
        try:
            do(system, *arguments)
        except (EngineError, OSError) as error:
            say(str(error))
            system.stop()
            del self._systems[system.name]
            for values in self._found.values():
                values.pop(system.name, None)
            self._not_run.append(NotRun(system.name, str(error).partition("\n")[0]))

    def _turns(self, ask: Callable[[System, int], None], numbers: Iterable[int]) -> None:
        """Run each system once per number, in turns. Numbers below 0 are warm-up."""
        for number in numbers:
            for system in self._shuffled():
                say(f"round {number}: {system.name}")
                self._or_drop(system, ask, number)

    def _shuffled(self) -> list[System]:
        return self._random.sample(list(self._systems.values()), len(self._systems))

    def _fill(self, system: System) -> None:
        say(f"filling the files of {system.name}")
        system.start(self._model)
        for number in range(-self._work.rounds, self._work.rounds):
            self._compute(system, self._work.single("storage", number))
            system.ask(self._work.together("convoy", number), 1)
            system.await_stores()
        system.stop()

    def _before(self, system: System, number: int) -> None:
        prompts = self._work.single("cold", number)
        self._first_tokens(COLD, system, prompts, number)
        system.await_stores()
        system.forget()
        if system.name != PLAIN:
            self._first_tokens(HOST, system, prompts, number, turns=HOST_TURNS)
        before_s = system.cpu_s()
        answer = system.ask(self._work.together("unseen", number), BATCH_OUTPUT)
        system.await_stores()
        if number >= 0:
            self._note(UNSEEN, system.name, answer["wall_s"])
            self._note(UNSEEN_CPU, system.name, system.cpu_s() - before_s)

    def _after(self, system: System, number: int) -> None:
        drop_from_page_cache(system.files)
        if system.name != PLAIN:
            self._first_tokens(STORAGE, system, self._work.single("storage", number), number)
        prefixes = self._work.together("convoy", number)
        prompts = [
            make_prompt(f"tail {number} {i}", len(prefix) + TAIL_TOKENS, prefix)
            for i, prefix in enumerate(prefixes)
        ]
        before_s = system.cpu_s()
        answer = system.ask(prompts, OUTPUT_TOKENS)
        system.await_stores()
        self._count(CONVOY, system.name, answer["cached"], sum(map(len, prefixes)), number)
        if number >= 0:
            self._note(CONVOY, system.name, answer["wall_s"])
            self._note(CONVOY_CPU, system.name, system.cpu_s() - before_s)
            self._note(CONVOY_TTFT, system.name, median(answer["ttft_s"]) * 1e3)

    def _restart(self, system: System, number: int) -> None:
        """Restart the engine, but not its cache process, and measure a prompt of the previous engine."""
        system.keep_s = KEEP_S if number + 1 < self._work.rounds else NO_MORE_S
        drop_from_page_cache(system.files)
        system.start(self._model)
        if number >= 0:
            self._first_tokens(RESTARTED, system, self._work.single("restarted", number - 1)[:1], number)
        self._compute(system, self._work.single("restarted", number))
        system.await_stores()
        system.stop_engine()

    def _compute(self, system: System, prompts: Sequence[Sequence[int]]) -> None:
        """Send prompts to be computed, one after the other."""
        answer = system.ask(prompts, 1, together=False)
        self._compare(system, prompts, answer["answers"])

    def _compare(
        self, system: System, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]]
    ) -> None:
        """Count answers that differ from the first ones to the same prompts."""
        for prompt, answer in zip(prompts, answers, strict=True):
            first = self._first_answers.setdefault((system.name, *prompt), answer)
            self._wrong[system.name] += answer[: len(first)] != first

    def _first_tokens(
        self, measure: str, system: System, prompts: Sequence[Sequence[int]], number: int, turns: int = 1
    ) -> None:
        """Measure the time to the first token of prompts sent one after the other.

        Each repetition starts with an empty device cache.
        """
        ttft_s: list[float] = []
        for turn in range(turns):
            if turn:
                system.forget()
            answer = system.ask(prompts, OUTPUT_TOKENS, together=False)
            self._compare(system, prompts, answer["answers"])
            ttft_s += answer["ttft_s"]
            if not turn:
                self._count(measure, system.name, answer["cached"], sum(map(len, prompts)), number)
        if number >= 0:
            self._note(measure, system.name, median(ttft_s) * 1e3)

    def _count(self, measure: str, name: str, cached: Sequence[int], of: int, number: int) -> None:
        self._served[name] += sum(cached)
        if number >= 0:
            counts = self._cached.setdefault((measure, name), [0, 0])
            counts[0] += sum(cached)
            counts[1] += of

    def _note(self, measure: str, name: str, value: float) -> None:
        self._found.setdefault(measure, {}).setdefault(name, []).append(value)


def table(found: Found, cached: Mapping[tuple[str, str], Sequence[int]]) -> list[Speed]:
    """Compare the figures of each measure, round by round if there were several rounds."""
    rows = []
    for measure, by_system in found.items():
        against = AGAINST.get(measure, KVTIER)
        base = by_system.get(against)
        for name in sorted(by_system, key=(*SYSTEMS, PLAIN).index):
            values = by_system[name]
            counts = cached.get((measure, name))
            row = Speed(
                measure,
                name,
                median(values),
                n=len(values),
                from_cache=f"{counts[0]} of {counts[1]}" if counts else None,
            )
            if base and name != against:
                ratios = [value / one for value, one in zip(values, base, strict=True)]
                low, high = spread_of_median(ratios) if len(ratios) > 2 else (None, None)
                row = replace(row, ratio=median(ratios), low=low, high=high, against=against)
            rows.append(row)
    return rows
