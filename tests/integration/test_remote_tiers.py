"""A real engine keeps its cache in a real Redis, object store, pool or peer, and another engine reads it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_testing.tiers._servers import absent
from tests.common import load_file
from tests.integration.conftest import Ask
from tests.integration.harness import PROJECT, PROMPT_CHUNKS, Engine, Launcher, prompt
from tests.integration.shared_tiers import SharedTier, mooncake_pools, shared_tier

PROMPTS = [prompt(seed) for seed in (1, 2, 3)]
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The object store that the plug-in's own tests start."""
    if importlib.util.find_spec("kvtier_s3") is None:
        absent("kvtier-s3 is not installed: pip install -e plugins/kvtier-s3")
    ceph = load_file("kvtier_s3_tests_ceph", PROJECT / "plugins/kvtier-s3/tests/ceph.py")
    if missing := ceph.missing():
        absent(f"no S3 server: {', '.join(missing)} not found; install {' '.join(ceph.PACKAGES)}")
    with ceph.Ceph(tmp_path_factory.mktemp("ceph") / "server") as server:
        server.make_bucket("engines")
        yield server


@pytest.fixture
def s3(ceph: Any, tmp_path: Path) -> SharedTier:
    """Credentials are in the environment, because the engine logs its own configuration."""
    place = {"bucket": "engines", "prefix": tmp_path.name, "endpoint": ceph.endpoint, "allow_http": True}
    keys = {"AWS_ACCESS_KEY_ID": ceph.access_key_id, "AWS_SECRET_ACCESS_KEY": ceph.secret_access_key}
    return SharedTier("s3", lambda _: {"type": "s3", **place}, keys)


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedTier]:
    if request.param == "s3":
        yield request.getfixturevalue("s3")
        return
    with shared_tier(request.param, tmp_path) as shared:
        yield shared


@pytest.mark.parametrize("shared", ["redis", "s3", "mooncake"], indirect=True)
def test_restart_serves_reset_does_not(
    launcher: Launcher, llama: Path, reference: Ask, shared: SharedTier
) -> None:
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [shared.of(0)]}
    with launcher.start(llama, settings, environment=shared.environment) as engine:
        cold = engine.served(*PROMPTS)
    with launcher.start(llama, settings, environment=shared.environment) as engine:
        restarted = engine.served(*PROMPTS)
        engine.reset()
        after_reset = engine.served(*PROMPTS)
        metrics = engine.metrics()

    answers = reference(*PROMPTS)
    assert (cold, restarted, after_reset) == ((answers, {}), (answers, {shared.name: CHUNKS}), (answers, {}))
    assert metrics.value("kvtier_tier_up", tier=shared.name) == 1
    assert metrics.value("kvtier_get_failed_chunks") == metrics.value("kvtier_put_failed_chunks") == 0


def test_peer_memory_until_killed(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    # Only the first engine has memory.
    with mooncake_pools().Pool(tmp_path / "pool", segment_bytes=0) as pool:
        tier = {"type": "mooncake", "master": pool.address}
        contributing = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{**tier, "segment_bytes": "64MiB"}]}
        settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
        with launcher.start(llama, contributing) as one, launcher.start(llama, settings) as other:
            one.served(*PROMPTS)
            one.settled()
            served = other.served(*PROMPTS[:2])
            one.kill()
            alone = other.served(PROMPTS[2])

    answers = reference(*PROMPTS)
    assert served == (answers[:2], {"mooncake": 2 * PROMPT_CHUNKS})
    assert alone == (answers[2:], {})


def test_nixl_peer_until_killed(launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path) -> None:
    def start(shared: SharedTier, number: int) -> Engine:
        settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [shared.of(number)]}
        return launcher.start(llama, settings, environment=shared.environment)

    with shared_tier("nixl", tmp_path) as shared, start(shared, 0) as one, start(shared, 1) as other:
        one.served(*PROMPTS)
        one.settled()
        other.until_open("nixl")
        served = other.served(*PROMPTS[:2])
        one.kill()
        alone = other.served(PROMPTS[2])

    answers = reference(*PROMPTS)
    assert served == (answers[:2], {"nixl": 2 * PROMPT_CHUNKS})
    assert alone == (answers[2:], {})


@pytest.mark.full
def test_lost_bucket_leaks_no_secret(launcher: Launcher, llama: Path, reference: Ask, s3: SharedTier) -> None:
    tier, keys = s3.of(0), s3.environment
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{**tier, "bucket": "not-there"}]}
    with launcher.start(llama, settings, environment=keys) as engine:
        served = engine.served(*PROMPTS)
        log = engine.log()

    assert served == (reference(*PROMPTS), {})
    assert "correct bucket (not-there)" in log
    assert not [name for name, secret in keys.items() if secret in log]
