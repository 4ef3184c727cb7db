"""Damaged files are recomputed, counted and set aside; and the comparison of tokens can fail."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvtier_bench.engines import BLOCK_TOKENS
from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, Launcher, chunk_files, prompt

pytestmark = pytest.mark.releases

POSITION = 5
TRAILER_BLOCK_BYTES = 4096


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10_000])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip_payload(path: Path) -> None:
    _flip(path, 1000)


def _flip_trailer(path: Path) -> None:
    _flip(path, path.stat().st_size - TRAILER_BLOCK_BYTES + 20)


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def _exchange(path: Path) -> None:
    other = next(file for file in chunk_files(path.parents[3]) if file != path)
    path.write_bytes(other.read_bytes())


DAMAGES: Mapping[Callable[[Path], None], str] = {
    _truncate: "torn",
    _empty: "torn",
    _flip_payload: "checksum",
    _flip_trailer: "torn",
    _exchange: "foreign",
    Path.unlink: "",
}
"""What is done to a file, and the reason that is counted; none for a chunk that is simply not there."""

PROMPTS = [prompt(seed) for seed in range(len(DAMAGES))]


@pytest.fixture(scope="module")
def written(
    launcher: Launcher, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path]]:
    """Return a root that holds the prompts, and the paths in it of their chunks at ``POSITION``."""
    root = tmp_path_factory.mktemp("written")
    chunks = []
    with launcher.start(llama, _settings(root)) as engine:
        for one in PROMPTS:
            engine.served(one[: POSITION * BLOCK_TOKENS + 2])
            before = set(chunk_files(root))
            engine.served(one[: (POSITION + 1) * BLOCK_TOKENS + 2])
            (chunk,) = set(chunk_files(root)) - before
            chunks.append(chunk.relative_to(root))
        engine.served(*PROMPTS)
    assert len(chunk_files(root)) == len(PROMPTS) * PROMPT_CHUNKS
    return root, chunks


@pytest.fixture
def root(written: tuple[Path, list[Path]], tmp_path: Path) -> Path:
    """Return a copy of the root, to be damaged."""
    return shutil.copytree(written[0], tmp_path / "root")


def _settings(root: Path) -> dict[str, object]:
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}


def test_damaged_files_are_recomputed_counted_and_set_aside(
    launcher: Launcher, llama: Path, reference: Ask, written: tuple[Path, list[Path]], root: Path
) -> None:
    chunks = [root / path for path in written[1]]
    good = [chunk.read_bytes() for chunk in chunks]
    for damage, chunk in zip(DAMAGES, chunks, strict=True):
        damage(chunk)
    with launcher.start(llama, _settings(root)) as engine:
        served = [engine.served(one) for one in PROMPTS]
        metrics = engine.metrics()

    assert served == [([answer], {"fs": POSITION}) for answer in reference(*PROMPTS)]
    for reason, count in Counter(filter(None, DAMAGES.values())).items():
        assert metrics.value("kvtier_get_failed_chunks", tier="fs", reason=reason) == count
    assert metrics.value("kvtier_get_failed_chunks") == len(DAMAGES) - 1
    assert metrics.value("kvtier_absent_chunks", tier="fs") == 1
    expected = {f"{chunk.stem}_g0.{why}" for chunk, why in zip(chunks, DAMAGES.values(), strict=True) if why}
    assert {aside.name.rpartition(".")[0] for aside in root.glob("*/quarantine/*")} == expected
    assert [chunk.read_bytes() for chunk in chunks] == good  # computed and put anew
