"""Explains requests: one line tells how much of a prompt each tier had, and why not more."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from vllm.v1.kv_offload.base import ReqContext

from kvtier._core.requests import LookupRecord, Request
from kvtier._core.shared import PRIMARY
from kvtier._core.tiers.backoff import RandomSource
from kvtier._telemetry import explanation
from kvtier._telemetry.explanation import Explanation
from kvtier._telemetry.traces import REQUEST, Traces
from kvtier.adapters.vllm._hints import Hint
from kvtier.adapters.vllm._telemetry.steps import end_of
from kvtier.keys import OffloadKey, group_index


@dataclass(slots=True)
class _Tracked:
    """A request between its arrival and the step that schedules it."""

    context: ReqContext
    request: Request
    record: LookupRecord
    hints: Sequence[Hint]
    is_explained: bool
    is_asked: bool = False  # whether its client asked for it
    tokens: dict[str, int] = field(default_factory=dict)
    end: int | None = None  # end of the loaded chunks, in tokens
    asked_s: float | None = None
    waiting_since_s: float | None = None
    waited_s: float = 0.0

    def note_waiting(self, now_s: float) -> None:
        """Note that the request waits, or has stopped waiting."""
        if self.request.is_waiting:
            if self.waiting_since_s is None:
                self.waiting_since_s = now_s
        elif self.waiting_since_s is not None:
            self.waited_s += now_s - self.waiting_since_s
            self.waiting_since_s = None


class Explainer:
    """Follows requests that are to be explained, from their arrival to the step that schedules them.

    It explains the share ``rate`` of them, besides those that ask for it. ``chunk_tokens`` is by KV cache
    group.
    """

    def __init__(
        self,
        tiers: Sequence[str] = (),
        chunk_tokens: Mapping[int, int] | None = None,
        rate: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: RandomSource = random.random,
    ) -> None:
        self.tracked: dict[str, _Tracked] = {}  # requests followed now, by id
        self.traces: Traces | None = None  # receives spans of every request
        self._asked: set[str] = set()  # requests with new lookups in this step
        self._answers: dict[str, Explanation] = {}  # for running requests whose clients asked
        self._rate = rate
        self._tiers = tiers
        self._chunk_tokens = chunk_tokens or {}
        self._clock = clock
        self._chance = chance
        if rate:
            explanation.enable()

    @property
    def is_on(self) -> bool:
        """Whether requests that did not ask to be explained are followed, too."""
        return self._rate > 0 or self.traces is not None

    def follow(
        self, context: ReqContext, request: Request, hints: Sequence[Hint] = (), *, is_asked: bool
    ) -> None:
        """Follow a request that has arrived, if it is to be explained or traced."""
        is_explained = is_asked or (self._rate > 0 and self._chance() < self._rate)
        if is_explained:
            explanation.enable()
        if is_explained or self.traces is not None:
            request.record = LookupRecord(context.req_id, self._asked)
            tracked = _Tracked(context, request, request.record, hints, is_explained, is_asked)
            self.tracked[context.req_id] = tracked

    def loaded(self, req_id: str, keys: Collection[OffloadKey], origins: Sequence[int | None]) -> None:
        """Note the chunks that a request loads, and their tiers."""
        if (tracked := self.tracked.get(req_id)) is not None:
            tracked.tokens, tracked.end = self._loaded(tracked.context, keys, origins)

    def load_failed(self, req_id: str) -> None:
        if (tracked := self.tracked.get(req_id)) is not None:
            tracked.tokens, tracked.end = {}, None

    def step_ended(self, scheduled: Collection[str]) -> None:
        """Note which requests wait after a step, and explain those that it has scheduled.

        A request that is asked again although nothing has changed is not in ``_asked``, and goes on waiting.
        """
        now_s = self._clock()
        for req_id in self._asked:
            if (tracked := self.tracked.get(req_id)) is None:
                continue
            if tracked.asked_s is None:
                tracked.asked_s = now_s
            tracked.note_waiting(now_s)
        for req_id in scheduled:
            if (done := self.tracked.pop(req_id, None)) is not None:
                done.request.record = None
                done.note_waiting(now_s)
                if not done.tokens and req_id not in self._asked:
                    done.record.misses.clear()  # misses of an older scan: the engine's cache has them now
                self._tell(done, now_s)
        self._asked.clear()

    def forget(self, req_id: str) -> None:
        self.tracked.pop(req_id, None)
        self._answers.pop(req_id, None)
        self._asked.discard(req_id)

    def answer(self, req_id: str) -> Explanation | None:
        """Return the explanation of a request that has not ended, if its client asked for one."""
        return self._answers.get(req_id)

    def _tell(self, done: _Tracked, now_s: float) -> None:
        explained = self._explained(done)
        if done.is_asked:
            self._answers[done.context.req_id] = explained
        if done.is_explained:
            explanation.write(explained)
        if self.traces is not None and done.asked_s is not None:
            attributes: dict[str, Any] = {REQUEST: explained.request, "kvtier.waited_s": explained.waited_s}
            attributes |= {f"kvtier.tokens.{tier}": count for tier, count in explained.tokens.items()}
            attributes |= {f"kvtier.missing.{tier}": word for tier, word in explained.tiers.items()}
            ends = {"kvtier.prefix_end": explained.prefix_end, "kvtier.reason": explained.reason}
            attributes |= {name: value for name, value in ends.items() if value is not None}
            self.traces.looked_up(attributes, now_s - done.asked_s, is_explained=done.is_explained)

    def _explained(self, tracked: _Tracked) -> Explanation:
        gap = self._gap(tracked)
        end = tracked.end
        if gap is not None and not tracked.tokens:
            position = end_of(tracked.context, gap)
            end = None if position is None else max(0, position - self._chunk_tokens.get(group_index(gap), 0))
        return Explanation(
            request=tracked.context.req_id,
            tokens=tracked.tokens,
            prefix_end=end,
            reason=None if gap is None else tracked.record.misses[gap],
            tiers={} if gap is None else tracked.record.refusals.get(gap, {}),
            waited_s=round(tracked.waited_s, 6),
            hints=[f"{hint.type} {hint.outcome}: {hint.reason}" for hint in tracked.hints],
        )

    def _loaded(
        self, context: ReqContext, keys: Collection[OffloadKey], origins: Sequence[int | None]
    ) -> tuple[dict[str, int], int | None]:
        """Return how many tokens each tier supplied, and where in the prompt they end.

        Groups may have chunks of different lengths, and from different tiers. A token that any group lacks is
        computed, whatever other groups have after it. A token from several tiers counts for the last of them.
        If vLLM does not give the places of chunks, they are taken as one group's.
        """
        piece = gcd(*self._chunk_tokens.values()) or 1
        last: dict[int, int] = {}  # tier of each piece that has one, by its start
        ends: dict[int, int] = {}
        is_placed = True
        for key, tier in zip(keys, origins, strict=True):
            group = group_index(key)
            size, end = self._chunk_tokens.get(group, piece), end_of(context, key)
            if end is None:  # as if it came next
                is_placed, end = False, ends.get(group, 0) + size
            ends[group] = max(ends.get(group, 0), end)
            # The last chunk may be partly filled if the model has recurrent state.
            for begin in range((end - 1) // size * size, end, piece):
                last[begin] = max(last.get(begin, -1), -1 if tier is None else tier)
        until = (min if is_placed else max)(ends.values(), default=0)
        tokens: Counter[str] = Counter()
        for begin, tier in last.items():
            if begin < until:
                tokens[PRIMARY if tier < 0 else self._tiers[tier]] += min(piece, until - begin)
        return dict(tokens), until if is_placed and ends else None

    def _gap(self, tracked: _Tracked) -> OffloadKey | None:
        """Return the chunk that ends the prefix: the first missed one after the loaded chunks.

        vLLM also asks for ends of prefixes within a chunk, which models with recurrent state store. A missing
        one does not end the prefix.
        """
        positions = {key: end_of(tracked.context, key) for key in tracked.record.misses}
        loaded_to = tracked.end or 0
        behind = [
            key
            for key, end in positions.items()
            if end is None or (end > loaded_to and end % self._chunk_tokens.get(group_index(key), 1) == 0)
        ]
        return min(behind, key=lambda key: positions[key] or 0, default=None)
