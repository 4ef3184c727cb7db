"""The tools for roots: accurate reports, correct repairs, and foreign files left alone."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import Identity
from kvtier.tiers.fs._layout import BLOCK_BYTES
from tests.caches import Cache, Kvtier

CHUNK_BYTES = 16384
FILE_BYTES = CHUNK_BYTES + BLOCK_BYTES


def put_in_another_process(root: Path, then: str) -> subprocess.Popen[str]:
    """Have another process open the cache of the fixture, put chunk 0, say so, and go on with ``then``."""
    source = """
        import asyncio, sys
        from pathlib import Path
        from tests.caches import Cache

        async def main():
            cache = Cache(Path(sys.argv[1]))
            tier = await cache.open()
            await tier.put(cache.batch([0]))
            while tier._session.epoch.listed < 0:  # then it has swept, and leaves the dead alone
                await asyncio.sleep(0.01)
            print("put", flush=True)
            {then}
            await tier.aclose()

        asyncio.run(main())
    """
    text = textwrap.dedent(source).format(then=then)
    other = subprocess.Popen(
        [sys.executable, "-c", text, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "put\n"
    return other


@pytest.fixture
def living(cache: Cache) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the cache open until it is told to end."""
    other = put_in_another_process(cache.root, "await asyncio.to_thread(sys.stdin.read)")
    yield other
    other.communicate(timeout=30)


@pytest.fixture
def killed(cache: Cache) -> None:
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


def test_ls_describes_caches(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(10))
    said = kvtier("ls", cache.root, "--json")
    found = one(said)
    assert said.status == 0
    assert found["namespace"] == cache.name
    assert found["model"] == "org/Model-7B"
    assert found["digest"] == cache.identity.digest.hex()
    assert found["groups"] == [0, 1, 2]
    assert (found["epoch"], found["chunks"], found["old_chunks"]) == (0, 10, 0)
    assert found["bytes"] == 10 * FILE_BYTES
    assert found["in_use"] is False
    assert abs(found["last_use"] - time.time()) < 60
    shown = kvtier("ls", cache.root).out
    assert cache.name in shown
    assert "200.0 KiB" in shown


def test_ls_spares_live_engines(kvtier: Kvtier, cache: Cache, living: Any) -> None:
    assert one(kvtier("ls", cache.root, "--json"))["in_use"] is True
    assert kvtier("du", cache.root, "--json").json["writers"] == 1
    cache.put([1])  # the locks that were looked at are free again
    living.communicate(timeout=30)
    assert living.returncode == 0
    assert one(kvtier("ls", cache.root, "--json"))["in_use"] is False


