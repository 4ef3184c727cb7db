"""``kvtier bench replay``: scaling, metrics, and a replay without a model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from aiohttp import web
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvtier.errors import KVTierError
from kvtier_bench import commands
from kvtier_bench.replay import records
from kvtier_bench.replay.counters import COMPUTED, DEVICE, Counters
from kvtier_bench.replay.workload import Scale
from kvtier_bench.simulate.trace import CHUNK_TOKENS, TimedLine

some = hypothesis.settings(max_examples=100, deadline=None)
UNTIL_S = 60.0


@st.composite
def lines(draw: st.DrawFn) -> TimedLine:
    ids = draw(st.lists(st.integers(0, 8), min_size=1, max_size=6, unique=True))
    length = draw(st.integers((len(ids) - 1) * CHUNK_TOKENS + 1, len(ids) * CHUNK_TOKENS))
    return TimedLine(
        list(ids),
        timestamp=draw(st.integers(0, 10**6)),
        input_length=length,
        output_length=draw(st.integers(1, 2000)),
    )


def common(one: list[Any], other: list[Any]) -> int:
    """Return the length of the common prefix of two lists."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@some
@hypothesis.given(
    st.lists(lines(), min_size=2, max_size=8),
    st.floats(0.1, 1000),
    st.sampled_from([16, 32, 100, 512]),
    st.integers(0, 3),
)
def test_scaled_prompts_share_the_same(
    trace: list[TimedLine], speed: float, tokens_per_chunk: int, seed: int
) -> None:
    scale = Scale(speed, tokens_per_chunk, seed)
    chosen = scale.requests(trace, len(trace))
    prompts = [scale.prompt(request) for request in chosen]
    for request, prompt in zip(chosen, prompts, strict=True):
        assert len(prompt) == request.prompt_tokens
        for other, its in zip(chosen, prompts, strict=True):
            shared = common(list(request.ids), list(other.ids)) * tokens_per_chunk
            shorter = min(len(prompt), len(its))
            assert min(shared, shorter) <= common(prompt, its)
            if shared + tokens_per_chunk <= shorter:
                assert common(prompt, its) < shared + tokens_per_chunk


@some
@hypothesis.given(st.lists(lines(), min_size=1, max_size=8), st.floats(0.1, 1000), st.integers(16, 512))
def test_trace_is_divided(trace: list[TimedLine], speed: float, tokens_per_chunk: int) -> None:
    chosen = Scale(speed, tokens_per_chunk, 0).requests(trace, len(trace))
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(chosen))
    by_time = sorted(trace, key=lambda line: line.timestamp)
    for request, line in zip(chosen, by_time, strict=True):
        assert request.at_s * speed == pytest.approx((line.timestamp - by_time[0].timestamp) / 1000)
        for scaled, length in (
            (request.prompt_tokens, line.input_length),
            (request.output_tokens, line.output_length),
        ):
            assert abs(scaled - length * tokens_per_chunk / CHUNK_TOKENS) <= 1


def conversations(count: int, turns: int) -> list[TimedLine]:
    """Return conversations that share a system prompt and whose turns are interleaved."""
    return [
        TimedLine(
            [0, *range(1000 * (number + 1), 1000 * (number + 1) + 2 * turn + 1)],
            timestamp=1000.0 * (turn * count + number),
            input_length=(2 * turn + 2) * CHUNK_TOKENS,
            output_length=64,
        )
        for turn in range(turns)
        for number in range(count)
    ]


def test_sample_keeps_conversations() -> None:
    trace = conversations(100, 5)
    scale = Scale(1.0, 32, 1)
    chosen = scale.requests(trace, 50)
    whose = [request.ids[1] for request in chosen]
    assert {whose.count(one) for one in whose} == {5}
    assert chosen[-1].at_s > 350
    assert [request.ids[1] for request in Scale(1.0, 32, 2).requests(trace, 50)] != whose
    assert sum(scale.reusable(chosen)) == 49 * 32 + 10 * 32 * (1 + 3 + 5 + 7)


PAGE = """\
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 1000.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 600.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 400.0
# TYPE kvtier_loaded_chunks counter
kvtier_loaded_chunks_total{tier="cpu"} 3.0
kvtier_loaded_chunks_total{tier="fs"} 1.0
# TYPE vllm:kv_offload_tiering_read_bytes counter
vllm:kv_offload_tiering_read_bytes_total{tier="fs"} 1048576.0
# TYPE vllm:kv_offload_tiering_write_bytes counter
vllm:kv_offload_tiering_write_bytes_total{tier="fs"} 2097152.0
# TYPE vllm:kv_offload_load_bytes counter
vllm:kv_offload_load_bytes_total 4194304.0
# TYPE kvtier_tier_used_bytes gauge
kvtier_tier_used_bytes{tier="fs"} 3145728.0
kvtier_tier_used_bytes{tier="cpu"} 1048576.0
"""
COMPUTED_SO_FAR = PAGE.splitlines()[1].partition(" ")[0]
PREFIX_CACHE = """\
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total 100.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total 30.0
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total 20.0
"""


def test_tokens_come_from_metrics() -> None:
    nothing, now = Counters(None), Counters(PAGE)
    assert now.tokens(nothing) == {COMPUTED: 1000, DEVICE: 600, "cpu": 300, "fs": 100}
    assert set(now.tokens(now).values()) == {0}
    assert now.left_out == []
    found = {row.source: row for row in records.sources("it", nothing, now)}
    assert list(found) == [COMPUTED, DEVICE, "cpu", "fs"]
    moved = {name: (row.percent, row.read_mib, row.written_mib, row.used_mib) for name, row in found.items()}
    assert moved == {
        COMPUTED: (50, None, None, None),
        DEVICE: (30, None, None, None),
        "cpu": (15, 4, None, 1),
        "fs": (5, 1, 2, 3),
    }
    older = Counters(PREFIX_CACHE)
    assert older.tokens(nothing) == {COMPUTED: 50, DEVICE: 30, "tiers": 20}
    assert (nothing.tokens(nothing), records.sources("it", nothing, nothing)) == ({}, [])
    assert nothing.left_out == ["hits", "hits by tier", "bytes by tier"]
    assert older.left_out == ["hits by tier", "bytes by tier"]


