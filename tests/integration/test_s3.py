"""A real engine keeps its cache in a real object store, and has it again after a restart."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import PROJECT, PROMPT_CHUNKS, Launcher, load_file, prompt

PROMPTS = [prompt(seed) for seed in (1, 2, 3)]
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS
BUCKET = "engines"


def absent(what: str) -> None:
    """Skip where something is not installed; on CI it has to be."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The object store that the plug-in's own tests start."""
    if importlib.util.find_spec("kvtier_s3") is None:
        absent("kvtier-s3 is not installed: pip install -e plugins/kvtier-s3")
    ceph = load_file("kvtier_s3_tests_ceph", PROJECT / "plugins/kvtier-s3/tests/ceph.py")
    if missing := ceph.missing():
        absent(f"no S3 server: {', '.join(missing)} not found; install {' '.join(ceph.PACKAGES)}")
    with ceph.Ceph(tmp_path_factory.mktemp("ceph") / "server") as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def settings(server: Any, tmp_path: Path) -> dict[str, Any]:
    tier = {
        "type": "s3",
        "bucket": BUCKET,
        "prefix": tmp_path.name,
        "endpoint": server.endpoint,
        "allow_http": True,
    }
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}


@pytest.fixture
def keys(server: Any) -> dict[str, str]:
    """Credentials, in the environment: what is in its configuration the engine itself writes to its log."""
    return {"AWS_ACCESS_KEY_ID": server.access_key_id, "AWS_SECRET_ACCESS_KEY": server.secret_access_key}


def test_served_from_the_bucket_after_a_restart_with_an_empty_primary_tier(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], keys: dict[str, str]
) -> None:
    with launcher.start(llama, settings, environment=keys) as engine:
        cold, loaded_cold = engine.served(*PROMPTS)
    with launcher.start(llama, settings, environment=keys) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS)

    assert cold == restarted == reference(*PROMPTS)
    assert (loaded_cold, loaded_restarted) == ({}, {"s3": CHUNKS})


@pytest.mark.full
def test_an_engine_goes_on_without_its_bucket_and_its_log_shows_no_secret(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], keys: dict[str, str]
) -> None:
    settings["secondary_tiers"][0]["bucket"] = "not-there"
    with launcher.start(llama, settings, environment=keys) as engine:
        answers, loaded = engine.served(*PROMPTS)
        log = engine.log()

    assert (answers, loaded) == (reference(*PROMPTS), {})
    assert "correct bucket (not-there)" in log
    assert not [name for name, secret in keys.items() if secret in log]
