"""The tools for roots: what they say is so, what they repair is well, and what is not kvtier's stays."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.report import Bytes, ago
from kvtier.identity import Identity
from kvtier.tiers.fs.call import Flag, Place, StopFlag
from kvtier.tiers.fs.formats import segments
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.root import Root
from kvtier.tiers.fs.segments.python_segments import PythonSegments
from kvtier.tiers.fs.store import Store

CHUNK_BYTES = 16384
FILE_BYTES = CHUNK_BYTES + BLOCK_BYTES


def put_in_another_process(root: Path, then: str, format: str = "files") -> subprocess.Popen[str]:
    """Have another process open the cache of the fixture, put chunk 0, say so, and go on with ``then``."""
    source = """
        import asyncio, hashlib, random, sys, time
        from kvtier.identity import Identity
        from kvtier.keys import pack_key
        from kvtier.memory.heap import HeapMemory
        from kvtier.tiers.base import Batch, TierContext
        from kvtier.tiers.fs import FsConfig, FsTier

        def batch(number):
            memory = HeapMemory(1, {chunk_bytes})
            memory.view(0)[:] = random.Random(number).randbytes({chunk_bytes})
            key = pack_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), number % 3)
            return Batch([key], [0], memory)

        async def main():
            tier = FsTier(FsConfig(root_dir=sys.argv[1], n_threads=2, min_free_bytes=0, format={format!r}))
            identity = Identity.make("org/Model-7B", {{"dtype": "bfloat16"}})
            await tier.open(TierContext("files", identity, {chunk_bytes}))
            await tier.put(batch(0))
            while tier._upkeep._watched.listed < 0:  # then it has swept, and leaves the dead alone
                await asyncio.sleep(0.01)
            print("put", flush=True)
            {then}
            await tier.aclose()

        asyncio.run(main())
    """
    text = textwrap.dedent(source).format(chunk_bytes=CHUNK_BYTES, then=then, format=format)
    other = subprocess.Popen(
        [sys.executable, "-c", text, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "put\n"
    return other


@pytest.fixture
def living(cache) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the cache open until it is told to end."""
    other = put_in_another_process(cache.root, "await asyncio.to_thread(sys.stdin.read)")
    yield other
    other.communicate(timeout=30)


@pytest.fixture
def killed(cache) -> None:
    """Leave a writer behind that was killed in the middle of its work."""
    other = put_in_another_process(cache.root, "await asyncio.to_thread(sys.stdin.read)")
    other.send_signal(signal.SIGKILL)
    other.communicate(timeout=30)
    (folder,) = [path for path in (cache.home / ".tmp").glob(f"{other.pid}-*") if path.is_dir()]
    (folder / "3f").write_bytes(b"unfinished" * 1000)


def damage(file: Path, how: str) -> None:
    """Damage a chunk's file in one way."""
    held = bytearray(file.read_bytes())
    if how == "checksum":
        held[100] ^= 1
    elif how == "torn":
        del held[-1000:]
    elif how == "no trailer":
        held[CHUNK_BYTES : CHUNK_BYTES + 200] = bytes(200)
    file.write_bytes(held)


def one(said: Any) -> dict[str, Any]:
    found: list[dict[str, Any]] = said.json["namespaces"]
    assert len(found) == 1
    return found[0]


# ---------------------------------------------------------------------------------- ls, du, stat


def test_ls_tells_what_a_cache_is_and_how_much_it_holds(kvtier, cache) -> None:
    cache.put(range(10))
    said = kvtier("ls", cache.root, "--json")
    found = one(said)
    assert said.status == 0
    assert found["namespace"] == cache.name
    assert found["model"] == "org/Model-7B"
    assert found["digest"] == cache.identity.digest.hex()
    assert (found["layout"], found["ranks"], found["groups"]) == ("kvtier", [0], [0, 1, 2])
    assert (found["epoch"], found["chunks"], found["old_chunks"]) == (0, 10, 0)
    assert found["bytes"] == 10 * FILE_BYTES
    assert found["in_use"] is False
    assert abs(found["last_use"] - time.time()) < 60
    shown = kvtier("ls", cache.root).out
    assert cache.name in shown
    assert "200.0 KiB" in shown


def test_ls_sees_the_living_and_does_not_disturb_them(kvtier, cache, living) -> None:
    assert one(kvtier("ls", cache.root, "--json"))["in_use"] is True
    assert kvtier("stat", cache.root, "--json").json["in_use"] == 1
    cache.put([1])  # the locks that were looked at are free again
    living.communicate(timeout=30)
    assert living.returncode == 0
    assert one(kvtier("ls", cache.root, "--json"))["in_use"] is False