class Service:
    """An OpenAI-compatible server without a model, in a thread.

    Attributes:
        orders: the requests received.
        refuses: length, in tokens, of the prompts that it refuses.
    """

    def __init__(self, *, takes_ids: bool, has_metrics: bool) -> None:
        self._takes_ids = takes_ids
        self._has_metrics = has_metrics
        self.orders: list[dict[str, Any]] = []
        self.refuses = -1
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "it", "max_model_len": 1000}]})

    async def page(self, _: web.Request) -> web.Response:
        """Report a cache that is always empty."""
        if not self._has_metrics:
            return web.Response(status=404)
        computed = sum(len(order["words"]) for order in self.orders)
        return web.Response(text=f"{PAGE.splitlines()[0]}\n{COMPUTED_SO_FAR} {computed}\n")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        order = await request.json()
        if not self._takes_ids and not isinstance(order["prompt"], str):
            return web.json_response({"error": "prompt: not a string"}, status=400)
        words = order["prompt"].split() if isinstance(order["prompt"], str) else order["prompt"]
        if len(words) == self.refuses:
            return web.json_response({"error": "no"}, status=503)
        self.orders.append({**order, "words": words})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        pieces: list[dict[str, Any]] = [{"choices": [{"text": "w"}]}] * order["max_tokens"]
        for piece in [*pieces, {"choices": [], "usage": {"completion_tokens": order["max_tokens"]}}]:
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve(self, ready: threading.Event, ended: asyncio.Event) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self.models),
                web.get("/metrics", self.page),
                web.post("/v1/completions", self.completions),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await ended.wait()
        await runner.cleanup()


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Run a server for the duration of the test."""
    found = Service(**request.param)
    ready, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(found.serve(ready, ended),))
    thread.start()
    try:
        assert ready.wait(UNTIL_S)
        yield found
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(UNTIL_S)
        loop.close()


def write(path: Path, trace: list[TimedLine]) -> str:
    rows = [
        {
            "timestamp": line.timestamp,
            "input_length": line.input_length,
            "output_length": line.output_length,
            "hash_ids": line.hash_ids,
        }
        for line in trace
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def replayed(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    result = CliRunner().invoke(commands.bench, ["replay", *arguments, "--speed", "1000", "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    "service",
    [{"takes_ids": True, "has_metrics": True}, {"takes_ids": False, "has_metrics": False}],
    ids=["ids", "text"],
    indirect=True,
)
def test_replay_counts_failures(service: Service, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    trace = conversations(4, 3)
    service.refuses = 4 * 20  # the second turns
    found = replayed(write(tmp_path / "trace.jsonl", trace), "--url", service.url, "--tokens-per-chunk", "20")
    (served,), (latency,) = found["Served"], found["Latency"]
    assert (served["sent"], served["failed"]) == (12, "4; HTTP 503: 4")
    assert latency["ttft_p99"] >= latency["ttft_p50"] > 0
    as_text = request.node.callspec.id == "text"
    assert served["prompts"] == ("text" if as_text else "token ids")
    assert served["left_out"].split(", ")[0] == ("hits" if as_text else "hits by tier")
    scale = Scale(1000.0, 20, 0)
    expected = [
        ([str(token) for token in prompt] if as_text else prompt, 2)
        for prompt in map(scale.prompt, scale.requests(trace, 12))
        if len(prompt) != service.refuses
    ]
    asked = [(order["words"], order["max_tokens"]) for order in service.orders]
    assert sorted(asked[-9:-1]) == sorted(expected)  # The last request makes the engine report its last step.
    answered = sum(len(words) for words, _ in expected) + 2
    assert (served["computed"], served["hit_percent"]) == ((None, None) if as_text else (answered, 0))
    assert found["Interval"][-1]["sent"] == 12
    assert found["Workload"][0]["requests"] == 12


@pytest.mark.parametrize("service", [{"takes_ids": True, "has_metrics": False}], indirect=True)
def test_long_requests_suggest_scale(service: Service, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", conversations(1, 12))
    with pytest.raises(KVTierError, match=r"--tokens-per-chunk (\d+) or less") as caught:
        replayed(trace, "--url", service.url, "--tokens-per-chunk", "64")
    fits = str(caught.value).split("--tokens-per-chunk ")[1].split()[0]
    assert 30 < int(fits) < 64
    assert replayed(trace, "--url", service.url, "--tokens-per-chunk", fits)["Served"][0]["failed"] == "0"


@pytest.mark.parametrize(
    ("line", "arguments", "words"),
    [
        ('{"hash_ids": [1]}', (), 'trace.jsonl, line 1: .*each line is an object with "timestamp"'),
        ("", (), "has no requests"),
        ("", ("--url", "http://x", "--config", "none"), "both --url and --config"),
        (
            '{"hash_ids": [1], "timestamp": 0, "input_length": 9, "output_length": 9}',
            ("--url", "http://127.0.0.1:1"),
            "http://127.0.0.1:1/v1/models does not name a model",
        ),
    ],
)
def test_unreplayable_is_named(tmp_path: Path, line: str, arguments: tuple[str, ...], words: str) -> None:
    (path := tmp_path / "trace.jsonl").write_text(line)
    with pytest.raises(KVTierError, match=words):
        replayed(str(path), *arguments)
