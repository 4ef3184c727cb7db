"""Prompts requested once are not written; prompts requested twice survive a restart."""

from __future__ import annotations

from pathlib import Path

from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, Launcher, chunk_files, prompt

ONCE, TWICE = prompt(1), prompt(2)


def test_second_use_writes(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    fs = {"type": "fs", "root_dir": str(tmp_path / "kv"), "write_policy": "reused"}
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [fs]}
    answers = reference(ONCE, TWICE)
    with launcher.start(llama, settings) as engine:
        engine.until_open("fs")
        assert engine.generate(ONCE, TWICE) == answers
        metrics = engine.settled()
        skipped = metrics.value("kvtier_put_dropped_chunks", tier="fs", reason="not_reused")
        assert skipped == 2 * PROMPT_CHUNKS
        assert engine.generate(TWICE) == answers[1:]
        engine.until(lambda it: it.value("kvtier_put_chunks", tier="fs") == PROMPT_CHUNKS, "it is written")
    assert len(chunk_files(tmp_path / "kv")) == PROMPT_CHUNKS
    with launcher.start(llama, settings) as engine:
        assert engine.served(ONCE, TWICE) == (answers, {"fs": PROMPT_CHUNKS})
