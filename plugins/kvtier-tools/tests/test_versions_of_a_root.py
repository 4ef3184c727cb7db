"""Two versions of kvtier on one root: neither reads, changes or removes what the other has, in any order."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from kvtier import _identity
from kvtier.errors import TierError
from kvtier.tiers import Status, _seal
from tests.caches import Cache, Kvtier

PROJECT = Path(__file__).parents[3]
TRAILER_BLOCK_BYTES = 4096
OTHERS = [_identity.FORMAT_VERSION - 1, _identity.FORMAT_VERSION + 1]

_OTHER_VERSION = """
import json, sys
from pathlib import Path
from kvtier import _identity

number, root, numbers = json.loads(sys.argv[1])
_identity.FORMAT_VERSION = number
from tests.caches import Cache

cache = Cache(Path(root))
had = cache.had(range(16))
cache.put(numbers)
print(json.dumps([cache.name, had, cache.had(range(16))]))
"""


def other_version(number: int, root: Path, puts: Iterable[int] = ()) -> tuple[str, list[int], list[int]]:
    """Let another version open the same cache, put chunks and close it, in a separate process.

    Returns:
        Its name for the cache, and the chunks in it before and after.
    """
    argument = json.dumps([number, str(root), list(puts)])
    done = subprocess.run(
        [sys.executable, "-P", "-c", _OTHER_VERSION, argument],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, before, after = json.loads(done.stdout.splitlines()[-1])
    return name, before, after


def files_of(root: Path, name: str) -> dict[Path, bytes]:
    """Return everything that a cache has on disk."""
    return {path: path.read_bytes() for path in root.glob(f"{name}*/**/*") if path.is_file()}


@pytest.mark.parametrize("other", OTHERS)
def test_rollback_finds_all(kvtier: Kvtier, cache: Cache, other: int) -> None:
    cache.put(range(4))
    ours = files_of(cache.root, cache.name)

    name, before, after = other_version(other, cache.root, range(2, 10))
    assert name != cache.name
    assert (before, after) == ([], list(range(2, 10)))
    assert files_of(cache.root, cache.name) == ours
    theirs = files_of(cache.root, name)

    assert cache.had(range(16)) == [0, 1, 2, 3]
    cache.put(range(4, 6))
    assert cache.had(range(16)) == [0, 1, 2, 3, 4, 5]
    assert files_of(cache.root, name) == theirs
    assert other_version(other, cache.root) == (name, after, after)
    _check_tools(kvtier, cache, name, other)
    assert files_of(cache.root, name) == theirs


def _check_tools(kvtier: Kvtier, cache: Cache, name: str, other: int) -> None:
    """Check that the tools know both caches, find both sound and remove nothing."""
    listed = kvtier("ls", cache.root, "--json")
    assert listed.status == 0
    assert {one["namespace"]: one["chunks"] for one in listed.json["namespaces"]} == {cache.name: 6, name: 8}
    (difference,) = kvtier("compare", cache.root, cache.name, name, "--json").json["differing"]
    assert (difference["setting"], difference["one"], difference["other"]) == (
        "kvtier_format",
        _identity.FORMAT_VERSION,
        other,
    )
    assert kvtier("verify", cache.root, "--json").status == 0
    collected = kvtier("gc", cache.root, "--json").json
    assert collected["bytes_before"] == collected["bytes_after"]


@pytest.mark.parametrize("other", OTHERS)
async def test_new_version_spares_old(cache: Cache, other: int) -> None:
    tier = await cache.open()
    try:
        assert set((await tier.put(cache.batch(range(4)))).statuses) == {Status.OK}
        await anyio.to_thread.run_sync(other_version, other, cache.root, range(8))
        assert set((await tier.put(cache.batch(range(4, 8)))).statuses) == {Status.OK}
        assert set((await tier.get(cache.batch(range(8)))).statuses) == {Status.OK}
    finally:
        await tier.aclose()


@pytest.mark.parametrize("other", OTHERS)
def test_other_manifest_is_refused(cache: Cache, other: int) -> None:
    cache.put(range(2))
    file = cache.home / "config.json"
    fields: dict[str, Any] = {**json.loads(file.read_text()), "kvtier_format": other}
    file.write_text(json.dumps(fields))
    before = files_of(cache.root, cache.name)
    with pytest.raises(TierError, match=f"kvtier_format is {other} there and {_identity.FORMAT_VERSION}"):
        asyncio.run(cache.open())
    assert files_of(cache.root, cache.name) == before


@pytest.mark.parametrize("other", [_seal.VERSION - 1, _seal.VERSION + 1])
def test_other_trailer_is_set_aside(cache: Cache, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that changes the trailer changes the format's number, too. Here it has not."""
    cache.put(range(2))
    file = cache.file(0)
    content = bytearray(file.read_bytes())
    place = slice(
        len(content) - TRAILER_BLOCK_BYTES, len(content) - TRAILER_BLOCK_BYTES + _seal.TRAILER_BYTES
    )
    sealed = _seal.read(bytes(content[place]))
    assert sealed is not None
    with monkeypatch.context() as patch:
        patch.setattr(_seal, "VERSION", other)
        content[place] = _seal.pack(sealed.key, sealed.checksum, sealed.payload_bytes, sealed.digest)
    file.write_bytes(content)
    assert cache.had(range(2)) == [1]
    (aside,) = (cache.home / "quarantine").iterdir()
    assert aside.read_bytes() == content
