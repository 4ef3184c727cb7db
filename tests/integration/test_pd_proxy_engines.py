"""Two prefill and two decode engines behind the proxy of the examples: the answers of a single engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier_bench.engine.server import ANSWER_S, add_tokenizer
from kvtier_bench.engine.server import Server as ApiServer
from kvtier_testing.tiers._servers import free_port
from tests.integration.conftest import ENVIRONMENT, Ask
from tests.integration.harness import OUTPUT_TOKENS, PROJECT, SIZES, Metrics, Tokens, patient, prompt

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

WAIT_S = 60.0
UNTIL_S = 60.0
AT_ONCE = 4
STEMS = [prompt(seed, 400) for seed in range(3)]
PROMPTS = [prompt(100 + seed, 600, shared=STEMS[seed % 3]) for seed in range(200)]
CALM, ROUGH = PROMPTS[:50], PROMPTS[50:]
ABORTED = set(range(3, len(ROUGH), 5))
"""Numbers of the rough prompts whose client leaves after the first token."""


class Server(ApiServer):
    """An API server and its engine over the root that all share."""

    def __init__(self, model: Path, root: Path, log: Path, cpu: int) -> None:
        settings = patient(
            {
                "spec_name": "KVTierOffloadingSpec",
                "cpu_bytes_to_use": "64MiB",
                "max_wait_s": WAIT_S,
                "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
            }
        )
        super().__init__(
            model,
            settings,
            log,
            free_port(),
            {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": str(cpu)},
            served_model_name="tiny",
            kv_transfer_config={"kv_connector": "KVTierConnector", "kv_load_failure_policy": "recompute"},
            **SIZES,
        )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    def metrics(self) -> Metrics:
        with self.open("/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return Metrics([(it.name, it.labels, it.value) for family in families for it in family.samples])


@dataclass
class Fleet:
    """The engines, and the address of the proxy."""

    url: str
    prefill: Sequence[Server]
    decode: Sequence[Server]

    def ask(self, tokens: Tokens, *, leaves: bool = False) -> Tokens:
        """Return the streamed tokens; only the first ones if the client leaves."""
        order = {"model": "tiny", "prompt": tokens, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        order |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(order).encode(), {"Content-Type": "application/json"}
        )
        said: Tokens = []
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    said += choice.get("token_ids") or []
                if leaves and said:
                    break
        return said

    def counted(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over the decode engines."""
        return sum(server.metrics().value(name, **labels) for server in self.decode)

    def until_idle(self) -> None:
        deadline_s = time.monotonic() + UNTIL_S
        while busy := self.counted("vllm:num_requests_running") + self.counted("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline_s, f"{busy} requests are still there"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def fleet(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model = folder / "tiny"
    shutil.copytree(llama, model)
    add_tokenizer(model)
    servers = []
    cpus = sorted(os.sched_getaffinity(0))
    for number, name in enumerate(("p0", "p1", "d0", "d1")):
        (folder / name).mkdir()
        log = folder / name / "server.log"
        # A vLLM worker spins while its engine steps without tokens, as with requests that wait for chunks.
        # Threads bound to the same core then get almost no CPU time, so no prefill may share a decode's core.
        servers.append(Server(model, folder / "root", log, cpus[number // 2]))
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.end_process)
        for server in servers:
            stack.enter_context(server)
        port = free_port()
        urls = [server.url for server in servers]
        command = [sys.executable, str(PROJECT / "examples/pd_proxy/proxy.py"), "--port", str(port)]
        command += ["--wait-s", str(WAIT_S), "--health-s", str(WAIT_S)]
        command += ["--prefill", *urls[:2], "--decode", *urls[2:]]
        process = stack.enter_context(subprocess.Popen(command))
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"
        _until_healthy(url, process)
        yield Fleet(url, servers[:2], servers[2:])


def _until_healthy(url: str, process: subprocess.Popen[bytes]) -> Mapping[str, Any]:
    deadline_s = time.monotonic() + UNTIL_S
    while True:
        assert process.poll() is None, "the proxy has ended"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                return dict(json.load(answer))
        except OSError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def test_answers_survive_prefill_faults(fleet: Fleet, reference: Ask) -> None:
    with ThreadPoolExecutor(AT_ONCE) as clients:
        assert list(clients.map(fleet.ask, CALM)) == reference(*CALM)
        assert fleet.counted("kvtier_stored_chunks") == 0, "decode engines have computed tails only"
        assert fleet.counted("kvtier_waits", reason="arrived") > 0

        answered = threading.Semaphore(0)

        def ask(number: int) -> Tokens:
            said = fleet.ask(ROUGH[number], leaves=number in ABORTED)
            answered.release()
            return said

        asked = clients.map(ask, range(len(ROUGH)))
        for _ in range(len(ROUGH) // 3):
            assert answered.acquire(timeout=ANSWER_S)
        fleet.prefill[0].kill()
        answers = list(asked)
    for number, (said, right) in enumerate(zip(answers, reference(*ROUGH), strict=True)):
        assert said == (right[: len(said)] if number in ABORTED else right), number
        assert said, number
    fleet.until_idle()

    fleet.prefill[1].kill()  # no prefill engine is left
    last = [prompt(400), prompt(401)]
    assert [fleet.ask(tokens) for tokens in last] == reference(*last)
