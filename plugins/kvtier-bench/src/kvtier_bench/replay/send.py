"""Sends the requests of a replay at their due times, and measures the server's answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median

from kvtier.errors import KVTierError
from kvtier_bench.engine.compared import say
from kvtier_bench.replay.client import Client, RequestOutcome, session
from kvtier_bench.replay.counters import Counters
from kvtier_bench.replay.records import (
    Interval,
    Latency,
    Record,
    Served,
    hit_percent,
    percentile_ms,
    sources,
)
from kvtier_bench.replay.workload import Scale, TraceRequest

_INTERVALS, _INTERVAL_S = 24, 2.0
_STEP = [2, 3]  # Makes the engine report its last step. It is shorter than a block.


async def replay(
    name: str, url: str, scale: Scale, requests: Sequence[TraceRequest], longest: int
) -> list[Record]:
    """Send the requests to a server and return its figures.

    Args:
        name: name of the server in the figures.
        longest: number of tokens in the longest request and its answer.

    Raises:
        KVTierError: the server does not answer or does not accept a request of this length.
    """
    async with session() as opened:
        client = Client(opened, url)
        await client.connect()
        if client.longest is not None and client.longest < longest:
            raise too_long(longest, client.longest, scale)
        sender = _Sender(name, client, scale, requests)
        await sender.run()
    return sender.records()


def too_long(longest: int, bears: int, scale: Scale) -> KVTierError:
    """Return an error about requests that are longer than a server accepts."""
    fits = scale.tokens_per_chunk * bears // longest - 1
    return KVTierError(
        f"the longest request has {longest} tokens, and the server takes {bears}: "
        f"--tokens-per-chunk {fits} or less is short enough"
    )


class _Sender:
    """One replay through one server."""

    def __init__(self, name: str, client: Client, scale: Scale, requests: Sequence[TraceRequest]) -> None:
        self._name = name
        self._client = client
        self._scale = scale
        self._requests = requests
        self._interval_s = max(_INTERVAL_S, requests[-1].at_s / _INTERVALS)
        self._answers: list[RequestOutcome] = []
        self._course: list[Interval] = []
        self._sent = 0
        self._seconds = 0.0
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Send all requests and wait for the answers."""
        self._first = self._last = Counters(await self._client.metrics())
        self._started = self._noted = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            await self._send()
            self._seconds = time.monotonic() - self._started
            await self._client.complete(_STEP, 2)
            self._ended.set()

    def records(self) -> list[Record]:
        """Return the figures.

        Raises:
            KVTierError: no request was answered.
        """
        answered = [answer for answer in self._answers if answer.error is None]
        if not answered:
            raise KVTierError(f"{self._name}: no request was answered; the last: {self._answers[-1].error}")
        served = Served.of(
            self._name,
            self._client.prompts,
            self._answers,
            self._seconds,
            self._last.tokens(self._first),
            sum(self._scale.reusable(self._requests)),
            self._last.left_out,
        )
        return [
            Latency.of(self._name, answered),
            served,
            *sources(self._name, self._first, self._last),
            *self._course,
        ]

    async def _send(self) -> None:
        async with asyncio.TaskGroup() as group:
            for request in self._requests:
                # Made before the due time, so that it does not delay the request.
                prompt = self._scale.prompt(request)
                due = self._started + request.at_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._ask(prompt, request.output_tokens, due))
                self._sent += 1

    async def _ask(self, prompt: Sequence[int], tokens: int, due: float) -> None:
        self._answers.append(await self._client.complete(prompt, tokens, due))

    async def _watch(self) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self._interval_s)
            self._note(Counters(await self._client.metrics()))

    def _note(self, now: Counters) -> None:
        """Record the figures since the last call, and print them."""
        at, tokens = time.monotonic(), now.tokens(self._last)
        ttft = [answer.ttft_s for answer in self._answers if self._noted < answer.first_at <= at]
        row = Interval(
            self._name,
            at - self._started,
            self._sent,
            self._sent - len(self._answers),
            hit_percent(tokens),
            median(ttft) * 1e3 if ttft else None,
        )
        self._course.append(row)
        self._last, self._noted = now, at
        self._say(row, now.tokens(self._first))

    def _say(self, row: Interval, tokens: Mapping[str, float]) -> None:
        ttft = [answer.ttft_s for answer in self._answers if answer.error is None]
        hits = hit_percent(tokens)
        say(
            f"{self._name}: {row.until_s:.0f} s: sent {row.sent} of {len(self._requests)}, "
            f"in flight {row.in_flight}, failed {sum(answer.error is not None for answer in self._answers)}"
            + ("" if hits is None else f"; hits {hits:.0f} %")
            + (
                f"; TTFT p50 {percentile_ms(ttft, 50):.0f} ms, p95 {percentile_ms(ttft, 95):.0f} ms"
                if ttft
                else ""
            )
        )
