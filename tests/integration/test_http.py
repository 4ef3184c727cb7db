"""The engine behind HTTP: streamed tokens, its metrics endpoint after real traffic, a reset."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import hypothesis
import pytest
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES, Metric
from kvtier.tiers.fs import FsTier
from kvtier_bench.engine.compared import BLOCK_TOKENS
from kvtier_bench.engine.server import ANSWER_S, add_tokenizer
from kvtier_bench.engine.server import Server as ApiServer
from kvtier_testing.tiers._servers import free_port
from tests.effort import effort
from tests.integration.conftest import ENVIRONMENT, Ask
from tests.integration.harness import (
    OUTPUT_TOKENS,
    PROMPT_CHUNKS,
    SIZES,
    Metrics,
    Tokens,
    patient,
    prompt,
    vllm_release,
)
from tests.integration.prometheus import Prometheus, panels
from tests.integration.test_hint_actions import hostile as any_params

pytestmark = pytest.mark.timeout(900)

CHUNK_BYTES = 128 * 1024
SLOTS = 256
FULL_BYTES = 2 * 2**20  # less than all of a prompt's chunks need
ROOMY_BYTES = 2**30
PROMPT = prompt(1)
OTHERS = [prompt(seed) for seed in range(10, 16)]  # more than the device cache holds
STORED = (1 + len(OTHERS)) * PROMPT_CHUNKS
STUCK_S = 5.0  # until a hanging put is given up; gets do not hang, and are never so late
UNTIL_S = 60.0
AT_ONCE = 10
UNHEALTHY = ("KvtierTierUnhealthy", "stuck", "pending")


class Server(ApiServer):
    """An API server and its engine over kvtier.

    Args:
        model: directory of the model, with a tokenizer.
        servers: number of API servers in front of the one engine.
    """

    def __init__(self, model: Path, settings: Mapping[str, Any], log: Path, servers: int = 1) -> None:
        super().__init__(
            model,
            {"spec_name": "KVTierOffloadingSpec", **settings},
            log,
            free_port(),
            {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"},
            served_model_name="tiny",
            api_server_count=servers,
            **SIZES,
        )

    @property
    def address(self) -> str:
        """Host and port."""
        return self.url.removeprefix("http://")

    def __enter__(self) -> Server:
        super().__enter__()
        return self

    def complete(self, tokens: Sequence[int], output_tokens: int = OUTPUT_TOKENS) -> list[Tokens]:
        """Send a prompt; return the received tokens, grouped by streamed piece."""
        order = {"model": "tiny", "prompt": list(tokens), "max_tokens": output_tokens, "temperature": 0}
        order |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        pieces: list[Tokens] = []
        with self.open("/v1/completions", order) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    for choice in json.loads(line[len(b"data: ") :])["choices"]:
                        pieces.append(choice.get("token_ids") or [])
        return [piece for piece in pieces if piece]

    def answer(self, tokens: Sequence[int], **more: Any) -> Tokens:
        """Send a prompt, with optional further fields of a request; return the tokens of the answer."""
        order = {"model": "tiny", "prompt": list(tokens), "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        with self.open(
            "/v1/completions", order | {"ignore_eos": True, "return_token_ids": True} | more
        ) as it:
            return list(json.load(it)["choices"][0]["token_ids"])

    def memory_bytes(self) -> int:
        """Return the private memory of its processes."""
        found = 0
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with suppress(OSError):
                    fields = (folder / "stat").read_text().rpartition(") ")[2].split()
                    if int(fields[2]) == self._process.pid:
                        status = (folder / "status").read_text()
                        found += 1024 * int(status.partition("RssAnon:")[2].split()[0])
        return found

    def metrics(self) -> Metrics:
        with self.open("/metrics") as answer:
            text = answer.read().decode()
        samples: list[tuple[str, Mapping[str, str], float]] = []
        for family in text_string_to_metric_families(text):
            samples.append((family.name, {}, 0.0))
            samples += [(sample.name, sample.labels, sample.value) for sample in family.samples]
        return Metrics(samples)

    def until(self, condition: Callable[[Metrics], bool]) -> Metrics:
        """Let the engine run steps that store nothing until its metrics fulfil a condition."""
        deadline = time.monotonic() + UNTIL_S
        while True:
            self.complete([2, 3], 2)
            metrics = self.metrics()
            if condition(metrics):
                return metrics
            assert time.monotonic() < deadline, f"{metrics}\n{self.end_of_log()}"

    def reset(self) -> bool:
        with self.open("/reset_prefix_cache?reset_external=true", {}) as answer:
            return bool(json.load(answer)["success"])


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model with a tokenizer: one word for each token."""
    directory = tmp_path_factory.mktemp("http") / "tiny"
    shutil.copytree(llama, directory)
    add_tokenizer(directory)
    return directory


