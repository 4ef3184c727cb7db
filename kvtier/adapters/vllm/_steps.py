"""Measures how fast the engine computes prompts, from what vLLM tells a manager of each step.

vLLM names no tokens and no times. A step's chunks are those that it offers to be stored; its time runs
from when it was scheduled, or from the end of the step before where that came later, to ``get_stats``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey

_MOST_STEPS = 8  # in flight; an engine that does not ask for statistics measures nothing
_FROM_PROMPT = 2  # chunks: generating completes one at a time
_UNSEEN = 0.5  # of a chunk: what a prompt has on average beyond its last whole one


@dataclass(slots=True)
class _Step:
    """A step: when it was scheduled, its chunks, and the sum of their places."""

    begun_s: float = 0.0
    chunks: float = 0.0
    places: float = 0.0


class StepMeter:
    """Tells the core how long the engine computes.

    Args:
        core: what is told.
        clock: seconds, monotonic.
        stores_decodes: whether chunks of generated tokens are offered, too.
        ends_last: whether a step is scheduled after its chunks are offered, or before.
    """

    def __init__(
        self,
        core: Tiering,
        clock: Callable[[], float],
        *,
        stores_decodes: bool,
        ends_last: bool,
    ) -> None:
        self._core = core
        self._clock = clock
        self._least = _FROM_PROMPT if stores_decodes else 1
        self._ends_last = ends_last
        self._next = _Step()
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._ended_s = 0.0
        self._offered: dict[str, int] = {}  # chunks of each request so far
        self._refused: dict[str, int] = {}  # of the last offer, those that will be offered again

    def computed(self, req_id: str, keys: Sequence[OffloadKey], *, again: bool) -> None:
        """Note chunks that the step computes. ``again``: they will be offered once more in a later step."""
        count = self._core.count_prefix_keys(keys)
        new = count - self._refused.pop(req_id, 0)
        if again:
            self._refused[req_id] = count
        if new < self._least:
            return
        place = self._offered.get(req_id)
        step = self._next if self._ends_last or not self._steps else self._steps[-1]
        chunks = new + (_UNSEEN if place is None else 0.0)
        step.chunks += chunks
        step.places += chunks * ((place or 0) + new / 2)
        self._offered[req_id] = (place or 0) + new

    def forget(self, req_id: str) -> None:
        """Forget a request that has ended."""
        self._offered.pop(req_id, None)
        self._refused.pop(req_id, None)

    def begin(self) -> None:
        """Note that a step was scheduled."""
        step, self._next = self._next, _Step()
        step.begun_s = self._clock()
        self._steps.append(step)

    def end(self) -> None:
        """Note that the oldest step in flight has ended."""
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self._clock()
        if step.chunks:
            seconds = now_s - max(step.begun_s, self._ended_s)
            self._core.note_computed(int(step.places / step.chunks), step.chunks, seconds)
        self._ended_s = now_s
