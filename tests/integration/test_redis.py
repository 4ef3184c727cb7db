"""A real engine over a real Redis server: served after a restart, and unharmed by a server that hangs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, Launcher, Metrics, prompt

PROMPTS = [prompt(seed) for seed in (1, 2, 3)]
OTHERS = [prompt(seed) for seed in range(10, 16)]  # more than the device cache holds
NEVER_STORED = prompt(20)  # the server is asked for it in any case
CHUNKS = len(PROMPTS) * PROMPT_CHUNKS
DEADLINE_S = 5.0  # more than a busy machine stops a process for: what is served before the fault is in time


class Server:
    """A Redis server of one test.

    Args:
        directory: for its files.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.path), "--save", ""]
        self._process = subprocess.Popen([*command, "--dir", str(directory)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self.path))
            except OSError:
                return False
            connection.sendall(b"PING\r\n")
            return connection.recv(16) == b"+PONG\r\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    missing = [
        name
        for name, found in (
            ("redis-server", shutil.which("redis-server")),
            ("kvtier-redis", importlib.util.find_spec("kvtier_redis")),
        )
        if not found
    ]
    if missing:
        why = f"not installed: {', '.join(missing)}"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(why)
        pytest.skip(why)
    server = Server(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def settings(server: Server) -> dict[str, Any]:
    tier = {"type": "redis", "addresses": [str(server.path)]}
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}


def _with_deadlines(settings: dict[str, Any]) -> dict[str, Any]:
    (tier,) = settings["secondary_tiers"]
    tiers = [{**tier, "deadline_s": DEADLINE_S}]
    return {**settings, "request_deadline_s": DEADLINE_S, "secondary_tiers": tiers}


def _has_timeouts(metrics: Metrics) -> bool:
    failed = ("kvtier_get_failed_chunks", "kvtier_put_failed_chunks")
    return any(metrics.value(name, tier="redis", reason="timeout") for name in failed)


def test_served_from_redis_after_a_restart_and_not_after_a_reset(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any]
) -> None:
    with launcher.start(llama, settings) as engine:
        cold, loaded_cold = engine.served(*PROMPTS)
    with launcher.start(llama, settings) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS)
        engine.reset()
        after_reset, loaded_after_reset = engine.served(*PROMPTS)
        metrics = engine.metrics()

    assert cold == restarted == after_reset == reference(*PROMPTS)
    assert (loaded_cold, loaded_restarted) == ({}, {"redis": CHUNKS})
    assert loaded_after_reset == {}
    assert metrics.value("kvtier_tier_up", tier="redis") == 1
    assert metrics.value("kvtier_get_failed_chunks") == metrics.value("kvtier_put_failed_chunks") == 0


@pytest.mark.full
def test_a_server_that_hangs_costs_no_token_and_no_more_than_the_deadline(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], server: Server
) -> None:
    with launcher.start(llama, settings) as engine:
        engine.served(*PROMPTS, *OTHERS)
    with launcher.start(llama, _with_deadlines(settings)) as engine:
        engine.until_open("redis")
        first, loaded = engine.served(PROMPTS[0])
        engine.tell("generate", prompts=[*PROMPTS[1:], *OTHERS], output_tokens=8, together=True)
        time.sleep(0.02)  # gets are under way
        server.signal(signal.SIGSTOP)
        started = time.monotonic()
        hung = engine.hear("generate")["answers"]
        took = time.monotonic() - started
        while_it_hangs = engine.generate(*OTHERS, NEVER_STORED)
        metrics = engine.until(_has_timeouts, "what hangs is given up, and counted")
        server.signal(signal.SIGCONT)
        engine.settled()
        engine.generate(*PROMPTS, *OTHERS)
        afterwards, _ = engine.served(*PROMPTS, *OTHERS)
    with launcher.start(llama, settings) as engine:
        restarted, loaded_restarted = engine.served(*PROMPTS)

    assert loaded == {"redis": PROMPT_CHUNKS}
    assert first == reference(PROMPTS[0])
    assert hung == reference(*PROMPTS[1:], *OTHERS)
    assert while_it_hangs == reference(*OTHERS, NEVER_STORED)
    assert afterwards == reference(*PROMPTS, *OTHERS)
    assert took < 6 * DEADLINE_S, metrics  # it computes what it was not given
    assert restarted == reference(*PROMPTS)
    assert loaded_restarted == {"redis": CHUNKS}