@dataclass
class Hostile:
    """Requests with hostile hints.

    Attributes:
        answers: the received answers with the number of each prompt, and their hints.
        failed: requests by HTTP status; vLLM cannot pass on some numbers and strings.
        seconds: total time of all requests.
        lines: log lines about hints.
        grown_bytes: growth of the server processes' memory since the first tenth.
        kept_bytes: pinned host memory at the end.
    """

    answers: list[tuple[int, Tokens, Any]] = field(default_factory=list)
    failed: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    lines: Sequence[str] = ()
    grown_bytes: int = 0
    kept_bytes: float = 0.0


@dataclass(frozen=True)
class FirstRun:
    """Results of the first server.

    Attributes:
        root: directory of the file tier.
        answers: answers to the prompt, first computed, then from the primary tier; in pieces.
        metrics: the final metrics.
        alerts: name, tier and state of the alerts, once each panel that can has data.
        top: output of ``kvtier top`` for the metrics.
        replayed: later measurements of ``kvtier bench replay``.
        hostile: results of later requests with hostile hints.
    """

    root: Path
    answers: tuple[list[Tokens], list[Tokens]]
    metrics: Metrics
    alerts: set[tuple[str, str, str]]
    top: dict[str, Any]
    replayed: dict[str, list[dict[str, Any]]]
    hostile: Hostile


@pytest.fixture(scope="module")
def first_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """Serve over a file tier, a tier that is too small, and one whose puts hang."""
    folder = tmp_path_factory.mktemp("http")
    root = folder / "root"
    small = {"max_bytes": FULL_BYTES, "eviction": "none"}
    tiers = [
        {"type": "fs", "root_dir": str(root), "max_bytes": ROOMY_BYTES},
        {"type": "fs", "name": "full", "root_dir": str(folder / "full"), **small},
        {"type": "dummy", "name": "stuck", "hang_rate": 1, "deadline_s": STUCK_S},
    ]
    settings = {**_settings(tiers), "drain_on_shutdown_s": 0}
    with (
        Server(model, settings, folder / "server.log") as server,
        Prometheus(server.address, free_port(), folder / "prometheus") as prometheus,
    ):
        server.complete(PROMPT[: 2 * BLOCK_TOKENS + 2])
        server.until(_is_given_up)
        cold = server.complete(PROMPT)
        for other in OTHERS:
            server.complete(other)
        again = server.complete(PROMPT)
        metrics = server.until(lambda metrics: _put(metrics) == STORED and _has_settled(metrics))
        server.until(lambda metrics: UNHEALTHY in prometheus.alerts() and not _lacking(prometheus, metrics))
        alerts = prometheus.alerts()
        top = _top(server)
        replayed = _replayed(server, folder / "trace.jsonl")
        hostile = _send_hostile(server, folder / "server.log")
    return FirstRun(root, (cold, again), metrics, alerts, top, replayed, hostile)


