"""Prefill and decode engines over one tier: the tokens of a single engine, and only the tail is computed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvtier_bench.engine.compared import BLOCK_TOKENS, EngineError
from tests.integration.conftest import Ask, in_full
from tests.integration.harness import (
    OUTPUT_TOKENS,
    PATIENCE_S,
    PROMPT_CHUNKS,
    Engine,
    Launcher,
    Tokens,
    prompt,
)
from tests.integration.shared_tiers import SharedTier, shared_tier

ROLES = "tests.integration.pd_roles"
PREFILL = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}
WAIT_S = 100.0  # longer than any machine needs, shorter than the harness waits for an engine
CORES = sorted(os.sched_getaffinity(0))
ROOM: Mapping[str, Any] = {"num_gpu_blocks_override": 200, "start_s": 300}
TWO_RANKS: Mapping[str, Any] = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
STEP_TOKENS = BLOCK_TOKENS  # of the prefill engine: it computes a prompt in many steps


def start(
    launcher: Launcher,
    llama: Path,
    shared: SharedTier,
    number: int,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
    **arguments: Any,
) -> Engine:
    """Start an engine and let its tier keep a prompt's chunks, which shows that the tier works."""
    tiers = [shared.of(number)]
    settings = {"cpu_bytes_to_use": "32MiB", "secondary_tiers": tiers, "max_wait_s": WAIT_S, **settings}
    environment = {**shared.environment, **environment}
    engine = launcher.start(llama, settings, environment=environment, **arguments)
    engine.until_up(shared.name)
    engine.served(prompt(100 + number))
    assert engine.metrics().value("kvtier_put_chunks", tier=shared.name) == PROMPT_CHUNKS
    return engine


def start_prefill(
    launcher: Launcher, llama: Path, shared: SharedTier, number: int, **arguments: Any
) -> Engine:
    arguments |= {"kv_transfer_config": PREFILL, "max_num_batched_tokens": STEP_TOKENS}
    return start(launcher, llama, shared, number, **arguments)


@pytest.fixture(scope="module", params=["fs", "redis", in_full("mooncake"), in_full("nixl")])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedTier]:
    with shared_tier(request.param, tmp_path_factory.mktemp("pd")) as shared:
        yield shared


@pytest.fixture(scope="module")
def decode(launcher: Launcher, llama: Path, shared: SharedTier) -> Iterator[Engine]:
    with start(launcher, llama, shared, 0) as engine:
        yield engine


@pytest.fixture(scope="module")
def prefill(launcher: Launcher, llama: Path, shared: SharedTier) -> Iterator[Engine]:
    with start_prefill(launcher, llama, shared, 1) as engine:
        yield engine