def test_where_there_are_no_locks_it_is_not_known_who_uses_a_cache(
    kvtier, cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put([0])

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert one(kvtier("ls", cache.root, "--json"))["in_use"] is None
    assert "unknown" in kvtier("ls", cache.root).out


def test_ls_tells_chunks_of_old_epochs_apart(kvtier, cache) -> None:
    cache.put(range(4))
    cache.put(range(4, 7), resets=1)
    found = one(kvtier("ls", cache.root, "--json"))
    assert found["epoch"] == 2  # whoever opens it now starts anew
    assert (found["chunks"], found["old_chunks"]) == (0, found["bytes"] // FILE_BYTES)


def test_ls_names_what_is_wrong_and_what_is_not_kvtiers(kvtier, cache) -> None:
    cache.put(range(2))
    (cache.home / "config.json").write_text("{")
    (cache.root / "notes.txt").write_text("mine")
    said = kvtier("ls", cache.root, "--json")
    assert said.status == 1
    assert "config.json is not readable JSON" in one(said)["problem"]
    assert said.json["others"] == ["notes.txt"]
    assert "not kvtier's: notes.txt" in kvtier("ls", cache.root).out


def test_a_manifest_of_another_cache_is_told(kvtier, cache) -> None:
    cache.put(range(2))
    (cache.home / "config.json").write_text(Identity.make("org/Model-7B", {"dtype": "float16"}).manifest)
    said = kvtier("ls", cache.root, "--json")
    assert (said.status, one(said)["digest"]) == (1, None)
    assert "belongs to another cache" in one(said)["problem"]


@pytest.mark.parametrize("command", ["ls", "du", "stat", "verify", "gc"])
def test_a_root_that_is_not_there_is_named(kvtier, tmp_path: Path, command: str) -> None:
    said = kvtier(command, tmp_path / "nowhere")
    assert said.status == 2
    assert str(tmp_path / "nowhere") in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["ls", "du", "stat", "verify", "gc"])
def test_an_empty_directory_is_a_root_without_caches(kvtier, tmp_path: Path, command: str) -> None:
    assert kvtier(command, tmp_path).status == 0


def test_du_adds_up_to_what_the_system_says(kvtier, cache) -> None:
    cache.put(range(20))
    cache.put([30], resets=1)
    damage(cache.file(0), "checksum") if cache.file(0).exists() else None
    (cache.root / "others").mkdir()
    (cache.root / "others" / "film.bin").write_bytes(bytes(50_000))
    said = kvtier("du", cache.root, "--json").json
    system = subprocess.run(["du", "-s", "-B1", cache.root], capture_output=True, text=True, check=True)
    root_itself = os.stat(cache.root).st_blocks * 512
    assert said["bytes"] == int(system.stdout.split()[0]) - root_itself
    assert said["bytes"] == sum(part["bytes"] for part in said["parts"])
    parts = {(part["namespace"], part["part"]): part for part in said["parts"]}
    assert parts["", "others"]["files"] == 1
    assert said["unreadable"] == 0


def test_stat_of_a_root_counts_and_knows_the_ledger(kvtier, cache) -> None:
    cache.put(range(12))
    said = kvtier("stat", cache.root, "--json")
    found = said.json
    assert said.status == 0
    assert (found["namespaces"], found["chunks"], found["old_chunks"]) == (1, 12, 0)
    assert abs(found["ledger_bytes"] - found["bytes"]) <= 2 * BLOCK_BYTES
    assert (found["leased_bytes"], found["writers"]) == (0, 0)


def test_stat_of_a_chunk_says_what_its_trailer_says(kvtier, cache) -> None:
    cache.put(range(3))
    said = kvtier("stat", cache.file(2), "--json")
    assert said.status == 0
    assert said.json["finding"] == "sound"
    assert said.json["hash"] == cache.key(2)[:-4].hex()
    assert (said.json["group"], said.json["payload_bytes"]) == (2, CHUNK_BYTES)
    assert said.json["digest"] == cache.identity.short_digest.hex()
    assert said.json["hash"] in kvtier("stat", cache.file(2)).out


@pytest.mark.parametrize(
    ("how", "finding"), [("checksum", "checksum"), ("torn", "torn"), ("no trailer", "torn")]
)
def test_stat_of_an_ill_chunk_says_how(kvtier, cache, how: str, finding: str) -> None:
    cache.put(range(3))
    damage(cache.file(1), how)
    said = kvtier("stat", cache.file(1), "--json")
    assert (said.status, said.json["finding"]) == (1, finding)


def test_stat_of_a_chunk_in_anothers_place_is_foreign_and_of_a_copy_elsewhere_sound(
    kvtier, cache, tmp_path: Path
) -> None:
    cache.put(range(7))
    shutil.copy(cache.file(3), cache.file(6))
    shutil.copy(cache.file(3), tmp_path / "copy")
    assert kvtier("stat", cache.file(6), "--json").json["finding"] == "foreign"
    assert kvtier("stat", tmp_path / "copy", "--json").json["finding"] == "sound"


# ------------------------------------------------------------------------------------- verify


def test_verify_proves_every_chunk_and_changes_nothing(kvtier, cache) -> None:
    cache.put(range(30))
    before = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in cache.root.rglob("*.bin")}
    said = kvtier("verify", cache.root, "--json")
    assert said.status == 0
    assert (one(said)["chunks"], one(said)["sound"]) == (30, 30)
    after = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in cache.root.rglob("*.bin")}
    assert after == before  # to be read by this tool is no use: eviction goes by it


def test_verify_finds_every_kind_of_illness_and_repair_sets_it_aside(kvtier, cache) -> None:
    cache.put(range(30))
    damage(cache.file(1), "checksum")
    damage(cache.file(2), "torn")
    damage(cache.file(3), "no trailer")
    shutil.copy(cache.file(6), cache.file(9))
    said = kvtier("verify", cache.root, "--json")
    found = one(said)
    assert said.status == 1
    assert (found["sound"], found["checksum"], found["torn"], found["foreign"]) == (26, 1, 2, 1)
    assert {Path(ill["path"]).name for ill in found["ill"]} == {cache.file(n).name for n in (1, 2, 3, 9)}
    assert not cache.quarantined()

    repaired = kvtier("verify", cache.root, "--repair", "--json")
    assert repaired.status == 0
    assert one(repaired)["set_aside"] == 4
    assert len(cache.quarantined()) == 4
    assert kvtier("verify", cache.root).status == 0
    assert cache.had(range(30)) == [n for n in range(30) if n not in (1, 2, 3, 9)]


def test_a_chunk_of_another_cache_is_foreign(kvtier, cache, tmp_path: Path) -> None:
    other = type(cache)(cache.root, "org/Other-7B")
    cache.put([0])
    other.put([0])
    shutil.copy(other.file(0), cache.file(0))
    said = kvtier("verify", cache.root, "--namespace", cache.name, "--json")
    assert (said.status, one(said)["foreign"]) == (1, 1)
    # Without the manifest the directory's name still tells whose the chunks are.
    (cache.home / "config.json").unlink()
    assert one(kvtier("verify", cache.root, "--namespace", cache.name, "--json"))["foreign"] == 1
    assert one(kvtier("verify", cache.root, "--namespace", other.name, "--json"))["sound"] == 1


def test_repair_removes_what_dead_writers_left_and_nothing_of_the_living(
    kvtier, cache, living, killed
) -> None:
    before = set((cache.home / ".tmp").iterdir())
    found = one(kvtier("verify", cache.root, "--json"))
    assert (found["dead_writers"], found["removed_bytes"]) == (1, 0)
    assert set((cache.home / ".tmp").iterdir()) == before
    found = one(kvtier("verify", cache.root, "--repair", "--json"))
    assert found["removed_bytes"] >= 10_000
    left = {path.name.removesuffix(".lock").partition("-")[0] for path in (cache.home / ".tmp").iterdir()}
    assert left == {str(living.pid)}
    living.communicate(timeout=30)
    assert living.returncode == 0
    assert cache.had([0]) == [0]


