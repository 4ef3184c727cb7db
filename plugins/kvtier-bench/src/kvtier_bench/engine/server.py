"""vLLM's OpenAI-compatible server and its engine, in separate processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import importlib_metadata

from kvtier_bench.engine.compared import VOCABULARY, EngineError, Settings, end_of, engine_arguments
from kvtier_bench.engine.compared import environment as of_engines

START_S = 400.0
END_S = 30.0
ANSWER_S = 120.0
# Below the ephemeral ports: an outgoing connection could take one of those before the server listens.
PORTS = range(30_000, 32_000)


class Server:
    """An API server and its engine, in their own process group. A context manager.

    Args:
        model: directory of the model, with a tokenizer.
        extra_config: settings of the connector; None for no connector.
        log: file for the output of both.
        environment: environment variables of this server alone.
        arguments: further arguments of the server.

    Attributes:
        url: address of the server.
    """

    def __init__(
        self,
        model: Path,
        extra_config: Settings | None,
        log: Path,
        port: int,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        variables = {**os.environ, **of_engines(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        paths = [*_metadata_of_vllm(log.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                _command(model, extra_config, {"host": "127.0.0.1", "port": port, **arguments}),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**variables, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        try:
            self._wait_until_ready()
        except BaseException:
            self.end_process()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.end_process()

    def open(self, path: str, order: Mapping[str, Any] | None = None) -> Any:
        """Send a request, a POST if there is an order, and return the response. The caller must close it."""
        data = None if order is None else json.dumps(order).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=ANSWER_S)

    def require_alive(self) -> None:
        """Raise EngineError, with the end of the log, if the server has ended."""
        if self._process.poll() is not None:
            raise EngineError(f"the server has ended\n{self.end_of_log()}")

    def end_of_log(self) -> str:
        """Return the last lines of the server's log."""
        return end_of(self._log)

    def end_process(self) -> None:
        """Shut the server down, then kill all processes that remain in its group."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.require_alive()
            with suppress(OSError), self.open("/health"):
                return
            time.sleep(0.2)
        raise EngineError(f"the server is not ready within {START_S} s\n{self.end_of_log()}")


def free_port() -> int:
    """Return a port without a listener."""
    while True:
        with closing(socket.socket()) as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port := random.SystemRandom().choice(PORTS)))
            return port


def add_tokenizer(model: Path) -> None:
    """Write a tokenizer, with one word per token, into a model's directory. No server starts without one."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{number}": number for number in range(VOCABULARY)},
            "unk_token": "w0",
        },
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _command(model: Path, extra_config: Settings | None, more: Mapping[str, Any]) -> list[str]:
    arguments = engine_arguments(model, extra_config, {"skip_tokenizer_init": False, **more})
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", arguments.pop("model")]
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command += [flag] * value
        else:
            # Passed as two arguments, because vLLM does not read the file of --config=FILE.
            command += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return command


def _metadata_of_vllm(folder: Path) -> list[str]:
    """Return a path with vLLM's package metadata if only a build under another name provides them."""
    with suppress(importlib_metadata.PackageNotFoundError):
        importlib_metadata.version("vllm")
        return []
    version = importlib_metadata.version(importlib_metadata.packages_distributions()["vllm"][0])
    information = folder / "metadata" / f"vllm-{version}.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return [str(information.parent)]
