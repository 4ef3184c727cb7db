"""A client's retained chunks stay in host memory, regardless of other clients' later requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, UNTIL_S, Engine, Launcher, prompt

SESSION, STRANGER = prompt(1), prompt(2)
OTHERS = [prompt(seed) for seed in range(10, 16)]
SETTINGS = {"cpu_bytes_to_use": 3 * PROMPT_CHUNKS * 2**17, "blocks_per_chunk": 1, "pin_budget": 0.5}
FOUND = {"cpu": PROMPT_CHUNKS}


def _hints(**hints: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"kvtier": hints}}


def _kept(engine: Engine) -> float:
    return engine.settled().value("kvtier_kept_bytes")


def test_kept_until_released(launcher: Launcher, llama: Path, reference: Ask) -> None:
    (right,) = reference(SESSION)
    with launcher.start(llama, SETTINGS, num_gpu_blocks_override=24, max_model_len=640) as engine:
        engine.generate(SESSION, **_hints(pin="agent-7"))
        engine.generate(STRANGER, *OTHERS)
        assert _kept(engine) == PROMPT_CHUNKS * 2**17
        assert engine.served(SESSION) == ([right], FOUND)
        assert engine.served(STRANGER)[1] == {}, "nobody kept it"

        engine.generate(OTHERS[0], **_hints(release="agent-7"))
        assert _kept(engine) == 0
        engine.generate(*OTHERS)
        assert engine.served(SESSION) == ([right], {})

        engine.generate(SESSION, **_hints(ttl_s=600))
        engine.generate(*OTHERS)
        assert engine.served(SESSION) == ([right], FOUND)
        engine.generate(STRANGER, **_hints(ttl_s=0.1))
        assert engine.settled().value("kvtier_keep_refused_chunks") == PROMPT_CHUNKS // 2, (
            "half is the budget"
        )
        engine.generate(SESSION, **_hints(ttl_s="soon", pin=7))
        engine.until(lambda it: it.value("kvtier_kept_bytes") == PROMPT_CHUNKS * 2**17, "the other is over")
        assert "hints ignored in kvtier.ttl_s: 'Expected `float`, got `str`'" in engine.log()

        engine.reset()
        assert _kept(engine) == 0
        assert engine.served(SESSION) == ([right], {})


def test_kept_chunks_stay_in_memory(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    (right,) = reference(SESSION)
    settings = {**SETTINGS, "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}
    with launcher.start(llama, settings, num_gpu_blocks_override=24, max_model_len=640) as engine:
        begun = time.monotonic()
        engine.generate(*OTHERS)
        away_s = 4 + 8 * (time.monotonic() - begun)  # the others finish long before half of it has passed
        engine.generate(SESSION, **_hints(next_use_s=away_s))
        engine.generate(*OTHERS)
        engine.until(
            lambda it: it.value("kvtier_prefetched_chunks") == PROMPT_CHUNKS,
            "it was evicted, and is back",
            away_s + UNTIL_S,
        )
        fetched = engine.settled().value("kvtier_fetched_chunks")
        answers, loaded = engine.served(SESSION)
        assert answers == [right]
        assert sum(loaded.values()) == PROMPT_CHUNKS
        assert engine.settled().value("kvtier_fetched_chunks") == fetched, "nothing had to be fetched for it"


def test_priorities_survive_floods(launcher: Launcher, llama: Path, reference: Ask) -> None:
    high, default = reference(SESSION, STRANGER)
    with launcher.start(llama, SETTINGS, num_gpu_blocks_override=24, max_model_len=640) as engine:
        engine.generate(SESSION, **_hints(priority=2))
        engine.generate(STRANGER)
        engine.generate(*OTHERS)
        assert engine.served(SESSION) == ([high], FOUND)
        assert engine.served(STRANGER) == ([default], {}), "it had the default priority"
        for other in OTHERS:  # one by one: together they would need more room than is left
            engine.generate(other, **_hints(priority=0))
            engine.settled()
        assert engine.served(STRANGER) == ([default], FOUND)
        assert engine.served(SESSION) == ([high], FOUND)
        assert engine.served(OTHERS[0])[1] == {}


def _release(engine: Engine, chunks: int, **how: Any) -> None:
    """Compute or load the session; wait for the release of ``chunks`` chunks; empty the device's cache."""
    engine.generate(SESSION, **how)
    engine.until(
        lambda it: it.value("kvtier_released_chunks") == chunks, "it has left host memory for the tier"
    )
    engine.reset(connector=False)


def test_released_prompt_moves_to_tier(
    launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    right, other = reference(SESSION, STRANGER)
    tiers = [{"type": "fs", "root_dir": str(tmp_path)}]
    settings = {**SETTINGS, "promotion_budget": 0.5, "secondary_tiers": tiers}
    with launcher.start(llama, settings, num_gpu_blocks_override=24, max_model_len=640) as engine:
        engine.until_up("fs")
        engine.generate(STRANGER)
        _release(engine, PROMPT_CHUNKS, **_hints(release=True))
        prefill = {"do_remote_decode": True, "kvtier": {"release": True}}
        _release(engine, 2 * PROMPT_CHUNKS, kv_transfer_params=prefill)
        assert engine.served(STRANGER) == ([other], FOUND), "it was not released"
        assert engine.served(SESSION) == ([right], {"fs": PROMPT_CHUNKS})