def _send_hostile(server: Server, log: Path) -> Hostile:
    """Send requests with hostile hints, some concurrently, and then requests without hints."""
    found, started = Hostile(), time.monotonic()
    rounds = effort(30, 1_000)
    memory: list[int] = []

    def ask(number: int, params: Any) -> None:
        try:
            answer = server.answer(OTHERS[number], kv_transfer_params=params)
            found.answers.append((number, answer, params))
        except HTTPError as error:
            found.failed[error.code] += 1

    each = st.tuples(st.integers(0, len(OTHERS) - 1), any_params)

    @hypothesis.settings(max_examples=rounds, deadline=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.lists(each, min_size=AT_ONCE, max_size=AT_ONCE))
    def run(requests: list[tuple[int, Any]]) -> None:
        list(threads.map(ask, *zip(*requests, strict=True)))
        memory.append(server.memory_bytes())

    with ThreadPoolExecutor(AT_ONCE) as threads:
        run()
    for number in range(len(OTHERS)):
        ask(number, {})
    server.require_alive()
    found.seconds = time.monotonic() - started
    found.lines = [line for line in log.read_text(errors="replace").splitlines() if "hints ignored" in line]
    found.grown_bytes = memory[-1] - memory[len(memory) // 10]
    found.kept_bytes = server.metrics().value("kvtier_kept_bytes")
    return found


def _top(server: Server) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvtier", "top", "--once", "--json", "--interval", "0.2", server.address]
    (engine,) = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)[
        "engines"
    ]
    return dict(engine)