def test_users_unknown_without_locks(kvtier: Kvtier, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put([0])

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert one(kvtier("ls", cache.root, "--json"))["in_use"] is None
    assert "unknown" in kvtier("ls", cache.root).out


def test_ls_separates_old_epochs(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(4))
    cache.put(range(4, 7), resets=1)
    found = one(kvtier("ls", cache.root, "--json"))
    assert found["epoch"] > 0  # the next engine to open it starts empty
    assert (found["chunks"], found["old_chunks"]) == (0, found["bytes"] // FILE_BYTES)


def test_ls_names_foreign_files(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(2))
    (cache.home / "config.json").write_text("{")
    (cache.root / "notes.txt").write_text("mine")
    said = kvtier("ls", cache.root, "--json")
    assert said.status == 1
    assert "config.json is not readable JSON" in one(said)["problem"]
    assert said.json["others"] == ["notes.txt"]
    (cache.home / "config.json").write_text(Identity.make("org/Model-7B", {"dtype": "float16"}).manifest)
    said = kvtier("ls", cache.root, "--json")
    assert (said.status, one(said)["digest"]) == (1, None)
    assert "belongs to another cache" in one(said)["problem"]
    assert "not kvtier's: notes.txt" in kvtier("ls", cache.root).out


@pytest.mark.parametrize("content", [b"garbage", b"", None])
@pytest.mark.parametrize("command", ["ls", "verify"])
def test_unreadable_epoch_is_told(kvtier: Kvtier, cache: Cache, content: bytes | None, command: str) -> None:
    cache.put(range(6))
    (cache.home / "epoch").unlink()
    if content is not None:
        (cache.home / "epoch").write_bytes(content)
    said = kvtier(command, cache.root)
    assert said.status == 1
    assert "epoch is not readable" in said.out
    assert cache.had(range(6)) == []  # as it says: the next engine starts another one


@pytest.mark.parametrize("command", ["ls", "du", "verify", "gc"])
def test_missing_root_is_named(kvtier: Kvtier, tmp_path: Path, command: str) -> None:
    said = kvtier(command, tmp_path / "nowhere")
    assert said.status == 2
    assert str(tmp_path / "nowhere") in said.err
    assert len(said.err.splitlines()) == 1


def test_du_matches_the_system(kvtier: Kvtier, cache: Cache) -> None:
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
    assert parts["", "others"]["bytes"] >= 50_000
    assert said["unreadable"] == 0


# ------------------------------------------------------------------------------------- verify


def test_verify_changes_nothing(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(30))
    before = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in cache.root.rglob("*.bin")}
    said = kvtier("verify", cache.root, "--json")
    assert said.status == 0
    assert (one(said)["chunks"], one(said)["sound"]) == (30, 30)
    after = {path: (path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in cache.root.rglob("*.bin")}
    assert after == before  # to be read by this tool is no use: eviction goes by it


def test_repair_moves_all_damage(kvtier: Kvtier, cache: Cache) -> None:
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


def test_other_caches_chunk_is_foreign(kvtier: Kvtier, cache: Cache, tmp_path: Path) -> None:
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


def test_verify_beside_writer_is_clean(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(200))
    churn = """
            for number in range(1000, 1000000):
                one = cache.batch([number])
                await tier.put(one)
                if number % 3 == 0:
                    await tier.discard(one.keys)
                if number == 1005:
                    print("busy", flush=True)
    """
    then = textwrap.dedent(churn).strip().replace("\n", "\n            ")
    other = put_in_another_process(cache.root, then)
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


def test_strays_are_left_alone(kvtier: Kvtier, cache: Cache, tmp_path: Path) -> None:
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
def locked_out() -> Iterator[Callable[[Path], None]]:
    """Makes a file or directory unreadable, for root too, whose right to read all is dropped meanwhile."""
    libc, version_3, this_thread = ctypes.CDLL(None), 0x20080522, 0
    header, held = (ctypes.c_uint32 * 2)(version_3, this_thread), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    dropped = (ctypes.c_uint32 * 6)(*held)
    dropped[0] &= ~0b110  # of the effective ones CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH

    def lock(path: Path) -> None:
        path.chmod(0)
        assert libc.capset(header, dropped) == 0

    yield lock
    assert libc.capset(header, held) == 0


def test_unreadable_is_not_set_aside(kvtier: Kvtier, cache: Cache, locked_out: Any) -> None:
    cache.put(range(3))
    locked_out(cache.file(1))
    said = kvtier("verify", cache.root, "--repair", "--json")
    found = one(said)
    assert (said.status, found["unreadable"], found["sound"], found["set_aside"]) == (1, 1, 2, 0)
    assert found["ill"][0]["errno"] == "eacces"
    assert cache.file(1).exists()


def test_vllms_own_cache_is_left_alone(kvtier: Kvtier, cache: Cache) -> None:
    fields = {"inference_engine": "vllm", "model_name": "org/m", "blocks_per_file": 1}
    for digits in (12, 16):  # vLLM's names have 12 today
        name = f"org_m_{hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:digits]}"
        (cache.root / name).mkdir(parents=True)
        (cache.root / name / "config.json").write_text(json.dumps(fields))
        file = cache.root / f"{name}_r0" / "abc" / "de_g0" / "abcdef.bin"
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(8192))
    cache.put(range(5))
    assert one(kvtier("ls", cache.root, "--json"))["namespace"] == cache.name
    assert kvtier("verify", cache.root, "--repair").status == 0
    rehearsed = kvtier("gc", cache.root, "--max-bytes", "0", "--dry-run", "--json")
    done = kvtier("gc", cache.root, "--max-bytes", "0", "--json")
    assert rehearsed.json["evicted_files"] == done.json["evicted_files"] == 5
    assert done.status == 1
    assert kvtier("gc", cache.root, "--older-than", "0s").status == 0
    assert cache.had(range(5)) == []
    assert len(list(cache.root.glob("org_m_*_r0/*/*/*.bin"))) == 2


# ----------------------------------------------------------------------------------------- gc


def age(cache: Cache, numbers: Iterable[int], seconds: float) -> None:
    """Make chunks look as if they had been written so long ago, and never used since."""
    for number in numbers:
        when = time.time() - seconds
        os.utime(cache.file(number), (when, when))


def test_gc_removes_old(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(20))
    age(cache, range(8), 3600)
    done = kvtier("gc", cache.root, "--older-than", "30m", "--json")
    assert done.status == 0
    assert (done.json["expired_files"], done.json["evicted_files"]) == (8, 0)
    assert cache.had(range(20)) == list(range(8, 20))


def test_gc_removes_oldest_first(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(40))
    age(cache, range(20), 3600)
    limit = kvtier("du", cache.root, "--json").json["bytes"] - 12 * FILE_BYTES
    done = kvtier("gc", cache.root, "--max-bytes", limit, "--json")
    assert done.status == 0
    assert done.json["bytes_after"] <= limit
    left = cache.had(range(40))
    assert left[-20:] == list(range(20, 40))
    assert len(left) == 40 - done.json["evicted_files"] >= 20


def test_dry_run_separates_causes(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(20))
    age(cache, range(8), 3600)
    limit = kvtier("gc", cache.root, "--dry-run", "--json").json["bytes_before"] - 12 * FILE_BYTES
    rehearsed = kvtier(
        "gc", cache.root, "--older-than", "30m", "--max-bytes", limit, "--dry-run", "--json"
    ).json
    assert (rehearsed["expired_files"], rehearsed["evicted_files"]) == (8, 4)
    assert rehearsed["bytes_after"] == limit
    assert cache.had(range(20)) == list(range(20))


def test_gc_removes_orphans(kvtier: Kvtier, cache: Cache) -> None:
    orphan = cache.root / "model_0123456789abcdef_r0" / "abc" / "de_g0" / "abcdef.bin"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(bytes(FILE_BYTES))
    put_in_another_process(cache.root, "pass").communicate(timeout=30)  # it has swept
    assert orphan.exists()
    assert kvtier("gc", cache.root, "--json").json["leftover_bytes"] >= FILE_BYTES
    assert not orphan.exists()


def test_gc_keeps_users_file(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(4))
    cache.put(range(4), resets=1)  # the epoch before it is swept
    orphans = cache.root / "model_0123456789abcdef_r0"
    notes = [
        folder / name
        for folder in (orphans / "abc", orphans / "abc" / "de_g0", cache.root / f"{cache.name}_r0" / "abc")
        for name in ("notes.txt", "model.bin")
    ]
    notes += [cache.home / ".tmp" / "mine" / "notes.txt"]
    for path in notes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (orphans / "abc" / "de_g0" / "abcdef.bin").write_bytes(bytes(FILE_BYTES))
    (cache.home / ".tmp" / "list").touch()
    said = kvtier("gc", cache.root, "--json")
    assert (said.status, said.json["failed"]) == (0, {})
    assert said.json["leftover_bytes"] >= FILE_BYTES
    assert not (orphans / "abc" / "de_g0" / "abcdef.bin").exists()
    assert [path for path in notes if not path.exists()] == []


def test_du_flags_wrong_ledger(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(40))
    assert not kvtier("du", cache.root, "--json").json["ledger_is_wrong"]
    for number in range(40):
        cache.file(number).unlink()
    assert kvtier("du", cache.root, "--json").json["ledger_is_wrong"]
    assert "the ledger is wrong" in kvtier("du", cache.root).out


def test_gc_spares_other_caches(kvtier: Kvtier, cache: Cache) -> None:
    other = type(cache)(cache.root, "org/Other-7B")
    cache.put(range(5))
    other.put(range(5))
    done = kvtier("gc", cache.root, "--namespace", cache.name, "--older-than", "0s", "--json")
    assert done.json["expired_files"] == 5
    assert (cache.had(range(5)), other.had(range(5))) == ([], list(range(5)))


def test_gc_removes_own_leftovers(kvtier: Kvtier, cache: Cache, killed: Any) -> None:
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


def test_gc_spares_live_engine(kvtier: Kvtier, cache: Cache, living: Any) -> None:
    cache.put([5], resets=1)  # the living engine's epoch is old now
    assert kvtier("gc", cache.root).status == 0
    assert cache.file(0).exists()
    living.communicate(timeout=30)
    assert living.returncode == 0
    assert kvtier("gc", cache.root).status == 0
    assert not cache.file(0).exists()


def test_gc_corrects_ledger(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(30))
    found = kvtier("du", cache.root, "--json").json
    before = found["ledger_bytes"]
    assert abs(before - found["bytes"]) <= 2 * BLOCK_BYTES
    assert (found["leased_bytes"], found["writers"]) == (0, 0)
    done = kvtier("gc", cache.root, "--older-than", "0s", "--json").json
    assert done["expired_files"] == 30
    after = kvtier("du", cache.root, "--json").json["ledger_bytes"]
    assert before - after == done["expired_bytes"]


@pytest.mark.parametrize(("option", "value"), [("--max-bytes", "-1"), ("--older-than", "inf")])
def test_gc_refuses_absurd_limit(kvtier: Kvtier, cache: Cache, option: str, value: str) -> None:
    cache.put([0])
    said = kvtier("gc", cache.root, f"{option}={value}")
    assert said.status == 2
    assert f"{option}: {value!r}" in said.err
    assert cache.file(0).exists()


def test_unknown_namespace_lists_known(kvtier: Kvtier, cache: Cache) -> None:
    cache.put([0])
    for command in ("gc", "verify"):
        said = kvtier(command, cache.root, "--namespace", "x")
        assert said.status == 2
        assert cache.name in said.err


# ------------------------------------------------------------------------------- copies of a root


@pytest.mark.parametrize("which", ["a whole root", "one cache"])
def test_documented_copy_works(cache: Cache, tmp_path: Path, which: str) -> None:
    cache.put(range(20))
    other = type(cache)(cache.root, "org/Other-7B")
    other.put(range(3))
    page = (Path(__file__).parents[3] / "docs" / "tiers" / "fs.md").read_text()
    (recipe,) = re.findall(rf"```bash\n# {which}\n(.*?)```", page, re.DOTALL)
    there = type(cache)(tmp_path / "there")
    there.root.mkdir()
    for documented, real in (
        ("/var/cache/kvtier", cache.root),
        ("/mnt/other/kvtier", there.root),
        ("Model-7B_964231704f5cb134", cache.name),
    ):
        assert documented in recipe or (documented.startswith("Model") and which == "a whole root")
        recipe = recipe.replace(documented, str(real))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    copied = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", recipe],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert copied.returncode == 0, copied.stderr
    assert "20" in copied.stdout  # the chunks that verify found sound
    assert there.had(range(20)) == list(range(20))
    assert type(cache)(there.root, "org/Other-7B").had(range(3)) == (
        [] if which == "one cache" else [0, 1, 2]
    )
    assert not list((there.home / ".tmp").glob("*"))


# -------------------------------------------------------------------------------------- the rest


def test_terminal_shows_progress(kvtier: Kvtier, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(range(3))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    said = kvtier("gc", cache.root, "--max-bytes", "0", "--json")
    assert "files removed" in said.err
    assert said.json["root"] == str(cache.root)


# ---------------------------------------------------------------------- what is not what it should be


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
@pytest.mark.parametrize("name", ["config.json", "epoch", "../.kvtier/ledger", "epoch.lock"])
@pytest.mark.parametrize("command", ["ls", "verify", "gc", "du"])
def test_non_files_hang_no_tool(
    kvtier: Kvtier, cache: Cache, name: str, make: Callable[[Path], None], command: str
) -> None:
    cache.put(range(3))
    place = cache.home / name
    place.unlink(missing_ok=True)
    make(place)
    said = kvtier(command, cache.root, "--json")
    assert (said.status in (0, 1) and said.json) or (said.status == 2 and said.err.startswith("kvtier: "))
    assert "Traceback" not in said.err


@pytest.mark.parametrize("command", ["verify", "gc", "du"])
def test_subdirectory_is_refused(kvtier: Kvtier, cache: Cache, command: str) -> None:
    cache.put(range(3))
    for inside in (cache.home, cache.file(0).parent):
        said = kvtier(command, inside)
        assert said.status == 2
        assert f"did you mean {cache.root}?" in said.err.replace("\n", "")


@pytest.mark.parametrize("command", ["verify", "gc", "du"])
def test_foreign_files_are_unclean(kvtier: Kvtier, tmp_path: Path, command: str) -> None:
    assert kvtier(command, tmp_path).status == kvtier("ls", tmp_path).status == 0
    (tmp_path / "lost+found").mkdir()
    assert kvtier(command, tmp_path).status == 0
    (tmp_path / "holiday.jpg").touch()
    said = kvtier(command, tmp_path)
    assert said.status == 2
    assert "it contains other files, and no cache" in said.err.replace("\n", " ")


def test_names_are_escaped(kvtier: Kvtier, cache: Cache) -> None:
    cache.put([0])
    (cache.root / "\x1b[31mred").mkdir()
    os.mkdir(os.fsencode(cache.root) + b"/caf\xe9")
    said = kvtier("ls", cache.root)
    assert said.status == 0
    assert "\\x1b[31mred" in said.out
    assert said.out.replace("\n", "").isprintable()


# ------------------------------------------------------------------- what operators must be told


def test_gc_counts_unremovable(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(10))
    kept = [cache.file(number) for number in (1, 2, 3)]
    if (
        shutil.which("chattr") is None
        or subprocess.run(["chattr", "+i", *kept], capture_output=True).returncode
    ):
        pytest.skip("no file can be made immutable here")
    try:
        said = kvtier("gc", cache.root, "--max-bytes", "0")
    finally:
        subprocess.run(["chattr", "-i", *kept], check=True)
    assert said.status == 1
    assert "3 files or directories could not be removed or read: Operation not permitted" in said.out
    assert "no chunks of kvtier's" not in said.out
    assert [number for number in range(10) if cache.file(number).exists()] == [1, 2, 3]


@pytest.mark.parametrize(
    "command", [["ls"], ["verify"], ["du"], ["gc"], ["gc", "--dry-run"], ["gc", "--older-than", "1d"]]
)
def test_unreadable_directory_is_told(
    kvtier: Kvtier, cache: Cache, locked_out: Any, command: list[str]
) -> None:
    cache.put(range(3))
    locked_out(cache.file(1).parent)
    said = kvtier(command[0], cache.root, *command[1:])
    assert said.status == 1
    words = {"verify": "eacces", "gc": "Permission denied"}
    assert words.get(command[0], "cannot be read") in said.out


def test_stat_matches_trailer(kvtier: Kvtier, cache: Cache) -> None:
    cache.put(range(3))
    said = kvtier("stat", cache.file(2), "--json")
    assert said.status == 0
    assert said.json["finding"] == "sound"
    assert said.json["hash"] == cache.key(2)[:-4].hex()
    assert (said.json["group"], said.json["payload_bytes"]) == (2, CHUNK_BYTES)
    assert said.json["digest"] == cache.identity.short_digest.hex()
    assert said.json["hash"] in kvtier("stat", cache.file(2)).out


def test_stat_names_damage(kvtier: Kvtier, cache: Cache, tmp_path: Path) -> None:
    cache.put(range(7))
    damage(cache.file(1), "checksum")
    damage(cache.file(2), "torn")
    damage(cache.file(4), "no trailer")
    shutil.copy(cache.file(3), cache.file(6))
    shutil.copy(cache.file(3), tmp_path / "copy")
    for number, finding in ((1, "checksum"), (2, "torn"), (4, "torn"), (6, "foreign")):
        said = kvtier("stat", cache.file(number), "--json")
        assert (said.status, said.json["finding"]) == (1, finding)
    assert kvtier("stat", tmp_path / "copy", "--json").json["finding"] == "sound"
    aside = cache.home / "quarantine" / "set-aside"
    aside.parent.mkdir(exist_ok=True)
    shutil.move(cache.file(2), aside)
    assert kvtier("stat", aside, "--json").json["finding"] == "unverified"


def test_stat_is_no_use(kvtier: Kvtier, cache: Cache) -> None:
    cache.put([0])
    age(cache, range(1), 10 * 86_400)
    before = cache.file(0).stat()
    said = kvtier("stat", cache.file(0), "--json")
    assert (said.status, said.json["finding"]) == (0, "sound")
    after = cache.file(0).stat()
    assert (after.st_atime_ns, after.st_mtime_ns) == (before.st_atime_ns, before.st_mtime_ns)


def test_stat_refuses_non_chunk(kvtier: Kvtier, tmp_path: Path) -> None:
    file = tmp_path / "passwd"
    file.write_text("root:x:0:0\n" * 1000)
    said = kvtier("stat", file)
    assert (said.status, said.out) == (2, "")
    assert "is not a chunk file" in said.err
