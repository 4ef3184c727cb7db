"""The fault matrix: requests run while a tier suffers, and what is promised about that is checked.

A ``Row`` is an engine over one ``Backend``. ``Row.cell`` runs requests, begins a fault in their midst, lets
more of them run while it lasts, ends it, and waits until the tier serves and keeps chunks again.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.faulty_backends import Backend
from tests.integration.harness import (
    OUTPUT_TOKENS,
    PATIENCE_S,
    PROMPT_CHUNKS,
    Engine,
    EngineError,
    Launcher,
    Metrics,
    Tokens,
    prompt,
)

DEADLINE_S = 1.0
PAUSE_S = 0.25
COMPUTING_S = 4.0
"""What a busy machine may add to a wait, beside four times what the same requests wait without kvtier."""

LASTS_S = 1.5
ROUNDS = 3
SHOWN_S = 20.0
FILL_S = 60.0
MOST = 0.7
RECOVERY_S = 40.0
"""Twice as long as the longest pause of a breaker, which grows from cell to cell."""

KEPT_PROMPTS = 12
KEPT_AT_ONCE = 3
NEW_AT_ONCE = 2
MIDST_S = 0.03

_REASONS = (
    "kvtier_get_failed_chunks",
    "kvtier_put_failed_chunks",
    "kvtier_put_dropped_chunks",
    "kvtier_skipped_chunks",
)


@dataclass(frozen=True)
class Answered:
    """Requests that were answered together.

    Attributes:
        prompts, answers: of each of them.
        ends: why each ended; ``length`` where nothing went wrong.
        waits_s: seconds until the first token of each.
    """

    prompts: Sequence[Tokens]
    answers: Sequence[Tokens]
    ends: Sequence[str]
    waits_s: Sequence[float]


@dataclass
class Seen:
    """What was seen in one cell.

    Attributes:
        during, afterwards: the requests while the fault lasted, and those after it until it was over for all.
        alone_s: the longest wait for a first token of requests like these, without kvtier.
        reasons: chunks that were not served or kept while the fault lasted, by the reason.
        back_s: seconds from the end of the fault until the tier served and kept chunks again.
    """

    during: list[Answered] = field(default_factory=list)
    afterwards: list[Answered] = field(default_factory=list)
    alone_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    back_s: float = 0.0

    @property
    def answered(self) -> list[Answered]:
        return self.during + self.afterwards

    @property
    def wait_s(self) -> float:
        """The longest wait for a first token."""
        return max(wait for one in self.answered for wait in one.waits_s)

    @property
    def allowed_s(self) -> float:
        """How long a request may wait for its first token: the deadline, and the computing."""
        return DEADLINE_S + 4 * self.alone_s + COMPUTING_S


class Row:
    """One tier under load in one engine, which is started when it is needed.

    Args:
        backend: the tier.
        tier: its settings.
        launcher, model: what engines are made of.
        alone: an engine without kvtier.
    """

    def __init__(
        self, backend: Backend, tier: dict[str, Any], launcher: Launcher, model: Path, alone: Engine
    ) -> None:
        self.backend = backend
        self._tier = {"deadline_s": DEADLINE_S, "breaker_pause_s": PAUSE_S, **tier}
        self._launcher, self._model, self._alone = launcher, model, alone
        self._engine: Engine | None = None
        self._kept = [prompt(seed) for seed in range(KEPT_PROMPTS)]
        self._next_kept = 0
        self._next_new = 1000

    def cell(self, fault: str) -> Seen:
        """Let the tier suffer from one fault, and recover."""
        seen = Seen()
        engine = self._started()
        try:
            self._fill(engine)
            try:
                self._suffer(engine, fault, seen)
            finally:
                self.backend.come_back()
            self._recover(engine, seen)
            if (engine.tiers_process is None) != (self.backend.more.get("isolation") == "thread"):
                raise EngineError(f"the tiers are not where they are said to be\n{engine.log()}")
        except BaseException:
            self.end()
            raise
        alone = self._ask(self._alone, seen.during[0].prompts)
        seen.alone_s = max(alone.waits_s)
        return seen

    def end(self) -> None:
        """Let go of the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.kill()

    def stop(self) -> None:
        """Stop the engine in an orderly way."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    # --- the parts of a cell -----------------------------------------------------------------------

    def _fill(self, engine: Engine) -> None:
        """Ask until the tier serves most of the prompts that are asked again and again."""
        deadline = time.monotonic() + FILL_S
        while True:
            served = self._count(engine, "kvtier_loaded_chunks")
            for _ in range(0, KEPT_PROMPTS, KEPT_AT_ONCE):
                self._ask(engine, self._some_kept())
                engine.settled()
            if self._count(engine, "kvtier_loaded_chunks") - served >= MOST * KEPT_PROMPTS * PROMPT_CHUNKS:
                return
            if time.monotonic() > deadline:
                raise EngineError(f"the tier does not serve what it was given\n{engine.metrics()}")

    def _suffer(self, engine: Engine, fault: str, seen: Seen) -> None:
        before, begun = engine.metrics(), None
        while begun is None or not self._is_enough(seen, fault, time.monotonic() - begun):
            prompts = self._some_kept() + self._some_new(NEW_AT_ONCE)
            if begun is not None:
                self.backend.begin(fault)
            self._tell(engine, prompts)
            if begun is None:
                time.sleep(MIDST_S)  # gets and puts are under way
                self.backend.begin(fault)
                begun = time.monotonic()
            seen.during.append(self._hear(engine, prompts))
            self._note(seen, before, engine.metrics())

    def _is_enough(self, seen: Seen, fault: str, lasted_s: float) -> bool:
        is_shown = self.backend.shows(fault, seen.reasons) or lasted_s > SHOWN_S
        return is_shown and lasted_s > LASTS_S and len(seen.during) >= ROUNDS

    def _recover(self, engine: Engine, seen: Seen) -> None:
        ended = time.monotonic()
        names = ("kvtier_loaded_chunks", "kvtier_put_chunks")
        before = [self._count(engine, name) for name in names]
        while True:
            seen.afterwards.append(self._ask(engine, self._some_kept() + self._some_new(1)))
            seen.back_s = time.monotonic() - ended
            if all(self._count(engine, name) > count for name, count in zip(names, before, strict=True)):
                return
            if seen.back_s > RECOVERY_S:
                raise EngineError(f"not used again after {RECOVERY_S:g} s\n{engine.metrics()}")

    def _note(self, seen: Seen, before: Metrics, after: Metrics) -> None:
        tier = self.backend.tier
        words = {labels.get("reason", "") for _, labels, _ in after.samples} - {""}
        seen.reasons = Counter()
        for name, word in itertools.product(_REASONS, words):
            count = after.value(name, tier=tier, reason=word) - before.value(name, tier=tier, reason=word)
            seen.reasons[word] += int(count)
        seen.reasons = +seen.reasons

    # --- requests ----------------------------------------------------------------------------------

    def _started(self) -> Engine:
        if self._engine is None:
            # Slots for eight prompts: what is asked again later has to come from the tier.
            settings = {
                "cpu_bytes_to_use": "16MiB",
                "request_deadline_s": DEADLINE_S,
                "secondary_tiers": [self._tier],
                **self.backend.more,
            }
            self._engine = self._launcher.start(
                self._model,
                settings,
                finds=self.backend.finds,
                num_gpu_blocks_override=128,
            )
        return self._engine

    def _some_kept(self) -> list[Tokens]:
        chosen = [self._kept[(self._next_kept + place) % KEPT_PROMPTS] for place in range(KEPT_AT_ONCE)]
        self._next_kept += KEPT_AT_ONCE
        return chosen

    def _some_new(self, count: int) -> list[Tokens]:
        self._next_new += count
        return [prompt(self._next_new - place) for place in range(count)]

    def _ask(self, engine: Engine, prompts: Sequence[Tokens]) -> Answered:
        self._tell(engine, prompts)
        return self._hear(engine, prompts)

    def _tell(self, engine: Engine, prompts: Sequence[Tokens]) -> None:
        if engine.has_kvtier:
            engine.reset(connector=False)  # what the device has is not asked of tiers
        arguments = {"prompts": prompts, "output_tokens": OUTPUT_TOKENS}
        engine.tell("call", module="tests.integration.traffic", function="timed", arguments=arguments)

    def _hear(self, engine: Engine, prompts: Sequence[Tokens]) -> Answered:
        heard = engine.hear("call", PATIENCE_S)
        return Answered(prompts, heard["answers"], heard["ends"], heard["waits"])

    def _count(self, engine: Engine, name: str) -> float:
        return engine.metrics().value(name, tier=self.backend.tier)