class Counts:
    """A decode engine's counts since this object was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.settled()

    def waits(self) -> dict[str, float]:
        """Return the number of ended waits, by outcome."""
        return self._by_reason("kvtier_waits")

    def misses(self) -> dict[str, float]:
        """Return the number of missed chunks, by reason."""
        return self._by_reason("kvtier_misses")

    def _by_reason(self, name: str) -> dict[str, float]:
        now = self._engine.settled()
        reasons = {labels["reason"] for found, labels, _ in now.samples if found == f"{name}_total"}
        by = {
            reason: now.value(name, reason=reason) - self._before.value(name, reason=reason)
            for reason in reasons
        }
        return {reason: count for reason, count in by.items() if count}


def test_decode_loads_during_prefill(decode: Engine, prefill: Engine, reference: Ask, tmp_path: Path) -> None:
    check_a_wait(decode, prefill, prompt(1), reference, tmp_path)


def check_a_wait(decode: Engine, prefill: Engine, asked: Tokens, reference: Ask, folder: Path) -> None:
    """Make a decode engine wait for a prompt that it holds partly, before the prefill engine continues."""
    counts = Counts(decode)
    waits, has_some = folder / "waits", folder / "has_some"
    with ThreadPoolExecutor() as threads:
        how = {
            "output_tokens": OUTPUT_TOKENS,
            "wait_s": WAIT_S,
            "waits": str(waits),
            "has_some": str(has_some),
        }
        answering = threads.submit(decode.call, "decode", module=ROLES, prompt=asked, **how)
        until(waits.exists, answering.done)
        told = prefill.call("prefill", module=ROLES, prompt=asked, go_on=str(has_some))
        prefill.settled()
        answer = answering.result()
    assert 0 < told["paused_at"] < len(asked)
    assert has_some.exists(), "nothing had arrived when the prefill had not ended"
    assert [answer["answer"]] == reference(asked)
    assert answer["cached"] == PROMPT_CHUNKS * BLOCK_TOKENS, "only the tail is computed"
    assert counts.waits() == {"arrived": 1}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(CORES) < 2, reason="the prefill engine would starve beside workers that spin")
def test_two_ranks_read_one(
    launcher: Launcher, llama: Path, shared: SharedTier, reference: Ask, tmp_path: Path
) -> None:
    if shared.name not in ("fs", "redis"):
        pytest.skip("two ranks on one core may take minutes to start beside the engines of this module")
    canonical: dict[str, Any] = {"settings": {"canonical_layout": True}, **ROOM}
    with (
        start_prefill(launcher, llama, shared, 2, **canonical, **bound_to(CORES[0])) as prefill,
        start(
            launcher, llama, shared, 3, **canonical, **TWO_RANKS, **bound_to(CORES[-1], CORES[-1])
        ) as decode,
    ):
        check_a_wait(decode, prefill, prompt(30), reference, tmp_path)


def bound_to(*cores: int) -> dict[str, Any]:
    """Bind each worker of an engine to a core: the workers spin while a request waits for chunks."""
    return {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}}


def until(condition: Any, has_ended: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert not has_ended(), "it has ended without"
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_prefill_response_feeds_decode(
    decode: Engine, prefill: Engine, reference: Ask, shared: SharedTier
) -> None:
    asked, counts = prompt(2), Counts(decode)
    told = prefill.call("prefill", module=ROLES, prompt=asked)["params"]
    address = shared.of(1).get("listen")
    assert told == {
        "kvtier": {"wait_s": told["kvtier"]["wait_s"], **({"from": [address]} if address else {})}
    }
    assert PATIENCE_S <= told["kvtier"]["wait_s"] <= WAIT_S, "a put's deadline has passed by then"
    prefill.settled()
    answers, loaded = decode.served(asked, kv_transfer_params=told)
    assert answers == reference(asked)
    assert loaded == {shared.name: PROMPT_CHUNKS}
    assert set(counts.waits()) <= {"arrived"}
    plain = prefill.call("respond", module=ROLES, prompt=asked, params={})
    assert plain["params"] is None, "who does not ask for it gets nothing new"


def test_response_explains_prompt(prefill: Engine) -> None:
    asked, explain = prompt(20), {"kvtier": {"explain": True}}
    prefill.served(asked)
    prefill.reset(connector=False)
    told = prefill.call("respond", module=ROLES, prompt=asked, params=explain)["params"]
    assert told["kvtier"]["explained"]["tokens"] == {"cpu": PROMPT_CHUNKS * BLOCK_TOKENS}


def test_response_has_outcomes(prefill: Engine, reference: Ask) -> None:
    asked, kept = prompt(21), PROMPT_CHUNKS * 2**17

    def act(kind: str, tokens: Tokens, **payload: Any) -> list[dict[str, str]]:
        action = {"action_id": "7", "action_type": kind, "action_version": "0.1", "payload": payload}
        envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        answer = prefill.call("respond", module=ROLES, prompt=tokens, params={"kv_hint": envelope})
        outcomes: list[dict[str, str]] = answer["params"]["kvtier"]["outcomes"]
        return outcomes

    assert act("kv.pin", asked, session="s", ttl_s=600) == [
        {"action_id": "7", "outcome": "accepted", "reason": "new"}
    ]
    prefill.until(lambda it: it.value("kvtier_kept_bytes") == kept, "it is pinned")
    assert act("kv.demote", [2, 3], session="s")[0]["outcome"] == "accepted"
    prefill.until(lambda it: it.value("kvtier_kept_bytes") == 0, "it is not pinned any more")
    assert act("kv.prefetch", [2, 3], session="s", ttl_s=600)[0]["outcome"] == "accepted"
    prefill.until(lambda it: it.value("kvtier_kept_bytes") == kept, "it is back")
    assert act("kv.release", [2, 3], session="t")[0]["outcome"] == "missing"
    assert act("kv.release", [2, 3], session="s")[0]["outcome"] == "accepted"
    prefill.until(
        lambda it: it.value("kvtier_hint_actions", action="kv.release", outcome="accepted") == 1, "it is told"
    )
    assert prefill.served(asked)[0] == reference(asked)


def test_uncomputed_prompt_misses(decode: Engine, reference: Ask) -> None:
    """A wrong or stale hint delays only its own request. Other requests are answered meanwhile."""
    stale, others, counts = prompt(3), [prompt(4), prompt(5)], Counts(decode)
    hint = {"kvtier": {"wait_s": WAIT_S}}
    answers = decode.call(
        "beside", module=ROLES, prompt=stale, params=hint, others=others, output_tokens=OUTPUT_TOKENS
    )
    assert answers["order"] == ["other", "other", "waiting"]
    assert answers["answers"] == reference(*others, stale)
    assert counts.waits() == {"in_vain": 1}
    assert counts.misses()["not_arrived"] >= 1


def test_aborted_request_stops_waiting(decode: Engine) -> None:
    counts = Counts(decode)
    hint = {"kvtier": {"wait_s": WAIT_S}}
    decode.call("abort", module=ROLES, prompt=prompt(6), params=hint)
    assert counts.waits() == {"aborted": 1}
    assert "not_arrived" not in counts.misses()


def test_prefill_engine_is_killed(
    launcher: Launcher, llama: Path, shared: SharedTier, decode: Engine, reference: Ask, tmp_path: Path
) -> None:
    asked, counts = prompt(7), Counts(decode)
    waits, has_some, gone = (tmp_path / name for name in ("waits", "has_some", "gone"))
    how = {
        "output_tokens": OUTPUT_TOKENS,
        "wait_s": WAIT_S,
        "waits": str(waits),
        "has_some": str(has_some),
        "time_is_over": str(gone),
    }
    with start_prefill(launcher, llama, shared, 2) as dying, ThreadPoolExecutor() as threads:
        answering = threads.submit(decode.call, "decode", module=ROLES, prompt=asked, **how)
        until(waits.exists, answering.done)
        never = str(tmp_path / "never")
        dead = threads.submit(dying.call, "prefill", module=ROLES, prompt=asked, go_on=never)
        until(has_some.exists, answering.done)
        dying.kill()
        with pytest.raises((EngineError, OSError, ValueError)):
            dead.result()
        gone.touch()
        answer = answering.result()
    assert [answer["answer"]] == reference(asked)
    assert 0 < answer["cached"] < PROMPT_CHUNKS * BLOCK_TOKENS, "what had come is used, the rest computed"
    # The second outcome if the holder's death fails a get in flight.
    assert counts.waits() in ({"in_vain": 1}, {"gave_up": 1})
