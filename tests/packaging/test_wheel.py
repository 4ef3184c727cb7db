"""The wheel works without a compiler: installed into a new environment, with its native library.

``nox -s wheels`` sets KVTIER_DIST to its folder of wheels; without it, the test builds a wheel.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

STORY = """
import asyncio, sys
from pathlib import Path
from kvtier._identity import Identity
from kvtier.keys import pack_key
from kvtier._memory.region import HeapMemory
from kvtier.tiers._base import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers._seal import Integrity, check, seal

async def main(verb, root):
    identity, key, memory = Identity.make("model", {}), pack_key(b"a" * 32), HeapMemory(1, 1 << 20)
    tier = FsTier(FsConfig(type="fs", root_dir=Path(root)))
    await tier.open(TierContext("fs", identity, memory.chunk_bytes))
    batch = Batch([key], [0], memory)
    if verb == "put":
        memory.view(0)[:] = b"x" * (1 << 20)
        batch.trailers[0] = seal(key, memory.view(0), identity.short_digest)
    outcome = await getattr(tier, verb)(batch)
    assert list(outcome.statuses) == [Status.OK], outcome
    assert bytes(memory.view(0)) == b"x" * (1 << 20)
    await tier.aclose()

asyncio.run(main(*sys.argv[1:]))
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheels."""
    if (given := os.environ.get("KVTIER_DIST")) is not None:
        return Path(given)
    made = tmp_path_factory.mktemp("dist")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made)
    subprocess.run([*pip, PROJECT, PROJECT / "plugins" / "kvtier-tools"], check=True)
    return made


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """A wheel for this machine."""
    (found,) = dist.glob(f"kvtier-*{platform.machine()}.whl")
    return found


@pytest.fixture(scope="module")
def run(dist: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment with kvtier's wheel and its extra ``tools``; its path has no other."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=True)
    bare = {
        name: value for name, value in os.environ.items() if name not in ("CC", "KVTIER_NATIVE", "PYTHONPATH")
    }
    bare["PATH"] = str(home / "bin")

    def run_one(*command: str | Path, env: Mapping[str, str] | None = None, status: int = 0) -> str:
        program = [home / "bin" / command[0], *command[1:]]
        done = subprocess.run(
            program, env={**bare, **(env or {})}, cwd=home, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status == 0 else done.stderr

    run_one("python", "-m", "pip", "install", "-q", "--find-links", dist, f"{wheel}[tools]")
    return run_one


def test_restart_works_natively(run: Run, tmp_path: Path) -> None:
    run("python", "-c", STORY, "put", tmp_path)
    run("python", "-c", STORY, "get", tmp_path)


def test_doctor_needs_native_library(run: Run, tmp_path: Path) -> None:
    tier = json.dumps({"type": "fs", "root_dir": str(tmp_path / "root")})
    without = {"KVTIER_NATIVE": "0"}
    assert json.loads(run("kvtier", "doctor", "--json", "--tier", tier))["not_well"] == []
    said = run("kvtier", "doctor", "--tier", tier, env=without, status=2)
    assert "needs kvtier's native library" in said
    assert "KVTIER_NATIVE=0" in said


def test_builds_carry_licence(wheel: Path) -> None:
    licence = (PROJECT / "LICENSE").read_bytes()
    for path in wheel.parent.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
            assert archive.read(name) == licence, path
    for path in wheel.parent.glob("*.tar.gz"):
        with tarfile.open(path) as archive:
            file = archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/LICENSE")
            assert file is not None
            assert file.read() == licence, path


def test_sdist_has_only_sources(wheel: Path) -> None:
    sdists = list(wheel.parent.glob("kvtier-*.tar.gz"))
    if not sdists:
        pytest.skip("no sdist: nox -s wheels builds it")
    with tarfile.open(sdists[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"kvtier/_native/kvtier_native.{suffix}" for suffix in "ch"}
    assert names >= {*sources, "noxfile.py", ".ci/lanes.py"}
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
