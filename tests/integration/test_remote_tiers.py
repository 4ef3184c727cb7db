"""A real engine keeps its cache in a real Redis, object store, pool or peer, and has it elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_testing.tiers._servers import absent, free_port
from tests.common import load_file
from tests.integration.conftest import Ask
from tests.integration.harness import PROJECT, PROMPT_CHUNKS, Launcher, prompt, redis_servers

PROMPTS = [prompt(seed) for seed in (1, 2, 3)]
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS

Rig = tuple[dict[str, Any], dict[str, str]]
"""The settings of a tier over a server of its own, and environment variables of the engine."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Rig]:
    """A server as the plug-in's own tests start them."""
    if importlib.util.find_spec("kvtier_redis") is None:
        absent("kvtier-redis is not installed: pip install -e plugins/kvtier-redis")
    path = tmp_path / "redis.sock"
    with redis_servers().Server(tmp_path / "redis", f"--unixsocket {path}"):
        yield {"type": "redis", "addresses": [str(path)]}, {}


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
def s3(ceph: Any, tmp_path: Path) -> Rig:
    """Credentials are in the environment: the engine itself logs what is in its configuration."""
    place = {"bucket": "engines", "prefix": tmp_path.name, "endpoint": ceph.endpoint, "allow_http": True}
    keys = {"AWS_ACCESS_KEY_ID": ceph.access_key_id, "AWS_SECRET_ACCESS_KEY": ceph.secret_access_key}
    return {"type": "s3", **place}, keys


@pytest.fixture(scope="module")
def pools() -> Any:
    """What the plug-in's own tests start a pool with."""
    if importlib.util.find_spec("kvtier_mooncake") is None:
        absent("kvtier-mooncake is not installed: pip install -e plugins/kvtier-mooncake")
    return load_file("kvtier_mooncake_tests_pools", PROJECT / "plugins/kvtier-mooncake/tests/pools.py")


@pytest.fixture
def nixl() -> Any:
    """What the plug-in's own tests open tiers with."""
    for module in ("kvtier_nixl", "nixl"):
        if importlib.util.find_spec(module) is None:
            absent("pip install -e plugins/kvtier-nixl; pip install --no-deps nixl nixl-cu12")
    return load_file("kvtier_nixl_tests_engines", PROJECT / "plugins/kvtier-nixl/tests/engines.py")


@pytest.fixture
def mooncake(pools: Any, tmp_path: Path) -> Iterator[Rig]:
    with pools.Pool(tmp_path / "pool", 256 << 20) as pool:
        yield {"type": "mooncake", "master": pool.address}, {}


@pytest.mark.parametrize("name", ["redis", "s3", "mooncake"])
def test_served_after_a_restart_with_an_empty_primary_tier_and_not_after_a_reset(
    request: pytest.FixtureRequest, launcher: Launcher, llama: Path, reference: Ask, name: str
) -> None:
    tier, environment = request.getfixturevalue(name)
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
    with launcher.start(llama, settings, environment=environment) as engine:
        cold = engine.served(*PROMPTS)
    with launcher.start(llama, settings, environment=environment) as engine:
        restarted = engine.served(*PROMPTS)
        engine.reset()
        after_reset = engine.served(*PROMPTS)
        metrics = engine.metrics()

    answers = reference(*PROMPTS)
    assert (cold, restarted, after_reset) == ((answers, {}), (answers, {name: CHUNKS}), (answers, {}))
    assert metrics.value("kvtier_tier_up", tier=name) == 1
    assert metrics.value("kvtier_get_failed_chunks") == metrics.value("kvtier_put_failed_chunks") == 0


def test_an_engine_is_served_from_the_memory_of_another_one_and_goes_on_when_that_is_killed(
    pools: Any, launcher: Launcher, llama: Path, reference: Ask, tmp_path: Path
) -> None:
    with pools.Pool(tmp_path / "pool", segment_bytes=0) as pool:  # nobody but the first engine has memory
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


def test_an_engine_is_served_from_the_host_memory_of_another_one_by_nixl_and_goes_on_when_that_is_killed(
    nixl: Any, launcher: Launcher, llama: Path, reference: Ask
) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    common = {"serve_bytes": "64MiB", "receive_bytes": "16MiB", "answer_timeout_s": 10.0, "deadline_s": 30.0}

    def start(address: str) -> Any:
        tier = {"type": "nixl", "listen": address, "peers": addresses, **common}
        settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
        return launcher.start(llama, settings, environment={"UCX_TLS": "tcp,self"})

    with start(addresses[0]) as one, start(addresses[1]) as other:
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
def test_an_engine_goes_on_without_its_bucket_and_its_log_shows_no_secret(
    launcher: Launcher, llama: Path, reference: Ask, s3: Rig
) -> None:
    tier, keys = s3
    settings = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [{**tier, "bucket": "not-there"}]}
    with launcher.start(llama, settings, environment=keys) as engine:
        served = engine.served(*PROMPTS)
        log = engine.log()

    assert served == (reference(*PROMPTS), {})
    assert "correct bucket (not-there)" in log
    assert not [name for name, secret in keys.items() if secret in log]