def test_repair_sets_a_damaged_manifest_aside_so_that_engines_can_open_the_place(kvtier, cache) -> None:
    cache.put(range(3))
    (cache.home / "config.json").write_text("{")
    assert kvtier("verify", cache.root).status == 1
    assert kvtier("verify", cache.root, "--repair").status == 0
    assert cache.had(range(3)) == [0, 1, 2]
    assert any(name.startswith("config.json") for name in cache.quarantined())


@pytest.mark.parametrize("format", ["files", "segments"])
def test_verify_beside_a_process_that_writes_and_removes_finds_nothing_ill(
    kvtier, tmp_path: Path, cache, format: str
) -> None:
    cache = type(cache)(tmp_path / "root", format=format)
    cache.put(range(200))
    churn = """
            for number in range(1000, 1000000):
                one = batch(number)
                await tier.put(one)
                if number % 3 == 0:
                    await tier.discard(one.keys)
                if number == 1005:
                    print("busy", flush=True)
    """
    then = textwrap.dedent(churn).strip().replace("\n", "\n            ")
    other = put_in_another_process(cache.root, then, format)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "busy\n"
        for _ in range(3):
            found = one(kvtier("verify", cache.root, "--repair", "--json"))
            assert found["sound"] > 200
            assert [found[word] for word in ("torn", "foreign", "checksum", "unreadable", "set_aside")] == [
                0
            ] * 5
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate(timeout=30)


def test_strays_and_links_are_left_alone(kvtier, cache, tmp_path: Path) -> None:
    cache.put(range(3))
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(FILE_BYTES))
    stray = cache.file(0).with_name("notes.txt")
    stray.write_text("mine")
    link = cache.file(1)
    link.unlink()
    link.symlink_to(secret)
    upper = cache.file(2).with_name(cache.file(2).name.upper())
    upper.write_bytes(b"x")
    said = kvtier("verify", cache.root, "--repair", "--json")
    assert one(said)["strays"] == 3
    assert one(said)["sound"] == 2
    assert stray.exists()
    assert link.is_symlink()
    assert upper.exists()
    assert secret.read_bytes() == bytes(FILE_BYTES)


