"""Real engines for benchmarks. Several run at once, each in its own process, and get requests in turns."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvtier.errors import KVTierError
from kvtier_bench.machine import files_below

SERVER = "kvtier_bench.engine.process"
BLOCK_TOKENS = 32
VOCABULARY = 1024
DTYPE = "float32"  # With bfloat16, a batch of a different shape may round to a different token.
START_S = 300.0
ANSWER_S = 600.0
END_LINES = 150
RESAMPLES = 2000
_POLL_S = 0.05

PLAIN = "none"
FS = "kvtier cpu+fs"

Settings = Mapping[str, Any]
"""Settings of a connector, with its ``spec_name``."""


def _llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    spread: float,
    head_dim: int = 64,
    positions: int = 8192,
) -> Settings:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "initializer_range": spread,
        "tie_word_embeddings": False,
    }


MODELS: Mapping[str, Settings] = {
    # Initialised so that an answer depends on the whole prompt: a wrong byte then changes the tokens.
    "tiny": _llama(256, 512, 4, 4, 2, 0.1),
    "small": _llama(512, 1408, 6, 8, 2, 0.08),
    "medium": _llama(1024, 2816, 8, 16, 4, 0.06),
    "windows": {
        **_llama(256, 512, 6, 4, 2, 0.1),
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 64,
    },
    "8b": _llama(4096, 14336, 32, 32, 8, 0.02, head_dim=128, positions=131072),
}
"""Random models by size: fields of their configuration. Llama-style; Gemma-style with sliding windows."""

FOR_A_GPU = "8b"
"""Llama 3.1 8B's shape, but for the vocabulary; in bfloat16, with random weights that vLLM makes."""


class Size(Enum):
    """A size in ``MODELS``."""

    TINY = "tiny"
    SMALL = "small"
    MEDIUM = "medium"
    WINDOWS = "windows"
    FOR_A_GPU = FOR_A_GPU


class Part(Enum):
    """A part of ``kvtier bench versus``."""

    SPEED = "speed"
    FAULTS = "faults"


class EngineError(KVTierError):
    """An engine refused an order, died or did not answer in time. The message contains the end of its log."""


def kv_groups(size: str) -> int:
    """Return the number of KV cache groups. All groups have the same number of layers."""
    layers = MODELS[size].get("layer_types", ["full_attention"])
    return len(layers) // layers.count("full_attention")


