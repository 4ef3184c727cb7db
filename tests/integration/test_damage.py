"""Damaged files are recomputed, counted and set aside; and the comparison of tokens can fail."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.keys import pack_key
from kvtier.tiers import seal
from tests.integration.conftest import Ask, in_full
from tests.integration.harness import BLOCK_TOKENS, PROMPT_CHUNKS, Launcher, chunk_files, prompt

pytestmark = pytest.mark.releases

PROMPT = prompt(1)
POSITION = 5
TRAILER_BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def written(launcher: Launcher, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a root that holds the prompt, and the path in it of the chunk at ``POSITION``."""
    root = tmp_path_factory.mktemp("written")
    with launcher.start(llama, _settings(root)) as engine:
        engine.served(PROMPT[: POSITION * BLOCK_TOKENS + 2])
        before = set(chunk_files(root))
        engine.served(PROMPT[: (POSITION + 1) * BLOCK_TOKENS + 2])
        (chunk,) = set(chunk_files(root)) - before
        engine.served(PROMPT)
    assert len(chunk_files(root)) == PROMPT_CHUNKS
    return root, chunk.relative_to(root)


@pytest.fixture
def root(written: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return a copy of the root, to be damaged."""
    return shutil.copytree(written[0], tmp_path / "root")


def _settings(root: Path) -> dict[str, object]:
    files = {"type": "fs", "root_dir": str(root)}
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [files]}


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


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        in_full(_truncate, "torn"),
        in_full(_empty, "torn"),
        (_flip_payload, "checksum"),
        in_full(_flip_trailer, "torn"),
        in_full(_exchange, "foreign"),
    ],
)
def test_a_damaged_file_is_recomputed_counted_and_set_aside(
    launcher: Launcher,
    llama: Path,
    reference: Ask,
    written: tuple[Path, Path],
    root: Path,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    chunk = root / written[1]
    good = chunk.read_bytes()
    damage(chunk)
    with launcher.start(llama, _settings(root)) as engine:
        answers, loaded = engine.served(PROMPT)
        metrics = engine.metrics()

    assert answers == reference(PROMPT)
    assert loaded == {"fs": POSITION}
    assert metrics.value("kvtier_get_failed_chunks", tier="fs", reason=reason) == 1
    (aside,) = root.glob("*/quarantine/*")
    assert aside.name.startswith(f"{chunk.stem}_g0.{reason}.")
    assert chunk.read_bytes() == good  # computed and put anew


def test_a_deleted_file_is_recomputed_and_counted(
    launcher: Launcher, llama: Path, reference: Ask, written: tuple[Path, Path], root: Path
) -> None:
    chunk = root / written[1]
    chunk.unlink()
    with launcher.start(llama, _settings(root)) as engine:
        answers, loaded = engine.served(PROMPT)
        metrics = engine.metrics()

    assert answers == reference(PROMPT)
    assert loaded == {"fs": POSITION}
    assert metrics.value("kvtier_absent_chunks", tier="fs") == 1
    assert metrics.value("kvtier_get_failed_chunks") == 0
    assert list(root.glob("*/quarantine/*")) == []
    assert chunk.exists()


@pytest.mark.full
def test_control_wrong_bytes_with_a_right_seal_change_the_tokens(
    launcher: Launcher, llama: Path, reference: Ask, root: Path
) -> None:
    for path in chunk_files(root):
        _falsify(path)
    with launcher.start(llama, _settings(root)) as engine:
        answers, loaded = engine.served(PROMPT)

    assert loaded == {"fs": PROMPT_CHUNKS}
    assert answers != reference(PROMPT)


def _falsify(path: Path) -> None:
    """Exchange the bytes of a chunk's first and second half, and seal it as if nothing had happened."""
    data = path.read_bytes()
    payload, trailer = data[:-TRAILER_BLOCK_BYTES], data[-TRAILER_BLOCK_BYTES:]
    half = len(payload) // 2
    payload = payload[half:] + payload[:half]
    found = re.fullmatch(r"[0-9a-f]{2}_g([0-9]+)", path.parent.name)
    assert found
    key = pack_key(bytes.fromhex(path.stem), int(found.group(1)))
    digest = trailer[24:40]
    sealed = seal.seal(key, memoryview(payload), digest)
    assert sealed[:12] == trailer[:12]
    path.write_bytes(payload + sealed + trailer[len(sealed) :])
