"""vLLM starts with the configuration shipped for containers, kvtier serves, and doctor reads it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier_bench.engine.server import Server, add_tokenizer, free_port
from tests.integration.conftest import ENVIRONMENT
from tests.integration.harness import PROJECT, redis_servers

SHIPPED = PROJECT / "docs" / "assets" / "deploy" / "compose" / "engine.yaml"


@pytest.mark.full
def test_compose_file_engine(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, model := tmp_path / "model")
    add_tokenizer(model)
    socket = tmp_path / "redis.sock"
    engine = json.loads(SHIPPED.read_text())
    engine |= {"model": str(model), "port": free_port()}
    settings = engine["kv-transfer-config"]["kv_connector_extra_config"]
    settings["cpu_bytes_to_use"] = "64MiB"
    files, redis = settings["secondary_tiers"]
    files |= {"root_dir": str(tmp_path / "root"), "max_bytes": "1GiB"}
    redis["addresses"] = [str(socket)]
    (configuration := tmp_path / "engine.yaml").write_text(json.dumps(engine))

    with redis_servers().Server(tmp_path / "redis", f"--unixsocket {socket}"):
        doctor = [sys.executable, "-m", "kvtier", "doctor", str(configuration)]
        said = subprocess.run(doctor, capture_output=True, text=True, timeout=120)
        assert said.returncode == 0, said.stdout + said.stderr
        arguments = {"config": configuration, "max_model_len": 512}
        with Server(model, None, tmp_path / "log", engine["port"], ENVIRONMENT, **arguments) as server:
            order = {"prompt": list(range(2, 300)), "max_tokens": 1, "model": str(model)}
            with server.open("/v1/completions", order) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 1
            metrics, deadline = "", time.monotonic() + 60
            while not all(f'tier="{tier}"' in metrics for tier in ("fs", "redis")):
                assert time.monotonic() < deadline, metrics
                with server.open("/metrics") as answer:
                    metrics = answer.read().decode()