def block_bytes(size: str) -> int:
    """Return the number of bytes in one block of one KV cache group."""
    model = MODELS[size]
    heads = model["num_key_value_heads"] * model["head_dim"]
    width = 2 if size == FOR_A_GPU else 4
    return int(BLOCK_TOKENS * 2 * model["num_hidden_layers"] // kv_groups(size) * heads * width)


def make_prompt(seed: int | str, tokens: int, shared: Sequence[int] = ()) -> list[int]:
    """Make token ids that begin with ``shared``. Prompts with different seeds share only this prefix."""
    generator = random.Random(seed)
    return [*shared, *(generator.randrange(2, VOCABULARY) for _ in range(tokens - len(shared)))]


def over_files(primary_bytes: int, folder: Path) -> Settings:
    """Return settings of kvtier's connector, with files below ``folder`` and one block per chunk."""
    return {
        "spec_name": "KVTierOffloadingSpec",
        "cpu_bytes_to_use": primary_bytes,
        "block_size": BLOCK_TOKENS,
        "secondary_tiers": [files_below(folder)],
    }


@dataclass(frozen=True)
class Sample:
    """The results of one engine in one round.

    Attributes:
        wall_s: seconds until the last token.
        ttft_s: seconds until the first token of each request.
        answers: token ids of each request.
        counts: chunks by outcome.
    """

    wall_s: float
    ttft_s: Sequence[float] = ()
    answers: Sequence[Sequence[int]] = ()
    counts: Mapping[str, float] = field(default_factory=dict)


def measure(
    engines: Mapping[str, Engine], rounds: range, ask: Callable[[str, Engine, int], Sample]
) -> dict[str, list[Sample]]:
    """Query each engine once per round, in an order that changes. Rounds below 0 are warm-up."""
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    order, generator = list(engines), random.Random(0)
    for number in rounds:
        generator.shuffle(order)
        for name in order:
            sample = ask(name, engines[name], number)
            say(f"round {number}: {name}: {sample.wall_s:.2f} s")
            if number >= 0:
                samples[name].append(sample)
    return samples


def spread_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the central 95 % of the medians of resampled values (bootstrap)."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = RESAMPLES // 40
    return medians[tail], medians[-1 - tail]


class EngineChannel:
    """Sends orders to an engine's process and receives the answers.

    ``kvtier_bench.engine.process`` lists the orders.

    Attributes:
        patience_s: seconds to wait for an answer if the order has no limit of its own.
    """

    patience_s = ANSWER_S

    def __init__(self, channel: socket.socket, log: Path) -> None:
        self._channel = channel
        self._lines = channel.makefile("rw", encoding="utf-8")
        self._log = log

    def ask(self, do: str, patience_s: float | None = None, **order: Any) -> dict[str, Any]:
        """Send an order and return the answer.

        Raises:
            EngineError: the order failed, or no answer came.
        """
        self.tell(do, **order)
        return self.hear(do, patience_s)

    def tell(self, do: str, **order: Any) -> None:
        """Send an order without waiting for the answer. Raises the same errors as ``ask``."""
        self._channel.settimeout(self.patience_s)
        try:
            self._lines.write(json.dumps({"do": do, **order}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise self.failed(f"{do}: {error!r}") from error

    def hear(self, do: str, patience_s: float | None = None) -> dict[str, Any]:
        """Return the answer to an order sent earlier. Raises the same errors as ``ask``."""
        limit_s = patience_s or self.patience_s
        self._channel.settimeout(limit_s)
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            self.write_stacks()
            raise self.failed(f"{do}: no answer within {limit_s:g} s") from error
        except OSError:  # The engine died before it read an order.
            line = ""
        if not line:
            raise self.failed(f"{do}: the engine died")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self.failed(f"{do}: {answer['error']}")
        return answer

    def hang_up(self) -> None:
        """Close the connection, which makes the process shut down unless it hangs."""
        with suppress(OSError):
            self._lines.close()
        self._channel.close()

    def failed(self, problem: str) -> EngineError:
        """Return an error that contains the problem and the end of the log."""
        return EngineError(f"{problem}\n{end_of(self._log)}")

    def write_stacks(self) -> None:
        """Make an unresponsive process log the stacks of its threads, if it can."""


class Engine(EngineChannel):
    """One engine in its own process. A context manager that ends the process.

    Args:
        name: name of the engine and its log.
        folder: folder for the log.
        python: the interpreter of its environment, which has kvtier-bench.
        variables: further environment variables.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        log = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"
        ours, theirs = socket.socketpair()
        with theirs, log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", SERVER],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **environment(), **(variables or {})},
                start_new_session=True,
            )
        super().__init__(ours, log)

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self.kill()


def end_of(log: Path) -> str:
    """Return the last lines of a log, enough to contain the stacks of all threads."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-END_LINES:])


@contextmanager
def open_engines(
    folder: Path,
    size: str,
    settings: Mapping[str, Settings | None],
    on_gpu: Mapping[str, Any] | None = None,
    python: str = sys.executable,
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[dict[str, Engine]]:
    """Start engines that differ only in their connectors, and stop them at the end.

    Args:
        folder: for the model and the engines' logs.
        size: a size in ``MODELS``.
        settings: settings of each engine's connector, by the engine's name; None for no connector.
        on_gpu: arguments that replace others if the engines run on a GPU.
        python, variables: see ``Engine``.
        arguments: arguments of all engines.
    """
    with ExitStack() as stack:
        model = make_model(folder, size)
        engines = {name: stack.enter_context(Engine(name, folder, python, variables)) for name in settings}
        for engine in engines.values():
            engine.tell("load")  # Imports take most of the start-up time, so they run in parallel.
        for name, engine in engines.items():
            say(f"starting an engine: {name}")
            engine.hear("load", START_S)
            started = engine_arguments(model, settings[name], arguments)
            engine.ask("start", START_S, arguments=started, on_gpu=dict(on_gpu or {}))
        yield engines
        for engine in engines.values():
            if engine.is_alive:
                engine.ask("stop")


def wait_until_verified(engine: Engine) -> None:
    """Wait until an engine's tier process has verified the previous engine's chunks."""
    while engine.ask("call", module=SERVER, function="unverified", arguments={})["chunks"]:
        time.sleep(_POLL_S)


def make_model(folder: Path, size: str, seed: int = 20261121) -> Path:
    """Return the directory of a model with a size from ``MODELS``; create it if it does not exist."""
    model = folder / f"model-{size}-{seed}"
    family, config = ("Gemma3", "Gemma3TextConfig") if size == "windows" else ("Llama", "LlamaConfig")
    if size == FOR_A_GPU:
        model.mkdir(exist_ok=True)
        fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **MODELS[size]}
        (model / "config.json").write_text(json.dumps(fields))
    elif not model.exists():
        with Engine("maker", folder) as maker:
            maker.ask(
                "make_model",
                directory=str(model),
                config=config,
                architecture=f"{family}ForCausalLM",
                fields=MODELS[size],
                seed=seed,
            )
    return model


def environment() -> dict[str, str]:
    """Return the environment of all engines. Thread settings are equal, and malloc keeps its memory."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        "HF_HUB_OFFLINE": "1",
        # Otherwise glibc returns large buffers to the system, and an engine causes up to 80,000 page faults
        # per second. They take up to a tenth of its time, depending on the addresses of earlier buffers.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        # With a connector, vLLM binds its threads differently. That alone would change times and tokens.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", cores),
        # Idle engines must leave the cores to the engine that is being measured.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


def say(text: str) -> None:
    """Print progress to stderr, because minutes pass between two lines of a report."""
    Console(stderr=True).print(f"[dim]{escape(text)}", highlight=False, soft_wrap=True)


def engine_arguments(model: Path, extra_config: Settings | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine.

    Args:
        extra_config: settings of the connector; None for an engine without one.
        more: further arguments of the engine. A ``kv_transfer_config`` is merged over the generated one.
    """
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": DTYPE,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "gpu_memory_utilization": 0.1,  # fraction of a GPU's memory, because several engines run at once
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
            **more.get("kv_transfer_config", {}),
        }
    return arguments
