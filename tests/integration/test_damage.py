"""Damaged files are recomputed, counted and quarantined."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvtier._telemetry.explanation import Explanation
from kvtier_bench.engine.compared import BLOCK_TOKENS
from kvtier_tools.explain import DamagedLine, read
from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, Engine, Launcher, chunk_files, prompt

pytestmark = pytest.mark.releases

POSITION = 5
TRAILER_BLOCK_BYTES = 4096


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def _exchange(path: Path) -> None:
    other = next(file for file in chunk_files(path.parents[3]) if file != path)
    path.write_bytes(other.read_bytes())


DAMAGES: Mapping[Callable[[Path], None], str] = {
    lambda path: os.truncate(path, path.stat().st_size - 10_000): "torn",
    lambda path: os.truncate(path, 0): "torn",
    lambda path: _flip(path, 1000): "checksum",
    lambda path: _flip(path, 20 - TRAILER_BLOCK_BYTES): "torn",
    _exchange: "foreign",
    Path.unlink: "",
}
"""Damage to a file, and the reason counted for it; None for a missing chunk."""

PROMPTS = [prompt(seed) for seed in range(len(DAMAGES))]
EXPLAINED = {"kvtier": {"explain": True}}


def _explained(engine: Engine) -> list[tuple[dict[str, int], str | None, dict[str, str]]]:
    """Return, for each request that wants an explanation: tokens found by tier, reason, reasons by tier."""
    found = list(read(line.encode() for line in engine.log().splitlines()))
    assert not [one for one in found if isinstance(one, DamagedLine)]
    lines = [one for one in found if isinstance(one, Explanation)]
    assert {one.prefix_end in (None, POSITION * BLOCK_TOKENS) for one in lines} == {True}
    return [(one.tokens, one.reason, one.tiers) for one in lines]


def test_damaged_files_are_recomputed(
    launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    files = {"type": "fs", "root_dir": str(tmp_path)}
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [files]}
    chunks: list[Path] = []  # per prompt: the reason of the chunk at the position
    with launcher.start(llama, settings) as engine:
        for one in PROMPTS:
            engine.served(one[: POSITION * BLOCK_TOKENS + 2])
            before = set(chunk_files(tmp_path))
            engine.served(one[: (POSITION + 1) * BLOCK_TOKENS + 2], kv_transfer_params=EXPLAINED)
            chunks += set(chunk_files(tmp_path)) - before
        engine.served(*PROMPTS)
        cold = _explained(engine)
    assert len(chunks) == len(PROMPTS)
    assert len(chunk_files(tmp_path)) == len(PROMPTS) * PROMPT_CHUNKS
    good = [chunk.read_bytes() for chunk in chunks]
    for damage, chunk in zip(DAMAGES, chunks, strict=True):
        damage(chunk)
    with launcher.start(llama, settings) as engine:
        served = [engine.served(one, kv_transfer_params=EXPLAINED) for one in PROMPTS]
        metrics = engine.metrics()
        found = _explained(engine)

    assert served == [([answer], {"fs": POSITION}) for answer in reference(*PROMPTS)]
    tokens = POSITION * BLOCK_TOKENS
    assert cold == [({}, "absent", {"fs": "absent"})] * len(PROMPTS)
    assert found == [({"fs": tokens}, "absent", {"fs": why or "absent"}) for why in DAMAGES.values()]
    for reason, count in Counter(filter(None, DAMAGES.values())).items():
        assert metrics.value("kvtier_get_failed_chunks", tier="fs", reason=reason) == count
    assert metrics.value("kvtier_get_failed_chunks") == len(DAMAGES) - 1
    assert metrics.value("kvtier_absent_chunks", tier="fs") == 1
    expected = {f"{chunk.stem}_g0.{why}" for chunk, why in zip(chunks, DAMAGES.values(), strict=True) if why}
    assert {aside.name.rpartition(".")[0] for aside in tmp_path.glob("*/quarantine/*")} == expected
    assert [chunk.read_bytes() for chunk in chunks] == good  # recomputed and put again
