"""Audits in the real engine find damage that checksums miss: no wrong token, and no second use."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, Engine, Launcher, primary_tier, prompt

PROMPT = prompt(1)
RECOMPUTING = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}


Start = Callable[[], AbstractContextManager[Engine]]


@pytest.fixture
def start(launcher: Launcher, llama: Path, tmp_path: Path) -> Start:
    """Return a function that starts an engine over a test's file tier and audits every chunk."""
    files = {"type": "fs", "root_dir": str(tmp_path / "root")}
    settings = {"cpu_bytes_to_use": "16MiB", "audit_rate": 1, "secondary_tiers": [files]}
    settings["eviction_policy"] = "lru"  # other policies would keep chunks that were used twice
    state = {"XDG_STATE_HOME": str(tmp_path)}
    settings["sync_load_budget_bytes"] = 1 << 30  # vLLM 0.33 cannot handle a failed load within a step
    return partial(launcher.start, llama, settings, environment=state, kv_transfer_config=RECOMPUTING)


def failures(engine: Engine) -> dict[str, float]:
    """Return the audit findings, by tier."""
    name, samples = "kvtier_audit_failures_total", engine.metrics().samples
    return {labels["tier"]: value for found, labels, value in samples if found == name and value}


def flip(engine: Engine) -> None:
    """Change a byte of each slot of the primary tier."""
    nbytes, chunk_bytes, region = primary_tier(engine)
    with region.open("r+b") as file:
        held = bytearray(file.read(nbytes))
        for place in range(100, nbytes, chunk_bytes):
            held[place] ^= 0x40
        file.seek(0)
        file.write(held)


def test_audits_hold_on_every_path(start: Start, reference: Ask) -> None:
    others = [prompt(seed) for seed in range(2, 12)]  # more chunks than the primary tier holds
    with start() as engine:
        cold, _ = engine.served(PROMPT)
        engine.reset(connector=False)
        from_primary = engine.served(PROMPT)
        after_load = engine.metrics().value("kvtier_audited_chunks")
        engine.served(*others)
        engine.reset(connector=False)
        from_tier = engine.served(PROMPT)
        found = failures(engine)
        log = engine.log()
    with start() as engine:
        after_restart = engine.served(PROMPT)
        loaded = engine.metrics().value("kvtier_audited_chunks")
        found_later = failures(engine)

    assert cold == reference(PROMPT)
    assert from_primary == (cold, {"cpu": PROMPT_CHUNKS})
    assert from_tier == after_restart == (cold, {"fs": PROMPT_CHUNKS})
    assert after_load == 2 * PROMPT_CHUNKS
    assert loaded == PROMPT_CHUNKS
    assert (found, found_later) == ({}, {})
    assert "an audit" not in log


@pytest.mark.releases
@pytest.mark.full
def test_changed_chunk_is_never_used(start: Start, reference: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "kvtier" / "evidence"
    with start() as engine:
        engine.served(PROMPT)
        engine.reset(connector=False)
        flip(engine)
        answers = engine.generate(PROMPT)
        found = failures(engine)
        again = engine.served(PROMPT)
        healthy = engine.metrics().value("kvtier_tier_up", tier="fs")
        log = engine.log()
        kept = [json.loads(path.read_text()) for path in folder.glob("*.json")]

    assert answers == reference(PROMPT)
    assert again == (answers, {})
    assert found == {"cpu": 1}
    assert healthy == 0
    assert "a chunk has changed in the primary tier" in log
    assert str(folder) in log
    assert re.search(r"tier cpu: an audit has found a chunk damaged, [0-9a-f]+ in slot \d+: nothing is", log)
    (facts,) = kept
    assert facts["expected"] not in (facts["found"], facts["of_device"])
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