@pytest.fixture
def locked_out(cache, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make a file or directory unreadable; for root, who may read all, by saying so in its place."""

    def lock(path: Path) -> None:
        path.chmod(0)
        if os.geteuid() != 0:
            return
        inode, real = path.stat().st_ino, os.open

        def refuse(name: Any, flags: int, *rest: Any, **more: Any) -> int:
            fd = real(name, flags, *rest, **more)
            if os.fstat(fd).st_ino == inode:
                os.close(fd)
                raise PermissionError(13, "Permission denied", str(name))
            return fd

        monkeypatch.setattr(os, "open", refuse)

    return lock


def test_what_cannot_be_read_is_told_and_is_not_set_aside(kvtier, cache, locked_out) -> None:
    cache.put(range(3))
    locked_out(cache.file(1))
    said = kvtier("verify", cache.root, "--repair", "--json")
    found = one(said)
    assert (said.status, found["unreadable"], found["sound"], found["set_aside"]) == (1, 1, 2, 0)
    assert found["ill"][0]["errno"] == "eacces"
    assert cache.file(1).exists()


@pytest.mark.parametrize("command", ["ls", "du", "verify"])
def test_a_directory_that_cannot_be_read_is_told(kvtier, cache, locked_out, command: str) -> None:
    cache.put(range(3))
    locked_out(cache.file(1).parent)
    assert kvtier(command, cache.root, "--json").status == 1


def write_as_vllm(root: Path, chunks: dict[int, int]) -> str:
    """Write chunks of given lengths as vLLM's own tier does, and return the cache's name."""
    fields = {"inference_engine": "vllm", "model_name": "org/m", "blocks_per_file": 1}
    spelled = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    name = f"org_m_{hashlib.sha256(spelled.encode()).hexdigest()[:12]}"
    (root / name).mkdir(parents=True)
    (root / name / "config.json").write_text(json.dumps(fields))
    for number, length in chunks.items():
        hashed = hashlib.sha256(bytes([number])).hexdigest()
        file = root / f"{name}_r0" / hashed[:3] / f"{hashed[3:5]}_g0" / f"{hashed}.bin"
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(length))
    return name


def test_files_in_vllms_layout_are_counted_and_not_called_sound(kvtier, tmp_path: Path) -> None:
    name = write_as_vllm(tmp_path, {1: 8192, 2: 8192, 3: 5000})
    found = one(kvtier("ls", tmp_path, "--json"))
    assert (found["layout"], found["model"], found["epoch"], found["chunks"]) == ("vllm", "org/m", 0, 3)
    assert found["problem"] == ""
    found = one(kvtier("verify", tmp_path, "--json"))
    assert (found["unproven"], found["torn"], found["sound"]) == (2, 1, 0)
    assert kvtier("export", tmp_path, name, tmp_path / "a.tar").status == 2


def test_repair_of_a_shared_cache_sets_files_of_a_wrong_length_aside(kvtier, tmp_path: Path) -> None:
    name = write_as_vllm(tmp_path, {1: 8192, 2: 5000})
    said = kvtier("verify", tmp_path, "--repair", "--json")
    assert (said.status, one(said)["set_aside"]) == (1, 0)  # no engine with kvtier has used it
    (tmp_path / name / "epoch.lock").touch()
    said = kvtier("verify", tmp_path, "--repair", "--json")
    assert (said.status, one(said)["torn"], one(said)["set_aside"]) == (0, 1, 1)
    assert one(kvtier("verify", tmp_path, "--json"))["chunks"] == 1
    assert (tmp_path / name / "config.json").exists()


def test_a_directory_that_looks_like_a_cache_and_is_none_is_left_alone(kvtier, cache) -> None:
    cache.put([0])
    model = cache.root / "my-model_0123456789abcdef"
    (model / ".tmp" / "draft").mkdir(parents=True)
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    said = kvtier("ls", cache.root, "--json")
    assert said.status == 0
    assert [found["namespace"] for found in said.json["namespaces"]] == [cache.name]
    assert said.json["others"] == [model.name]
    assert kvtier("verify", cache.root, "--repair").status == 0
    kvtier("gc", cache.root, "--max-bytes", "0")
    cache.put([1])  # an engine sweeps when it starts
    assert (model / ".tmp" / "draft").is_dir()
    assert (model / "config.json").is_file()


def test_a_cache_of_vllms_own_that_kvtier_has_not_used_is_only_looked_at(kvtier, cache) -> None:
    native = write_as_vllm(cache.root, {1: 8192, 2: 8192})
    assert kvtier("gc", cache.root, "--max-bytes", "0").status == 1
    cache.put(range(5))
    rehearsed = kvtier("gc", cache.root, "--max-bytes", "0", "--dry-run", "--json")
    done = kvtier("gc", cache.root, "--max-bytes", "0", "--json")
    assert rehearsed.json["evicted_files"] == done.json["evicted_files"] == 5
    assert done.status == 1
    assert kvtier("gc", cache.root, "--older-than", "0s").status == 0
    assert cache.had(range(5)) == []
    assert len(list(cache.root.glob(f"{native}_r0/*/*/*.bin"))) == 2


# ----------------------------------------------------------------------------------------- gc


def age(cache, numbers: range, seconds: float) -> None:
    """Make chunks look as if they had been written so long ago, and never used since."""
    for number in numbers:
        when = time.time() - seconds
        os.utime(cache.file(number), (when, when))


def test_gc_removes_what_is_too_old_and_says_before_how_much(kvtier, cache) -> None:
    cache.put(range(20))
    age(cache, range(8), 3600)
    rehearsed = kvtier("gc", cache.root, "--older-than", "30m", "--dry-run", "--json").json
    assert (rehearsed["expired_files"], rehearsed["evicted_files"]) == (8, 0)
    assert len(list(cache.root.rglob("*.bin"))) == 20
    done = kvtier("gc", cache.root, "--older-than", "30m", "--json")
    assert done.status == 0
    assert done.json["expired_files"] == 8
    assert cache.had(range(20)) == list(range(8, 20))


def test_gc_makes_room_from_the_oldest_on(kvtier, cache) -> None:
    cache.put(range(40))
    age(cache, range(20), 3600)
    taken = kvtier("du", cache.root, "--json").json["bytes"]
    limit = taken - 12 * FILE_BYTES
    rehearsed = kvtier("gc", cache.root, "--max-bytes", limit, "--dry-run", "--json").json
    assert 0 < rehearsed["evicted_files"] <= 20
    assert len(list(cache.root.rglob("*.bin"))) == 40
    done = kvtier("gc", cache.root, "--max-bytes", limit, "--json")
    assert done.status == 0
    assert done.json["bytes_after"] <= limit
    left = cache.had(range(40))
    assert left[-20:] == list(range(20, 40))
    assert len(left) == 40 - done.json["evicted_files"] >= 20


def test_gc_of_one_cache_leaves_the_others(kvtier, cache) -> None:
    other = type(cache)(cache.root, "org/Other-7B")
    cache.put(range(5))
    other.put(range(5))
    done = kvtier("gc", cache.root, "--namespace", cache.name, "--older-than", "0s", "--json")
    assert done.json["expired_files"] == 5
    assert (cache.had(range(5)), other.had(range(5))) == ([], list(range(5)))


def test_gc_removes_leftovers_and_never_what_is_not_kvtiers(kvtier, cache, killed) -> None:
    cache.put([1])
    cache.put([2], resets=1)
    foreign = cache.root / "models_0123456789abcdef_r0" / "weights"
    foreign.mkdir(parents=True)
    (foreign / "model.bin").write_bytes(bytes(5000))
    film = cache.root / "film.bin"
    film.write_bytes(bytes(5000))
    rehearsed = kvtier("gc", cache.root, "--dry-run", "--json").json
    done = kvtier("gc", cache.root, "--json").json
    assert rehearsed["leftover_bytes"] == done["leftover_bytes"] > 10_000
    assert not list((cache.home / ".tmp").iterdir())
    assert not list(cache.root.glob(f"{cache.name}_r0*/*"))  # both epochs are behind
    assert (foreign / "model.bin").exists()
    assert film.exists()
    said = kvtier("gc", cache.root, "--max-bytes", "0")
    assert said.status == 1
    assert "more than 0 B" in said.out
    assert (foreign / "model.bin").exists()
    assert film.exists()


def test_gc_beside_a_living_engine_keeps_what_it_is_at(kvtier, cache, living) -> None:
    cache.put([5], resets=1)  # what the living one uses is an old epoch now
    assert kvtier("gc", cache.root).status == 0
    assert cache.file(0).exists()
    living.communicate(timeout=30)
    assert living.returncode == 0
    assert kvtier("gc", cache.root).status == 0
    assert not cache.file(0).exists()


def test_gc_tells_the_ledger(kvtier, cache) -> None:
    cache.put(range(30))
    before = kvtier("stat", cache.root, "--json").json["ledger_bytes"]
    done = kvtier("gc", cache.root, "--older-than", "0s", "--json").json
    assert done["expired_files"] == 30
    after = kvtier("stat", cache.root, "--json").json["ledger_bytes"]
    assert before - after == done["expired_bytes"]


@pytest.mark.parametrize(
    ("option", "value"), [("--max-bytes", "much"), ("--older-than", "30"), ("--older-than", "never")]
)
def test_gc_refuses_what_it_does_not_understand(kvtier, cache, option: str, value: str) -> None:
    cache.put([0])
    said = kvtier("gc", cache.root, option, value)
    assert said.status == 2
    assert value in said.err
    assert cache.file(0).exists()


def test_a_namespace_that_is_not_there_is_refused_with_those_that_are(kvtier, cache) -> None:
    cache.put([0])
    for command in (["gc", cache.root, "--namespace", "x"], ["export", cache.root, "x", "-"]):
        said = kvtier(*command)
        assert said.status == 2
        assert cache.name in said.err


# --------------------------------------------------------------------------- export and import


IMPORT = ("import", "--min-free-bytes", "0")  # however full the machine's disk is


def test_a_cache_goes_through_an_archive(kvtier, cache, tmp_path: Path) -> None:
    cache.put(range(20))
    archive = tmp_path / "cache.tar"
    exported = kvtier("export", cache.root, cache.name, archive, "--json")
    assert (exported.status, exported.json["chunks"]) == (0, 20)
    there = type(cache)(tmp_path / "there")
    imported = kvtier(*IMPORT, archive, there.root, "--json")
    assert imported.status == 0
    assert (imported.json["chunks"], imported.json["present"], imported.json["is_whole"]) == (20, 0, True)
    assert there.had(range(20)) == list(range(20))
    assert (there.home / "config.json").read_bytes() == (cache.home / "config.json").read_bytes()
    again = kvtier(*IMPORT, archive, there.root, "--json")
    assert (again.status, again.json["chunks"], again.json["present"]) == (0, 0, 20)


def test_an_archive_goes_through_a_pipe(cache, tmp_path: Path) -> None:
    cache.put(range(5))
    there = type(cache)(tmp_path / "there")
    command = [sys.executable, "-m", "kvtier"]
    out = subprocess.Popen(
        [*command, "export", cache.root, cache.name, "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    done = subprocess.run(
        [*command, *IMPORT, "-", there.root], stdin=out.stdout, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert b"5 chunks" in out.communicate(timeout=30)[1]
    assert there.had(range(5)) == list(range(5))


def test_import_leaves_what_is_there_and_export_overwrites_no_archive(kvtier, cache, tmp_path: Path) -> None:
    cache.put(range(4))
    archive = tmp_path / "cache.tar"
    kvtier("export", cache.root, cache.name, archive)
    before = archive.read_bytes()
    inode = cache.file(0).stat().st_ino
    cache.file(1).unlink()
    imported = kvtier(*IMPORT, archive, cache.root, "--json").json
    assert (imported["chunks"], imported["present"]) == (1, 3)
    assert cache.file(0).stat().st_ino == inode
    said = kvtier("export", cache.root, cache.name, archive)
    assert said.status == 2
    assert "is there already" in said.err
    assert archive.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.tar", "root"]


def test_ill_chunks_are_left_out_of_an_archive_and_told(kvtier, cache, tmp_path: Path) -> None:
    cache.put(range(6))
    damage(cache.file(1), "checksum")
    damage(cache.file(2), "torn")
    said = kvtier("export", cache.root, cache.name, tmp_path / "cache.tar", "--json")
    assert (said.status, said.json["chunks"], said.json["ill"]) == (1, 4, 2)


def test_only_what_an_engine_would_be_given_is_exported(kvtier, cache, tmp_path: Path) -> None:
    cache.put(range(3))
    cache.put([7], resets=1)  # of weights that perhaps this process alone had
    said = kvtier("export", cache.root, cache.name, tmp_path / "cache.tar")
    assert said.status == 2
    assert "no chunks" in said.err
    cache.put([8])
    assert kvtier("export", cache.root, cache.name, tmp_path / "cache.tar", "--json").json["chunks"] == 1


@pytest.fixture
def archive(kvtier, cache, tmp_path: Path) -> Path:
    """An archive of ten chunks."""
    cache.put(range(10))
    path = tmp_path / "cache.tar"
    assert kvtier("export", cache.root, cache.name, path).status == 0
    return path


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_an_archive_that_breaks_off_is_told_and_what_came_is_whole(
    kvtier, cache, archive: Path, tmp_path: Path, share: float
) -> None:
    held = archive.read_bytes()
    archive.write_bytes(held[: int(len(held) * share)])
    there = type(cache)(tmp_path / "there")
    said = kvtier(*IMPORT, archive, there.root, "--json")
    assert said.status == 1
    assert said.json["is_whole"] is False
    assert 0 < said.json["chunks"] < 10 or share == 0.95
    assert len(there.had(range(10))) == said.json["chunks"]
    assert "breaks off" in kvtier(*IMPORT, archive, there.root).out


def repack(
    archive: Path, change: Callable[[tarfile.TarInfo, bytes], Iterable[tuple[tarfile.TarInfo, bytes]]]
):
    """Write an archive anew, each member as ``change`` says."""
    members = []
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            members.append((member, file.read() if file else b""))
    with tarfile.open(archive, "w") as tar:
        for member, content in members:
            for info, bytes_ in change(member, content):
                if info.isreg():
                    info.size = len(bytes_)
                tar.addfile(info, io.BytesIO(bytes_))


def renamed(info: tarfile.TarInfo, name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    other = tarfile.TarInfo(name)
    other.type = kind
    other.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
    return other


EVIL = {
    "a path out of the root": lambda info, content: [(info, content), (renamed(info, "../evil"), b"x")],
    "an absolute path": lambda info, content: [(info, content), (renamed(info, "/tmp/evil"), b"x")],
    "a symbolic link": lambda info, content: [
        (info, content),
        (renamed(info, "chunks/" + "ab" * 32 + "_g0", tarfile.SYMTYPE), b""),
    ],
    "a hard link": lambda info, content: [
        (info, content),
        (renamed(info, "chunks/" + "ab" * 32 + "_g0", tarfile.LNKTYPE), b""),
    ],
    "a device": lambda info, content: [
        (info, content),
        (renamed(info, "chunks/" + "ab" * 32 + "_g0", tarfile.CHRTYPE), b""),
    ],
    "a chunk that is too long": lambda info, content: [
        (info, content if not info.name.startswith("chunks/") else content + bytes(4096))
    ],
    "a group that cannot be": lambda info, content: [
        (info, content),
        (renamed(info, f"chunks/{'ab' * 32}_g{2**32}"), bytes(CHUNK_BYTES + 128)),
    ],
    "no head": lambda info, content: [] if info.name == "kvtier.json" else [(info, content)],
    "another cache's name": lambda info, content: [
        (info, content.replace(b'"namespace": "Model', b'"namespace": "Other'))
    ],
    "a path for a name": lambda info, content: [
        (info, content.replace(b'"namespace": "Model', b'"namespace": "../../Model'))
    ],
    "another identity": lambda info, content: [(info, content.replace(b"bfloat16", b"bfloat32"))],
    "another format": lambda info, content: [
        (info, content.replace(b'"archive_format": 1', b'"archive_format": 9'))
    ],
    "a length that cannot be": lambda info, content: [
        (info, content.replace(b'"chunk_bytes": 16384', b'"chunk_bytes": 16385'))
    ],
}


@pytest.mark.parametrize("what", EVIL)
def test_an_archive_that_kvtier_has_not_written_is_refused(
    kvtier, cache, archive: Path, tmp_path: Path, what: str
) -> None:
    repack(archive, EVIL[what])
    there = type(cache)(tmp_path / "there")
    said = kvtier(*IMPORT, archive, there.root)
    assert said.status == 2, said
    assert len(said.err.splitlines()) == 1
    assert not (tmp_path / "evil").exists()
    assert not (there.root.parent / "evil").exists()
    if there.root.exists():
        # What came before was proven, and is whole; nothing else is there.
        said = kvtier("verify", there.root, "--json").json["namespaces"]
        assert len(there.had(range(10))) == sum(one["chunks"] for one in said) <= 10
        assert list(there.root.rglob("*.bin")) == []
        assert not [path for path in there.root.rglob("*") if path.is_symlink()]


def test_a_damaged_chunk_of_an_archive_is_left_out(kvtier, cache, archive: Path, tmp_path: Path) -> None:
    def flip(info: tarfile.TarInfo, content: bytes):
        if info.name == f"chunks/{cache.key(4)[:-4].hex()}_g1":
            content = content[:99] + bytes([content[99] ^ 1]) + content[100:]
        yield info, content

    repack(archive, flip)
    there = type(cache)(tmp_path / "there")
    said = kvtier(*IMPORT, archive, there.root, "--json")
    assert (said.status, said.json["chunks"], said.json["ill"]) == (1, 9, 1)
    assert there.had(range(10)) == [n for n in range(10) if n != 4]


def test_import_keeps_to_the_bound_and_says_what_was_not_taken(
    kvtier, cache, archive: Path, tmp_path
) -> None:
    there = type(cache)(tmp_path / "there")
    said = kvtier(*IMPORT, archive, there.root, "--max-bytes", "100k", "--json")
    assert said.status == 1
    assert sum(said.json["refused"].values()) > 0
    assert kvtier("du", there.root, "--json").json["bytes"] <= 100 * 1024


@pytest.mark.parametrize("bound", [("--max-bytes", "100k"), ("--min-free-bytes", "1000000T")])
def test_what_was_not_taken_is_said_with_its_remedy(
    kvtier, cache, archive: Path, tmp_path, bound: tuple[str, str]
) -> None:
    said = kvtier(*IMPORT, archive, tmp_path / "there", *bound)
    assert said.status == 1
    assert re.search(rf"; [0-9]+ not taken \(the .* is full: {bound[0]} sets how much", said.out), said.out


def test_a_file_that_is_no_archive_is_refused(kvtier, cache, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(100_000))
    for file in ("noise", "nothing"):
        said = kvtier(*IMPORT, tmp_path / file, cache.root)
        assert said.status == 2
        assert len(said.err.splitlines()) == 1
    assert not cache.root.exists()


def test_zstd_is_asked_of_the_standard_library(kvtier, cache, tmp_path: Path) -> None:
    cache.put(range(3))
    said = kvtier("export", cache.root, cache.name, tmp_path / "cache.tar.zst")
    if "zst" in tarfile.TarFile.OPEN_METH:
        assert said.status == 0
        assert kvtier(*IMPORT, tmp_path / "cache.tar.zst", tmp_path / "there").status == 0
    else:
        assert said.status == 2
        assert "zstd" in said.err
        assert not (tmp_path / "cache.tar.zst").exists()


# ------------------------------------------------------------------------------------ segments


def flip_in_segment(packed, number: int) -> None:
    """Damage the bytes of a chunk where they are in a segment."""
    content = packed.content(number)
    for file in packed.segments():
        held = file.read_bytes()
        if (at := held.find(content)) >= 0:
            with file.open("r+b") as segment:
                segment.seek(at + 100)
                segment.write(bytes([content[100] ^ 1]))
            return
    raise AssertionError(f"chunk {number} is in no segment")


def test_chunks_in_segments_are_counted_and_proven(kvtier, packed) -> None:
    packed.put(range(40))
    found = one(kvtier("ls", packed.root, "--json"))
    assert (found["chunks"], found["groups"], found["problem"]) == (40, [0, 1, 2], "")
    said = kvtier("verify", packed.root, "--json")
    assert said.status == 0
    assert (one(said)["chunks"], one(said)["sound"], one(said)["strays"]) == (40, 40, 0)
    assert kvtier("stat", packed.root, "--json").json["chunks"] == 40


def test_an_ill_chunk_of_a_segment_is_set_aside_and_the_others_stay(kvtier, packed) -> None:
    packed.put(range(20))
    flip_in_segment(packed, 3)
    flip_in_segment(packed, 17)
    times = [(file.stat().st_atime_ns, file.stat().st_mtime_ns) for file in packed.segments()]
    said = kvtier("verify", packed.root, "--json")
    assert (said.status, one(said)["checksum"], one(said)["sound"]) == (1, 2, 18)
    repaired = kvtier("verify", packed.root, "--repair", "--json")
    assert (repaired.status, one(repaired)["set_aside"]) == (0, 2)
    assert [(file.stat().st_atime_ns, file.stat().st_mtime_ns) for file in packed.segments()] == times
    evidence = {path.name[:64]: path.read_bytes() for path in (packed.home / "quarantine").iterdir()}
    assert set(evidence) == {packed.key(n)[:-4].hex() for n in (3, 17)}
    assert evidence[packed.key(3)[:-4].hex()][101:CHUNK_BYTES] == packed.content(3)[101:]
    assert one(kvtier("verify", packed.root, "--json"))["sound"] == 18
    assert packed.had(range(20)) == [n for n in range(20) if n not in (3, 17)]


def test_a_segment_of_another_cache_is_foreign(kvtier, packed) -> None:
    other = type(packed)(packed.root, "org/Other-7B", format="segments")
    packed.put(range(3))
    other.put(range(3))
    shutil.copy(other.segments()[0], packed.segments()[0].parent)
    found = one(kvtier("verify", packed.root, "--namespace", packed.name, "--json"))
    assert (found["sound"], found["foreign"]) == (3, 3)


def test_what_a_killed_writer_has_not_finished_in_a_segment_is_no_illness(kvtier, packed) -> None:
    packed.put(range(10))
    (segment,) = packed.segments()
    held = segment.read_bytes()
    torn = segment.with_name("1-00ff-00000000.seg")
    torn.write_bytes(held[: held.find(packed.content(9)) + 5000])  # without the end of a chunk and the footer
    (segment.parent / "1-00ff-00000001.seg").write_bytes(bytes(4096))  # without anything
    found = one(kvtier("verify", packed.root, "--json"))
    assert found["sound"] == 10 + 9
    assert [found[word] for word in ("torn", "checksum", "foreign", "unreadable")] == [0] * 4
    exported = kvtier("export", packed.root, packed.name, packed.root.parent / "cache.tar", "--json")
    assert (exported.status, exported.json["ill"]) == (0, 0)


def harm(file: Path, at: int, content: bytes) -> None:
    """Write over what is at a place of a file."""
    with file.open("r+b") as segment:
        segment.seek(at)
        segment.write(content)


def find(segment: Path, content: bytes) -> int:
    """Return where in a segment some bytes are first."""
    at = segment.read_bytes().find(content)
    assert at >= 0
    return at


def mark_of(packed, segment: Path, number: int) -> int:
    """Return where the map of a segment has the byte for a chunk."""
    map_blocks = int.from_bytes(segment.read_bytes()[12:16], "little")
    block = find(segment, packed.content(number)) // BLOCK_BYTES
    return BLOCK_BYTES + (block - 1 - map_blocks) // (CHUNK_BYTES // BLOCK_BYTES)


def seal_what_the_dead_left(packed, store: Store) -> None:
    """Do what the upkeep of the next engine does."""
    with Root(packed.root) as root:
        digest = packed.identity.short_digest
        store.tend(Place(root.fd, f"{packed.name}_r0", "", digest, CHUNK_BYTES, Flag.NONE), StopFlag())
        store.close()


def checked(kvtier, packed) -> tuple[int, dict[str, int]]:
    """Return the exit status of verify, and what it has found that is not zero."""
    said = kvtier("verify", packed.root, "--json")
    words = ("sound", "torn", "checksum", "foreign", "unreadable", "gone", "strays")
    return said.status, {word: one(said)[word] for word in words if one(said)[word]}


def archived(kvtier, packed) -> tuple[int, int, int, int]:
    """Return the exit status of export, how many chunks are in the archive, and what was left out."""
    archive = packed.root.parent / "cache.tar"
    said = kvtier("export", packed.root, packed.name, archive, "--json")
    archive.unlink()
    return said.status, said.json["chunks"], said.json["ill"], said.json["gone"]


@pytest.mark.parametrize("store", [segments, PythonSegments], ids=["engine", "python"])
@pytest.mark.parametrize("torn", ["payload", "seal"])
def test_what_a_killed_writer_has_not_finished_is_no_illness_when_its_segment_was_sealed(
    kvtier, packed, torn: str, store: Callable[[], Store]
) -> None:
    packed.put(range(10))
    (segment,) = packed.segments()
    dead = segment.with_name("1-00ff-00000000.seg")
    dead.write_bytes(segment.read_bytes()[: find(segment, packed.content(9)) + CHUNK_BYTES])
    segment.unlink()
    harm(dead, find(dead, packed.content(4) if torn == "payload" else packed.key(4)), bytes(8))
    assert checked(kvtier, packed) == (0, {"sound": 9})
    before = dead.stat().st_size
    seal_what_the_dead_left(packed, store())
    assert dead.stat().st_size > before  # it has a footer
    assert checked(kvtier, packed) == (0, {"sound": 9})
    assert one(kvtier("ls", packed.root, "--json"))["chunks"] == 9
    assert archived(kvtier, packed) == (0, 9, 0, 0)


def test_chunks_whose_extent_or_footer_was_damaged_are_found_as_engines_find_them(kvtier, packed) -> None:
    packed.put(range(10))
    (segment,) = packed.segments()
    whole = segment.read_bytes()
    harm(segment, find(segment, packed.content(0)) - BLOCK_BYTES, b"?" * BLOCK_BYTES)
    assert checked(kvtier, packed) == (0, {"sound": 10})
    assert archived(kvtier, packed) == (0, 10, 0, 0)
    assert one(kvtier("ls", packed.root, "--json"))["chunks"] == 10
    segment.write_bytes(whole)
    harm(segment, find(segment, packed.content(9)) + CHUNK_BYTES, b"?" * 100)  # the first entry of the footer
    assert checked(kvtier, packed) == (0, {"sound": 10})
    assert archived(kvtier, packed) == (0, 10, 0, 0)
    assert packed.had(range(10)) == list(range(10))


def test_a_segment_whose_head_was_damaged_is_named_and_set_aside_as_a_whole(kvtier, packed) -> None:
    packed.put(range(5))
    packed.put(range(5, 10))
    segment = next(path for path in packed.segments() if packed.content(0) in path.read_bytes())
    harm(segment, 0, b"?" * BLOCK_BYTES)
    content = segment.read_bytes()
    assert checked(kvtier, packed) == (1, {"sound": 5, "torn": 1})
    assert f"{segment.relative_to(packed.root)} torn" in kvtier("verify", packed.root).out
    assert archived(kvtier, packed) == (1, 5, 1, 0)
    listed = kvtier("ls", packed.root, "--json")
    assert (listed.status, one(listed)["chunks"]) == (1, 5)
    assert "1 segments are damaged" in one(listed)["problem"]
    repaired = kvtier("verify", packed.root, "--repair", "--json")
    assert (repaired.status, one(repaired)["set_aside"]) == (0, 1)
    (aside,) = (packed.home / "quarantine").iterdir()
    assert aside.name.startswith(f"{segment.name}.torn.")
    assert aside.read_bytes() == content
    assert checked(kvtier, packed) == (0, {"sound": 5})
    assert kvtier("ls", packed.root).status == 0
    assert packed.had(range(10)) == [5, 6, 7, 8, 9]


def test_a_segment_that_a_living_writer_holds_and_one_without_a_head_are_no_illness(kvtier, packed) -> None:
    packed.put(range(3))
    segment = packed.segments()[0].with_name("1-00ff-00000000.seg")
    segment.write_bytes(b"?" * BLOCK_BYTES)
    with segment.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert checked(kvtier, packed) == (0, {"sound": 3})
        assert one(kvtier("verify", packed.root, "--repair", "--json"))["set_aside"] == 0
    assert checked(kvtier, packed) == (1, {"sound": 3, "torn": 1})
    segment.write_bytes(b"")  # it was made
    assert checked(kvtier, packed) == (0, {"sound": 3})
    segment.write_bytes(bytes(BLOCK_BYTES) + b"?" * BLOCK_BYTES)  # after a power cut: what was not flushed
    assert checked(kvtier, packed) == (0, {"sound": 3})
    assert archived(kvtier, packed) == (0, 3, 0, 0)
    assert kvtier("ls", packed.root).status == 0


def test_a_chunk_that_the_map_says_nothing_about_is_torn_and_set_aside(kvtier, packed) -> None:
    packed.put(range(10))
    (segment,) = packed.segments()
    harm(segment, mark_of(packed, segment, 2), b"?")
    harm(segment, mark_of(packed, segment, 3), b"\1")  # it was discarded
    block = find(segment, packed.content(2)) // BLOCK_BYTES
    assert checked(kvtier, packed) == (1, {"sound": 8, "torn": 1})
    assert f"{segment.name} block {block} torn" in kvtier("verify", packed.root).out
    assert archived(kvtier, packed) == (1, 8, 1, 0)
    assert one(kvtier("ls", packed.root, "--json"))["chunks"] == 8
    repaired = kvtier("verify", packed.root, "--repair", "--json")
    assert (repaired.status, one(repaired)["set_aside"]) == (0, 1)
    assert len(packed.quarantined()) == 1
    assert checked(kvtier, packed) == (0, {"sound": 8})
    assert packed.had(range(10)) == [n for n in range(10) if n not in (2, 3)]


def test_segments_go_through_an_archive_into_files_and_segments(kvtier, packed, tmp_path: Path) -> None:
    packed.put(range(25))
    flip_in_segment(packed, 5)
    exported = kvtier("export", packed.root, packed.name, tmp_path / "cache.tar", "--json")
    assert (exported.status, exported.json["chunks"], exported.json["ill"]) == (1, 24, 1)
    for there in (type(packed)(tmp_path / "files"), type(packed)(tmp_path / "segments", format="segments")):
        there.put([0])
        said = kvtier(*IMPORT, tmp_path / "cache.tar", there.root, "--json").json
        assert (said["chunks"], said["present"]) == (23, 1)
        assert there.had(range(25)) == [n for n in range(25) if n != 5]
        assert len(list(there.root.rglob("*.bin"))) == (24 if there.format == "files" else 0)


def test_stat_of_a_segment_says_who_looks_into_it(kvtier, packed) -> None:
    packed.put([0])
    said = kvtier("stat", packed.segments()[0])
    assert said.status == 2
    assert "kvtier verify" in said.err


def test_gc_removes_whole_segments(kvtier, packed) -> None:
    packed.put(range(10))
    rehearsed = kvtier("gc", packed.root, "--older-than", "0s", "--dry-run", "--json").json
    done = kvtier("gc", packed.root, "--older-than", "0s", "--json").json
    assert rehearsed["expired_files"] == done["expired_files"] == 1
    assert packed.had(range(10)) == []


# -------------------------------------------------------------------------------------- the rest


def test_the_tools_need_neither_torch_nor_an_engine(cache) -> None:
    cache.put([0])
    code = (
        "import sys; sys.modules.update(torch=None, vllm=None, numpy=None);"
        f"sys.argv = ['kvtier', 'verify', {str(cache.root)!r}, '--json'];"
        "from kvtier.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["namespaces"][0]["sound"] == 1


def test_progress_is_shown_on_a_terminal_and_nowhere_else(
    kvtier, cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(range(3))
    assert kvtier("verify", cache.root, "--json").err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # this makes any stream a terminal for the library that draws
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one it draws nothing
    said = kvtier("verify", cache.root, "--json")
    assert "chunks" in said.err
    assert one(said)["sound"] == 3


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["ls"], "files"),
        (["du"], "files"),
        (["stat"], "files"),
        (["gc", "--max-bytes", "0"], "files removed"),
        (["gc", "--max-bytes", "0", "--dry-run"], "files"),
    ],
)
def test_long_work_shows_its_progress_on_a_terminal(
    kvtier, cache, monkeypatch: pytest.MonkeyPatch, command: list[str], words: str
) -> None:
    cache.put(range(3))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    said = kvtier(command[0], cache.root, *command[1:], "--json")
    assert words in said.err
    assert said.json["root"] == str(cache.root)


def test_chunks_are_taken_one_by_one_from_a_large_root(cache) -> None:
    cache.put([0])
    folder = cache.file(0).parent
    for number in range(5_000):
        (folder / f"{cache.file(0).name[:5]}{number:027x}.bin").touch()
    with Root(cache.root) as root:
        (found,) = root.namespaces()
        tracemalloc.start()
        count = sum(1 for _ in root.chunks(found.data_dirs[0].name))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert count == 5_001
    assert peak < 1 << 19  # a record of each takes several times that


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_have_units(count: int, words: str) -> None:
    assert str(Bytes(count)) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "3 s ago"), (600, "10 min ago"), (7200, "2 h ago"), (3 * 86400, "3 d ago")]
)
def test_times_are_told_in_words(seconds: float, words: str) -> None:
    assert ago(1000.0 - seconds + 1e6, 1000.0 + 1e6) == words


# ---------------------------------------------------------------------- what is not what it should be


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
@pytest.mark.parametrize("name", ["config.json", "epoch", "../.kvtier/ledger", "epoch.lock"])
@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "du"])
def test_no_tool_hangs_or_breaks_at_what_is_no_file(
    kvtier, cache, name: str, make: Callable[[Path], None], command: str
) -> None:
    cache.put(range(3))
    place = cache.home / name
    place.unlink(missing_ok=True)
    make(place)
    said = kvtier(command, cache.root, "--json")
    assert (said.status in (0, 1) and said.json) or (said.status == 2 and said.err.startswith("kvtier: "))
    assert "Traceback" not in said.err


@pytest.mark.parametrize("command", ["verify", "gc", "stat", "du"])
def test_a_directory_below_a_root_is_refused_and_the_root_named(kvtier, cache, command: str) -> None:
    cache.put(range(3))
    for inside in (cache.home, cache.file(0).parent):
        said = kvtier(command, inside)
        assert said.status == 2
        assert f"did you mean {cache.root}?" in said.err.replace("\n", "")


@pytest.mark.parametrize("command", ["verify", "gc", "stat", "du"])
def test_files_without_a_cache_are_no_clean_root_and_a_new_disk_is_one(
    kvtier, tmp_path: Path, command: str
) -> None:
    (tmp_path / "lost+found").mkdir()
    assert kvtier(command, tmp_path).status == 0
    (tmp_path / "holiday.jpg").touch()
    said = kvtier(command, tmp_path)
    assert said.status == 2
    assert "no cache of kvtier's" in said.err.replace("\n", " ")


def test_names_of_others_do_not_command_the_terminal(kvtier, cache) -> None:
    cache.put([0])
    (cache.root / "\x1b[31mred").mkdir()
    os.mkdir(os.fsencode(cache.root) + b"/caf\xe9")
    said = kvtier("ls", cache.root)
    assert said.status == 0
    assert "\\x1b[31mred" in said.out
    assert said.out.replace("\n", "").isprintable()
