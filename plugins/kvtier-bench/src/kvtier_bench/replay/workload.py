"""The requests of a replay: whole conversations of a trace, scaled in time and length.

- All times are divided by the same number. So pauses keep their proportions, both to each other and to the
  bytes that other requests store meanwhile.
- Each chunk of the trace becomes ``tokens_per_chunk`` tokens, which are the same for each occurrence of its
  id. So prompts share as much as before. All lengths are scaled in proportion, and no request is truncated.
- If fewer requests are wanted, whole conversations are chosen, spread over the duration of the trace. A chunk
  that occurs in more than 50 requests and more than 1 % of them, such as a system prompt, does not join
  requests into a conversation.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvtier_bench.engine.compared import make_prompt
from kvtier_bench.simulate.trace import CHUNK_TOKENS, TimedLine

_SHARED_BY: Final = 50
_SHARED_BY_PERCENT: Final = 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        at_s: due time in seconds since the first request.
        ids: ids of the chunks of its prompt.
        prompt_tokens, output_tokens: number of tokens.
    """

    at_s: float
    ids: Sequence[int | str]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests

    ``reusable_percent`` of the prompt tokens, at most, need not be computed: an earlier prompt has them.
    """

    trace: str
    requests: int
    of_trace_percent: float
    speed: float
    tokens_per_chunk: int
    seconds: float
    prompt_tokens: int
    longest: int
    output_tokens: int
    reusable_percent: float
    different_chunks: int
    seed: int


def conversations(lines: Sequence[TimedLine]) -> list[list[int]]:
    """Return the line indices of each conversation."""
    used = Counter(id_ for line in lines for id_ in set(line.hash_ids))
    most = max(_SHARED_BY, len(lines) * _SHARED_BY_PERCENT / 100)
    found: dict[object, list[int]] = defaultdict(list)
    for index, line in enumerate(lines):
        own = (id_ for id_ in line.hash_ids if used[id_] <= most)
        found[next(own, ("alone", index))].append(index)
    return list(found.values())


class Scale:
    """Chooses requests and scales them.

    Args:
        speed: divisor of all times.
        tokens_per_chunk: number of tokens for each chunk of the trace, which stands for 512.
        seed: seed for the choice of conversations and for the tokens.
    """

    def __init__(self, speed: float, tokens_per_chunk: int, seed: int) -> None:
        self.speed = speed
        self.tokens_per_chunk = tokens_per_chunk
        self.seed = seed
        self._chunk = lru_cache(1 << 16)(self._make_chunk)

    def requests(self, lines: Sequence[TimedLine], count: int) -> list[TraceRequest]:
        """Return ``count`` requests of the trace, or all if it has fewer, by time."""
        lines = sorted(lines, key=lambda line: line.timestamp)
        chosen = [lines[index] for index in sorted(self._choose(lines, count))]
        return [
            TraceRequest(
                (line.timestamp - chosen[0].timestamp) / 1000 / self.speed,
                line.hash_ids,
                self._scaled(line.input_length),
                self._scaled(line.output_length),
            )
            for line in chosen
        ]

    def prompt(self, request: TraceRequest) -> list[int]:
        """Return the tokens of a request's prompt. Tokens after its last chunk are unique to the request."""
        tokens = [token for id_ in request.ids for token in self._chunk(id_)]
        if len(tokens) < request.prompt_tokens:
            behind = make_prompt(f"{self.seed} behind {request}", request.prompt_tokens - len(tokens))
            return tokens + behind
        return tokens[: request.prompt_tokens]

    def describe(self, trace: str, requests: Sequence[TraceRequest], of: int) -> Workload:
        """Return a summary of the requests.

        Args:
            of: number of requests in the trace.
        """
        prompt_tokens = sum(request.prompt_tokens for request in requests)
        reusable = sum(self.reusable(requests))
        return Workload(
            trace,
            len(requests),
            100 * len(requests) / of,
            self.speed,
            self.tokens_per_chunk,
            requests[-1].at_s,
            prompt_tokens,
            max(request.prompt_tokens + request.output_tokens for request in requests),
            sum(request.output_tokens for request in requests),
            100 * reusable / prompt_tokens,
            len({id_ for request in requests for id_ in request.ids}),
            self.seed,
        )

    def reusable(self, requests: Sequence[TraceRequest]) -> Iterator[int]:
        """Yield, for each request, the number of leading prompt tokens that an earlier prompt begins with."""
        seen: set[int | str] = set()
        for request in requests:
            known = next((at for at, id_ in enumerate(request.ids) if id_ not in seen), len(request.ids))
            yield min(known * self.tokens_per_chunk, request.prompt_tokens)
            seen.update(request.ids)

    def _choose(self, lines: Sequence[TimedLine], count: int) -> list[int]:
        """Return the line indices of whole conversations; the last one may lack some turns."""
        groups = conversations(lines)
        random.Random(self.seed).shuffle(groups)
        return [index for group in groups for index in group][:count]

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self.tokens_per_chunk / CHUNK_TOKENS))

    def _make_chunk(self, id_: int | str) -> list[int]:
        return make_prompt(f"{self.seed} {id_}", self.tokens_per_chunk)
