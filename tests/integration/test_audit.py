"""Audits in the real engine: what no seal sees is found, no wrong token is said, and it is not used again."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import PATIENCE_S, PROMPT_CHUNKS, Engine, Launcher, prompt

PROMPT = prompt(1)
RECOMPUTING = {"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"}


class Audited:
    """An engine that audits every chunk, and the evidence that it keeps."""

    def __init__(self, engine: Engine, state: Path) -> None:
        self.engine = engine
        self.folder = state / "kvtier" / "evidence"

    def failures(self) -> dict[str, float]:
        """Return what was found, by tier."""
        samples = self.engine.metrics().samples
        name = "kvtier_audit_failures_total"
        return {labels["tier"]: value for found, labels, value in samples if found == name and value}

    def evidence(self) -> list[dict[str, Any]]:
        """Return what is said of each piece of evidence, that of the scheduler's side included.

        It keeps its own in a thread that nobody waits for, and says so when that is written.
        """
        deadline = time.monotonic() + PATIENCE_S
        while "an audit has found a chunk damaged: " not in self.engine.log():
            assert time.monotonic() < deadline, self.engine.log()
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]

    def flip(self, slot_byte: int = 100) -> None:
        """Change a byte of each slot of the primary tier."""
        slots = int(self.engine.metrics().value("kvtier_slots"))
        chunk_bytes = int(self.engine.metrics().value("kvtier_tier_capacity_bytes", tier="cpu")) // slots
        (region,) = self.engine.regions
        with region.open("r+b") as file:
            for slot in range(slots):
                file.seek(slot * chunk_bytes + slot_byte)
                (byte,) = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte ^ 0x40]))

    def not_served(self, *prompts: list[int]) -> list[list[int]]:
        """Generate for prompts that nothing may be loaded for."""
        answers, loaded = self.engine.served(*prompts)
        assert loaded == {}
        return answers


@pytest.fixture
def audited(launcher: Launcher, llama: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return what starts an audited engine with a file tier; of each test the same one."""

    @contextmanager
    def start(**more: Any) -> Iterator[Audited]:
        settings = {
            "cpu_bytes_to_use": "16MiB",
            "audit_rate": 1,
            "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "root")}],
            **more.pop("settings", {}),
        }
        environment = {"XDG_STATE_HOME": str(tmp_path), **more.pop("environment", {})}
        transfer = more.pop("kv_transfer_config", RECOMPUTING)
        with launcher.start(
            llama, settings, environment=environment, kv_transfer_config=transfer, **more
        ) as engine:
            yield Audited(engine, tmp_path)

    return start


def test_whatever_way_a_chunk_goes_its_audits_hold(audited: Callable[..., Any], reference: Ask) -> None:
    others = [prompt(seed) for seed in range(2, 12)]  # more than the primary tier holds
    with audited() as it:
        cold, _ = it.engine.served(PROMPT)
        it.engine.reset(connector=False)
        from_primary = it.engine.served(PROMPT)
        after_load = it.engine.metrics().value("kvtier_audited_chunks")
        it.engine.served(*others)
        it.engine.reset(connector=False)
        from_tier = it.engine.served(PROMPT)
        failures = it.failures()
        log = it.engine.log()
    with audited() as it:
        after_restart = it.engine.served(PROMPT)
        loaded = it.engine.metrics().value("kvtier_audited_chunks")
        failures_after = it.failures()

    assert cold == reference(PROMPT)
    assert from_primary == (cold, {"cpu": PROMPT_CHUNKS})
    assert from_tier == after_restart == (cold, {"fs": PROMPT_CHUNKS})
    assert after_load == 2 * PROMPT_CHUNKS
    assert loaded == PROMPT_CHUNKS
    assert (failures, failures_after) == ({}, {})
    assert "an audit" not in log


@pytest.mark.full
def test_a_chunk_that_changes_in_host_memory_is_never_used(
    audited: Callable[..., Any], reference: Ask
) -> None:
    with audited() as it:
        it.engine.served(PROMPT)
        it.engine.reset(connector=False)
        it.flip()
        answers = it.engine.generate(PROMPT)
        failures = it.failures()
        again = it.not_served(PROMPT)
        healthy = it.engine.metrics().value("kvtier_tier_up", tier="fs")
        log = it.engine.log()
        kept = it.evidence()
        it.engine.settled()

    assert answers == again == reference(PROMPT)
    assert failures == {"cpu": 1}
    assert healthy == 0
    assert "a chunk has changed in the primary tier" in log
    assert str(it.folder) in log
    keys = [facts["key"] for facts in kept if "key" in facts]
    (bytes_of,) = [facts for facts in kept if "expected" in facts]
    assert len(keys) == 1
    assert bytes_of["expected"] not in (bytes_of["found"], bytes_of["of_device"])
    for path in it.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(it.folder.stat().st_mode) == 0o700
