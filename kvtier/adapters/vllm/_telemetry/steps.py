"""Measures how fast the engine computes prompts, from vLLM's calls in each step.

vLLM names no tokens and no times. A step's chunks are those that it offers to be stored. Its time runs to
``get_stats`` from its scheduling, or from the end of the previous step if that came later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier._core.tiering import Tiering
from kvtier.keys import OffloadKey, group_index

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

_MOST_STEPS = 8  # in flight; without calls of ``get_stats`` nothing is measured
_FROM_PROMPT = 2  # chunks: a single one, of generation or after a hit, is mostly overhead
_UNSEEN = 0.5  # chunks: a prompt's average rest after its last whole chunk


def end_of(context: ReqContext, key: OffloadKey) -> int | None:
    """Return the number of prompt tokens up to the end of a chunk; None if vLLM does not tell."""
    position = getattr(context, "get_offload_key_position", None)
    return None if position is None else position(key)


@dataclass(slots=True)
class _Step:
    """A step: its time of scheduling, its chunks, and the sum of their places."""

    begun_s: float = 0.0
    chunks: float = 0.0
    places: float = 0.0


class StepMeter:
    """Reports the engine's computing times to the core.

    It counts chunks of ``chunk_tokens`` tokens of the KV cache group ``group``, one with full attention,
    which has chunks for the whole prompt. ``stores_decodes``: chunks of generated tokens are offered, too.
    ``ends_last``: a step is scheduled after its chunks are offered, not before.
    """

    def __init__(
        self,
        core: Tiering,
        clock: Callable[[], float],
        chunk_tokens: int,
        *,
        group: int,
        stores_decodes: bool,
        ends_last: bool,
    ) -> None:
        self._core = core
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._group = group
        self._least = _FROM_PROMPT if stores_decodes else 1
        self._ends_last = ends_last
        self._next = _Step()
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._ended_s = 0.0
        self._last: dict[str, int] = {}  # last counted place of each request
        self._loaded: dict[str, int] = {}  # last loaded place of each request

    def place(self, context: ReqContext, key: OffloadKey) -> int | None:
        """Return how many chunks of the prompt precede a key's chunk.

        None if vLLM does not tell, for a chunk of another group, and for a partial chunk.
        """
        end = end_of(context, key) if group_index(key) == self._group else None
        return None if end is None or end % self._chunk_tokens else end // self._chunk_tokens - 1

    def offered(self, context: ReqContext, keys: Sequence[OffloadKey], first: OffloadKey | None) -> None:
        """Note chunks that the step computes and offers to be stored, or offers again after a refusal.

        ``first`` is the first key that was looked up for the request: the engine had the chunks before it.
        """
        begin = None if first is None else self.place(context, first)
        if begin is None:
            return
        last, loaded = self._last.get(context.req_id), self._loaded.get(context.req_id)
        begin = max(begin, -1 if loaded is None else loaded + 1, -1 if last is None else last + 1)
        places = [place for key in keys if (place := self.place(context, key)) is not None and place >= begin]
        if not places:
            return
        self._last[context.req_id] = max(places)
        if len(places) < (self._least if loaded is None else _FROM_PROMPT):
            return
        step = self._next if self._ends_last or not self._steps else self._steps[-1]
        chunks = len(places) + (_UNSEEN if last is None else 0.0)
        step.chunks += chunks
        step.places += chunks * sum(places) / len(places)

    def loaded(self, context: ReqContext, keys: Iterable[OffloadKey]) -> None:
        """Note chunks that are loaded, not computed, though they may be offered."""
        places = [place for key in keys if (place := self.place(context, key)) is not None]
        if places:
            self._loaded[context.req_id] = max(places)

    def forget(self, req_id: str) -> None:
        """Forget a request that has ended, or was preempted and is recomputed."""
        self._last.pop(req_id, None)
        self._loaded.pop(req_id, None)

    def start_step(self) -> None:
        step, self._next = self._next, _Step()
        step.begun_s = self._clock()
        self._steps.append(step)

    def end_step(self) -> None:
        """Note that the oldest step in flight has ended."""
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self._clock()
        if step.chunks:
            seconds = now_s - max(step.begun_s, self._ended_s)
            self._core.note_computed(int(step.places / step.chunks), step.chunks, seconds)
        self._ended_s = now_s
