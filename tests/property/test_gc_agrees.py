"""``kvtier gc --dry-run`` says what the run right after it does, whatever the root holds and is asked for."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier._cli.root import gc
from kvtier._identity import Identity
from kvtier._memory.heap import HeapMemory
from kvtier._settings.quantities import MOST_SECONDS
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers._base import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs._maintenance import evict
from kvtier.tiers.fs._maintenance.quarantine import MAX_FILES

NOW_S = 4_000_000_000
CHUNK_BYTES = 8192
BLOCK = 4096

# Seconds since a chunk was written, and those since it was used after that; None: it never was. Times to
# come, too, and such as no clock shows.
times = st.tuples(
    st.one_of(st.integers(-(2**33), 10**9), st.integers(-1000, 100_000)),
    st.one_of(st.none(), st.integers(0, 100_000)),
)
chunks = st.lists(st.tuples(st.integers(0, 3), times), max_size=12)
sizes = st.one_of(st.none(), st.integers(0, 300_000), st.just(2**63 - 1))
seconds = st.one_of(
    st.none(), st.integers(0, 100_000), st.floats(0, MOST_SECONDS), st.just(1e300), st.just(float("inf"))
)


def key(first: int, number: int) -> OffloadKey:
    """A chunk's key. Few beginnings: directories hold several chunks, and become empty."""
    return pack_key(bytes([first, 0x10 * (number % 2), number]) + bytes(29))


def fill(root: Path, held: list[tuple[int, tuple[int, int | None]]], resets: int) -> None:
    async def put() -> None:
        tier = FsTier(FsConfig(type="fs", root_dir=root, n_threads=1, min_free_bytes=0))
        await tier.open(TierContext("fs", Identity.make("m", {}), CHUNK_BYTES))
        try:
            memory = HeapMemory(max(1, len(held)), CHUNK_BYTES)
            keys = [key(first, number) for number, (first, _) in enumerate(held)]
            outcome = await tier.put(Batch(keys, range(len(keys)), memory))
            assert set(outcome.statuses) <= {Status.OK}
            for _ in range(resets):
                await tier.reset()
        finally:
            await tier.aclose()

    asyncio.run(put())
    for number, (first, (written_ago, used_after)) in enumerate(held):
        hashed = key(first, number)[:-4].hex()
        for path in root.rglob(f"{hashed}.bin"):
            written = NOW_S - written_ago
            os.utime(path, (written + (used_after or 0), written))


def leave(root: Path, quarantined: int) -> None:
    """Leave what dead writers have not finished, files set aside, and what is somebody else's."""
    (home,) = [path.parent for path in root.glob("*/config.json")]
    (home / ".tmp" / "1-1").mkdir(parents=True)
    (home / ".tmp" / "1-1" / "3f").write_bytes(bytes(5000))
    (home / "quarantine").mkdir(exist_ok=True)
    for number in range(quarantined):
        aside = home / "quarantine" / f"aa_g0.torn.{number}-1"
        if number % 3:
            aside.write_bytes(bytes(BLOCK))
        else:
            (aside / "inside").mkdir(parents=True)
    (home / "quarantine" / "notes.txt").touch()
    (root / "film.bin").write_bytes(bytes(3000))
    for leaf in list(root.glob("*_r0/*/*"))[:1]:
        (leaf / "notes.txt").touch()  # this directory does not become empty


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still."""
    monkeypatch.setattr(evict, "_clock", lambda lock: NOW_S * 10**9)


@pytest.mark.usefixtures("clock")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    held=chunks,
    resets=st.integers(0, 1),
    quarantined=st.one_of(st.integers(0, 3), st.just(MAX_FILES + 5)),
    max_bytes=sizes,
    older_than_s=seconds,
)
def test_a_dry_run_says_what_the_run_does(
    held: list[tuple[int, tuple[int, int | None]]],
    resets: int,
    quarantined: int,
    max_bytes: int | None,
    older_than_s: float | None,
) -> None:
    collect = partial(gc.collect, max_bytes=max_bytes, older_than_s=older_than_s)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        fill(root, held, resets)
        leave(root, quarantined)
        before = sorted((path, path.lstat().st_mtime_ns) for path in root.rglob("*"))
        said = collect(root, dry_run=True)
        assert sorted((path, path.lstat().st_mtime_ns) for path in root.rglob("*")) == before
        done = collect(root)
        assert replace(said, dry_run=False, bytes_after=0) == replace(done, bytes_after=0)
        # What the run itself writes is the ledger's: its directory and some files of a block.
        assert said.bytes_after <= done.bytes_after <= said.bytes_after + 4 * BLOCK
        young = older_than_s is not None and older_than_s > 2 * 10**9 + 2**34
        assert not (young and done.expired_files), "nothing is as old as that"