def _replayed(server: Server, trace: Path) -> dict[str, list[dict[str, Any]]]:
    """Replay 20 requests: 10 long conversations of two turns each, more than the device cache holds."""
    lines = [
        {"timestamp": 1000 * (10 * turn + number), "input_length": 512 * (20 + turn), "output_length": 64}
        | {"hash_ids": [0, *range(100 * number + 1, 100 * number + 20 + turn)]}
        for turn in range(2)
        for number in range(10)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ["--url", server.url, "--speed", "10", "--tokens-per-chunk", str(BLOCK_TOKENS), "--json"]
    command = [sys.executable, "-m", "kvtier", "bench", "replay", str(trace), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def _joined(pieces: Sequence[Tokens]) -> Tokens:
    return [token for piece in pieces for token in piece]


def _lacking(prometheus: Prometheus, metrics: Metrics) -> list[str]:
    """Return the panels without data, although the server has samples of their metrics."""
    having = {panel: text for panel, text in panels().items() if _has_samples(metrics, text)}
    return [panel for panel, expression in having.items() if not prometheus.query(expression)]


def _has_samples(metrics: Metrics, expression: str) -> bool:
    used = re.findall(r"\b(?:kvtier_|vllm:)\w+", expression)
    return {*used} <= {name for name, labels, _ in metrics.samples if labels}


def _settings(tiers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return patient({"cpu_bytes_to_use": SLOTS * CHUNK_BYTES, "secondary_tiers": list(tiers)})


def _put(metrics: Metrics) -> float:
    return metrics.value("kvtier_put_chunks", tier="fs")


def _is_given_up(metrics: Metrics) -> bool:
    """Return whether the hanging tier gets no more puts."""
    return metrics.value("kvtier_breaker_state", tier="stuck", verb="put") == 2


def _has_settled(metrics: Metrics) -> bool:
    """Return whether the hanging tier was given up, and bytes and copies were sampled since."""
    full = ("kvtier_put_chunks", "kvtier_put_failed_chunks")
    return (
        _is_given_up(metrics)
        and sum(metrics.value(name, tier="full") for name in full) == STORED
        and all(metrics.value("kvtier_in_flight_transfers", tier=tier) == 0 for tier in ("full", "fs"))
        and metrics.value("vllm:kv_offload_store_bytes") == STORED * CHUNK_BYTES
        and metrics.value("kvtier_tier_used_bytes", tier="fs") >= STORED * CHUNK_BYTES
        and metrics.value("kvtier_tier_used_bytes", tier="full") > FULL_BYTES - 2 * CHUNK_BYTES
    )


def test_streamed_tokens_are_right(first_run: FirstRun, reference: Ask) -> None:
    assert [_joined(pieces) for pieces in first_run.answers] == reference(PROMPT) * 2
    assert max(map(len, first_run.answers)) > 1  # vLLM sends held-back tokens with the next piece


def test_metrics_are_complete(first_run: FirstRun) -> None:
    catalogue = {metric.name: metric for metric in _catalogue()}
    declared = first_run.metrics.declared
    assert catalogue.keys() <= declared
    ours = {name.removesuffix("_created") for name in declared if name.startswith("kvtier_")}
    assert ours <= catalogue.keys()
    for name, labels, _ in first_run.metrics.samples:
        metric = catalogue.get(name.removesuffix("_total"))
        if metric is not None and labels:
            assert set(labels) == {"engine", "model_name", *metric.labels}
            if "reason" in labels:
                assert labels["reason"] in metric.reasons.keys() | FsTier.reasons.keys()


def test_moves_are_counted(first_run: FirstRun) -> None:
    value, nbytes = first_run.metrics.value, STORED * CHUNK_BYTES
    assert first_run.metrics.loaded() == {"cpu": PROMPT_CHUNKS}
    assert value("kvtier_misses") == value("kvtier_misses", reason="absent") >= 1 + len(OTHERS)
    queries = value("vllm:kv_offload_tiering_chunk_queries", tier="fs")
    assert queries == value("kvtier_absent_chunks", tier="fs") >= STORED
    assert value("kvtier_absent_chunks", tier="stuck") > 0, "its gets go on"
    assert value("kvtier_stored_chunks") == STORED
    assert value("vllm:kv_offload_store_bytes") == nbytes
    assert value("vllm:kv_offload_load_bytes") == PROMPT_CHUNKS * CHUNK_BYTES
    for tier in ("fs", "full"):
        put = value("kvtier_put_chunks", tier=tier)
        assert value("vllm:kv_offload_tiering_write_bytes", tier=tier) == put * CHUNK_BYTES
        assert 0 < value("vllm:kv_offload_tiering_write_time", tier=tier) < UNTIL_S

    used = {tier: value("kvtier_tier_used_bytes", tier=tier) for tier in ("cpu", "fs", "full")}
    capacity = {tier: value("kvtier_tier_capacity_bytes", tier=tier) for tier in used}
    assert used["cpu"] == nbytes == (value("kvtier_slots") - value("kvtier_free_slots")) * CHUNK_BYTES
    assert nbytes <= used["fs"] < 1.5 * nbytes
    assert FULL_BYTES - 2 * CHUNK_BYTES < used["full"] <= FULL_BYTES
    assert capacity == {"cpu": SLOTS * CHUNK_BYTES, "fs": ROOMY_BYTES, "full": FULL_BYTES}


def test_failed_puts_counted_by_cause(first_run: FirstRun) -> None:
    value = first_run.metrics.value
    failed, stuck = "kvtier_put_failed_chunks", {"tier": "stuck"}
    refused = value(failed, tier="full", reason="max_bytes")
    assert refused == STORED - value("kvtier_put_chunks", tier="full") > 0
    late = sum(value(failed, **stuck, reason=why) for why in ("timeout", "late"))
    assert value(failed) == refused + late
    assert value("kvtier_put_dropped_chunks", **stuck, reason="breaker_open") > 0
    hanging = value("vllm:kv_offload_tiering_primary_read_usage_perc", **stuck) * SLOTS
    assert late + value("kvtier_put_dropped_chunks", **stuck) + hanging == pytest.approx(STORED)
    assert value("kvtier_overdue_transfers", **stuck, verb="put") >= 1
    assert value("kvtier_breaker_opened", **stuck, verb="put", reason="overdue") == 1
    for tier, state in (("fs", 0), ("full", 0), ("stuck", 2)):
        assert value("kvtier_breaker_state", tier=tier, verb="put") == state
        assert value("kvtier_breaker_state", tier=tier, verb="get") == 0
        assert value("kvtier_tier_healthy", tier=tier) == (state == 0)
        assert value("kvtier_tier_up", tier=tier) == 1


def test_prometheus_shows_hanging_tier(first_run: FirstRun) -> None:
    shown = [panel for panel, expression in panels().items() if _has_samples(first_run.metrics, expression)]
    assert len(shown) >= 15  # the others show gets and failures; there were none
    may_be_seen = {"KvtierTierFull", "KvtierTierTakesNothing", "KvtierPutsDropped"}
    assert UNHEALTHY in first_run.alerts
    assert {(name, state) for name, _, state in first_run.alerts - {UNHEALTHY}} <= {
        (name, "pending") for name in may_be_seen
    }
    assert not [tier for _, tier, _ in first_run.alerts if tier not in ("full", "stuck")]


def test_top_shows_every_tier(first_run: FirstRun) -> None:
    view = first_run.top
    tiers = {tier["tier"]: tier for tier in view["tiers"]}
    assert (view["error"], set(tiers)) == (None, {"cpu", "fs", "full", "stuck"})
    assert tiers["fs"]["used_bytes"] >= STORED * CHUNK_BYTES
    assert tiers["fs"]["capacity_bytes"] == ROOMY_BYTES
    assert {name: tier["breaker_put"] for name, tier in tiers.items() if name != "stuck"} == {
        "cpu": None,
        "fs": "closed",
        "full": "closed",
    }
    assert tiers["fs"]["read_per_written"] == 0.0


def test_hostile_hints_change_nothing(first_run: FirstRun, reference: Ask) -> None:
    found = first_run.hostile
    answers = reference(*OTHERS)
    assert [one for one in found.answers if one[1] != answers[one[0]]] == []
    assert len(found.answers) > sum(found.failed.values())
    assert set(found.failed) <= {400, 500}
    assert 1 <= len(found.lines) <= 1 + found.seconds / 30, "one in 30 seconds"
    assert found.grown_bytes < 100 * 2**20
    assert found.kept_bytes <= SLOTS * CHUNK_BYTES / 2


def test_replay_finds_lost_chunks(first_run: FirstRun) -> None:
    (served,), (work,) = first_run.replayed["Served"], first_run.replayed["Workload"]
    assert (served["sent"], served["failed"], served["prompts"]) == (20, "0", "token ids")
    assert served["left_out"] is None
    sources = {row["source"]: row for row in first_run.replayed["Source"]}
    assert sum(row["tokens"] for row in sources.values()) == work["prompt_tokens"] + 2  # of its last request
    assert sources["computed"]["tokens"] == served["computed"]
    assert sources["cpu"]["tokens"] > 9 * BLOCK_TOKENS
    assert sources["cpu"]["read_mib"] >= sources["cpu"]["tokens"] / BLOCK_TOKENS * CHUNK_BYTES / 2**20
    assert sources["fs"]["written_mib"] > 0
    assert 0 < served["hit_percent"] <= work["reusable_percent"]


@pytest.mark.full
def test_two_servers_restart_and_reset(
    first_run: FirstRun, model: Path, reference: Ask, tmp_path: Path
) -> None:
    settings = _settings([{"type": "fs", "root_dir": str(first_run.root), "max_bytes": ROOMY_BYTES}])
    with Server(model, settings, tmp_path / "server.log", servers=2) as server:
        restarted = server.complete(PROMPT)
        server.until(_has_told_the_restart)
        assert server.reset()
        computed = server.complete(PROMPT)
        after = server.until(lambda metrics: _put(metrics) == PROMPT_CHUNKS)

    assert _joined(restarted) == _joined(computed) == reference(PROMPT)[0]
    assert after.loaded() == {"fs": PROMPT_CHUNKS}


def _has_told_the_restart(metrics: Metrics) -> bool:
    """Return whether everything that the engine did after the restart is counted.

    It reports each event to one of the API servers, which count at their own pace: the first event may show
    last.
    """
    value = metrics.value
    hits = PROMPT_CHUNKS * BLOCK_TOKENS if vllm_release() >= (0, 32) else 0  # it asks where the hits are from
    return (
        metrics.loaded() == {"fs": PROMPT_CHUNKS}
        and value("vllm:prompt_tokens_cached_by_source", source="disk") == hits
        and value("vllm:kv_offload_load_bytes") == PROMPT_CHUNKS * CHUNK_BYTES
        and value("kvtier_fetched_chunks", tier="fs") == PROMPT_CHUNKS
        and value("vllm:kv_offload_tiering_read_bytes", tier="fs") == PROMPT_CHUNKS * CHUNK_BYTES
        and 0 < value("vllm:kv_offload_tiering_read_time", tier="fs") < UNTIL_S
        and value("vllm:kv_offload_tiering_chunk_hits", tier="fs") >= PROMPT_CHUNKS
    )


def _catalogue() -> list[Metric]:
    return [*COUNTERS.values(), *BYTES.values(), *GAUGES.values()]
