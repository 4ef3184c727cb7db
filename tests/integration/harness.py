"""Engines for the tests, each in its own process behind a socket, with a deadline on each wait.

``Launcher`` starts the process that engines are forked from, ``Engine`` is one of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.keys import OffloadKey
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    EngineChannel,
    EngineError,
    end_of,
    engine_arguments,
    make_prompt,
)
from kvtier_tools.root.contents import ChunkFile, RootView
from tests.common import load_file, wait_while
from tests.integration.fork_server import STACKS

PROJECT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")

OUTPUT_TOKENS = 8
PROMPT_TOKENS = 520
PROMPT_CHUNKS = PROMPT_TOKENS // BLOCK_TOKENS

ANSWER_S = 120.0
IMPORT_S = 240.0
START_S = 180.0
UNTIL_S = 60.0
PATIENCE_S = 30.0
STACKS_S = 1.0
TRAFFIC, FAULTS = "tests.integration.traffic", "tests.integration.faults"
_CORES = sorted(os.sched_getaffinity(0))
TWO_WORKERS: Mapping[str, Any] = {
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": f"{_CORES[0]}|{_CORES[-1]}"},
    "distributed_executor_backend": "mp",
    "start_s": 300.0,  # both repeat all imports
}
TWO_RANKS: Mapping[str, Any] = {**TWO_WORKERS, "tensor_parallel_size": 2}

SIZES: Mapping[str, int] = {"num_gpu_blocks_override": 80, "max_model_len": 2048, "max_num_seqs": 16}

Tokens = list[int]
Config = Mapping[str, Any]


def vllm_release() -> tuple[int, int]:
    """Return major and minor of the first vLLM on the path, without importing it.

    Tests read versions only here; the callers state what a release lacks.
    """
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name("_version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = .*'(\d+)\.(\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1]), int(found[2])


def prompt(seed: int, tokens: int = PROMPT_TOKENS, shared: Sequence[int] = ()) -> Tokens:
    """Make the token ids of a prompt that begins with ``shared``; without it, different seeds share no
    prefix."""
    return make_prompt(seed, tokens, shared)


def batches(chance: random.Random) -> Iterator[list[Tokens]]:
    """Yield batches of up to six prompts forever: new prompts with shared prefixes of any length, repeated
    prompts, and prefixes of those. No prompt is longer than 900 tokens."""
    stems: list[Tokens] = []
    asked: deque[Tokens] = deque(maxlen=40)
    while True:
        batch = []
        for _ in range(chance.randrange(1, 7)):
            if asked and chance.random() < 0.4:
                again = chance.choice(asked)
                whole_blocks = BLOCK_TOKENS * chance.randrange(1, len(again) // BLOCK_TOKENS + 2)
                batch.append(again[: chance.choice([whole_blocks, len(again)])])
                continue
            if len(stems) < 5 or chance.random() < 0.05:
                stems = [*stems[-4:], prompt(chance.getrandbits(60), 600)]  # the oldest goes
            shared = chance.choice(stems)[: chance.randrange(600)]
            length = len(shared) + chance.randrange(1, 300)
            batch.append(prompt(chance.getrandbits(60), length, shared=shared))
        asked.extend(batch)
        yield batch


@dataclass(frozen=True)
class Metrics:
    """Samples of an engine's metrics.

    Attributes:
        samples: name, labels and value of each.
    """

    samples: Sequence[tuple[str, Mapping[str, str], float]]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a counter's or gauge's samples with these labels; 0 if there are none."""
        names = {name, f"{name}_total"}
        return sum(
            value
            for found, its_labels, value in self.samples
            if found in names and labels.items() <= its_labels.items()
        )

    def __str__(self) -> str:
        return "\n".join(f"{name}{dict(labels)} {value:g}" for name, labels, value in self.samples if value)

    def loaded(self) -> dict[str, int]:
        """Return how many chunks were loaded to the device, by the tier that they came from."""
        return {
            labels["tier"]: int(value)
            for name, labels, value in self.samples
            if name == "kvtier_loaded_chunks_total" and value
        }

    @property
    def is_idle(self) -> bool:
        """Whether each slot is free or holds a chunk: nothing is pinned or being filled."""
        return self.value("kvtier_slots") > 0 and self.value("vllm:kv_offload_cpu_cache_usage_perc") == 0.0

    @property
    def declared(self) -> set[str]:
        """The names of all metrics, including those without a sample."""
        return {name for name, labels, _ in self.samples if not labels}


class Launcher:
    """The process from which engines are forked. A context manager.

    Args:
        directory: directory for logs.
        environment: differences from this process's environment.
        python: the interpreter; another environment's for another version of the engine.

    Attributes:
        engines: all started engines, in order.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], python: str = sys.executable) -> None:
        self._directory = directory
        self._started = 0
        self.engines: list[Engine] = []
        ours, theirs = socket.socketpair()
        self._log = (directory / "fork_server.log").open("w")
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "tests.integration.fork_server"],
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=PROJECT,
                env={**os.environ, **environment},
            )
        self._channel = ours
        self._answers = ours.makefile("r")
        self._wait_until_ready()

    def start(
        self,
        model: Path,
        extra_config: Config | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        start_s: float = START_S,
        faulty_copies: bool = False,
        prepare: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Engine:
        """Start an engine.

        Args:
            extra_config: kvtier's settings; None for an engine without a connector.
            faulty_copies: make ``Engine.fail_copies`` possible.
            prepare: arguments of an ``Engine.call`` before it is started.
            arguments: further arguments of the engine; ``kv_transfer_config`` over the one made here.

        Raises:
            EngineError: it did not start.
        """
        engine = self.fork(environment)
        engine.has_kvtier = extra_config is not None
        try:
            if faulty_copies:
                engine.call("install", module=FAULTS, file=str(engine._log.with_suffix(".faults")))
            if prepare is not None:
                engine.call(**prepare)
            engine.ask("start", start_s, arguments=_arguments(model, extra_config, arguments))
        except BaseException:
            engine.kill()
            raise
        return engine

    def fork(self, environment: Mapping[str, str] | None = None) -> Engine:
        """Fork a child that runs no engine yet."""
        self._started += 1
        log = self._directory / f"engine-{self._started}.log"
        ours, theirs = socket.socketpair()
        with theirs, log.open("w") as file:
            request = json.dumps(dict(environment or {})).encode()
            socket.send_fds(self._channel, [request], [theirs.fileno(), file.fileno()])
        engine = Engine(int(self._answer()), ours, log)
        self.engines.append(engine)
        return engine

    def make_model(
        self, directory: Path, config: str, architecture: str, fields: Mapping[str, Any], seed: int = 1
    ) -> Path:
        """Make a random model with classes of transformers and return its directory."""
        with self.fork() as maker:
            maker.ask(
                "make_model",
                directory=str(directory),
                config=config,
                architecture=architecture,
                fields=dict(fields),
                seed=seed,
            )
        return directory

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        for engine in self.engines:
            engine.kill()
        self._answers.close()
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._log.close()

    def _wait_until_ready(self) -> None:
        self._channel.settimeout(IMPORT_S)
        if self._answer() != "ready":
            raise EngineError(f"the engine cannot be imported:\n{end_of(Path(self._log.name))}")

    def _answer(self) -> str:
        try:
            return self._answers.readline().strip()
        except OSError as error:
            raise EngineError(f"no answer from the launcher: {error!r}") from error


class Engine(EngineChannel):
    """One engine in its own process. A context manager that stops it.

    Its exit removes vLLM's leftovers in shared memory, but not kvtier's.

    Attributes:
        pid: its process, the leader of a session with all its processes.
        has_kvtier: whether it runs with kvtier.
        last: its latest metrics.
    """

    patience_s = ANSWER_S
    has_kvtier = False
    last = Metrics(())

    def __init__(self, pid: int, channel: socket.socket, log: Path) -> None:
        self.pid = pid
        self._pidfd: int | None = os.pidfd_open(pid)
        super().__init__(channel, log)

    def write_stacks(self) -> None:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, STACKS)
            time.sleep(STACKS_S)

    # --- asking ----------------------------------------------------------------------------------

    def call(self, function: str, *, module: str = TRAFFIC, **arguments: Any) -> dict[str, Any]:
        """Call a function of the tests in the engine's process; return its result."""
        return self.ask("call", module=module, function=function, arguments=arguments)

    def generate(
        self,
        *prompts: Sequence[int],
        output_tokens: int = OUTPUT_TOKENS,
        together: bool = False,
        salt: str | None = None,
        kv_transfer_params: Config | None = None,
    ) -> list[Tokens]:
        """Return the model's answer to each prompt; prompts are sent one by one or all at once."""
        answer = self.ask(
            "generate",
            prompts=prompts,
            output_tokens=output_tokens,
            together=together,
            salt=salt,
            kv_transfer_params=kv_transfer_params,
        )
        answers: list[Tokens] = answer["answers"]
        return answers

    def served(self, *prompts: Sequence[int], **how: Any) -> tuple[list[Tokens], dict[str, int]]:
        """Return the model's answers, and how many chunks were loaded for them, by tier. See ``generate``."""
        before = self.settled().loaded()
        answers = self.generate(*prompts, **how)
        after = self.settled().loaded()
        loaded = {tier: count - before.get(tier, 0) for tier, count in after.items()}
        return answers, {tier: count for tier, count in loaded.items() if count}

    def sleep(self, level: int = 1, weights: Path | None = None) -> None:
        """Sleep and wake up again, with other weights if some are given."""
        self.call("sleep", level=level, weights=None if weights is None else str(weights))

    def metrics(self) -> Metrics:
        """Return the current metrics."""
        self.last = Metrics([tuple(sample) for sample in self.ask("metrics")["samples"]])
        return self.last

    def step(self) -> None:
        """Run some steps that store nothing, so that the engine processes ended transfers."""
        self.generate([2, 3], output_tokens=4)

    def until(self, condition: Callable[[Metrics], bool], what: str, patience_s: float = UNTIL_S) -> Metrics:
        """Keep the engine stepping until its metrics fulfil a condition."""
        deadline = time.monotonic() + patience_s
        while True:
            self.step()
            metrics = self.metrics()
            if condition(metrics):
                return metrics
            if time.monotonic() > deadline:
                raise self.failed(f"not within {patience_s} s: {what}\n{metrics}")

    def settled(self) -> Metrics:
        """Keep the engine stepping until all stores and cascades have ended; at once without kvtier."""
        if not self.has_kvtier:
            return self.metrics()
        return self.until(lambda metrics: metrics.is_idle, "all stores and cascades have ended")

    def until_up(self, tier: str) -> None:
        """Keep the engine stepping until a tier is open."""
        self.until(lambda metrics: metrics.value("kvtier_tier_up", tier=tier) == 1, f"tier {tier} is up")

    def until_open(self, tier: str) -> None:
        """Keep the engine stepping until a tier is open and has reported its quota."""
        up, capacity = "kvtier_tier_up", "kvtier_tier_capacity_bytes"
        self.until(
            lambda metrics: metrics.value(up, tier=tier) == 1 and metrics.value(capacity, tier=tier) > 0,
            f"tier {tier} is open",
        )

    def reset(self, *, connector: bool = True) -> None:
        """Clear the device's prefix cache, and all tiers if ``connector`` is set."""
        assert self.call("reset", connector=connector)["done"]

    def fail_copies(self, **attempts: int) -> None:
        """Make the next copy attempts fail. See ``faults.Faults.set``."""
        self.call("fail", module=FAULTS, **attempts)

    # --- looking ---------------------------------------------------------------------------------

    def log(self) -> str:
        """Return the engine's log."""
        return self._log.read_text(errors="replace")

    @property
    def regions(self) -> set[Path]:
        """The primary-tier files that its processes have mapped."""
        return {path for path in self._shared_memory() if is_region(path)}

    @property
    def processes(self) -> list[int]:
        return _session(self.pid)

    @property
    def tiers_process(self) -> int | None:
        """Return the pid of the tier process; None if tiers run in the engine's own process."""
        found = [pid for pid in self.processes if b"kvtier._isolation.child" in _command_of(pid)]
        assert len(found) <= 1, found
        return found[0] if found else None

    def _shared_memory(self) -> set[Path]:
        return {path for pid in self.processes for path in shared_memory(pid)}

    # --- ending ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the engine in an orderly way and wait for the end of its process."""
        if self._pidfd is None:
            return
        leftovers = self._shared_memory()
        try:
            self.ask("stop")
            self.hang_up()
            self._wait_for_end(ANSWER_S)
        finally:
            self.kill()
            remove_leftovers(leftovers)

    def kill(self) -> None:
        """Kill every process of the engine with SIGKILL and wait for their end."""
        if self._pidfd is None:
            return
        leftovers = self._shared_memory()
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait_for_end(ANSWER_S)
        remove_leftovers(leftovers)
        os.close(self._pidfd)
        self._pidfd = None
        self.hang_up()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if error is None:
            self.stop()
        else:
            self.kill()

    def _wait_for_end(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        poll = select.poll()
        assert self._pidfd is not None
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(patience_s * 1000):
            raise self.failed(f"process {self.pid} has not ended within {patience_s} s")
        while _session(self.pid):
            if time.monotonic() > deadline:
                raise self.failed(f"processes {_session(self.pid)} have not ended within {patience_s} s")
            time.sleep(0.05)


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _session(leader: int) -> list[int]:
    """Return the processes of a session, zombies not counted."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(") ")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    found.append(int(folder.name))
    return found


def is_region(path: Path) -> bool:
    """Return whether a file in shared memory is a primary tier."""
    return path.name.startswith("kvtier_")


def shared_memory(pid: int) -> Iterator[Path]:
    """Yield the files in shared memory that a process has mapped, by their current names."""
    with suppress(OSError):
        names = {os.stat(path).st_ino: path for path in SHARED_MEMORY.iterdir()}
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = Path("/" + line.partition("/")[2])
            if path.parent == SHARED_MEMORY:
                yield names.get(int(line.split()[4]), path)


def remove_leftovers(files: Iterable[Path]) -> None:
    """Remove files in shared memory, except primary tiers."""
    for file in files:
        if not is_region(file):
            file.unlink(missing_ok=True)


def _arguments(model: Path, extra_config: Config | None, more: Mapping[str, Any]) -> dict[str, Any]:
    settings = None
    if extra_config is not None:
        settings = {"spec_name": "KVTierOffloadingSpec", **patient(extra_config)}
    return engine_arguments(model, settings, {**SIZES, **more})


def patient(extra_config: Config) -> dict[str, Any]:
    """Give tiers longer deadlines than in production: a busy test machine would miss them, and count misses.

    Audits are off: they would sometimes detect the chunks that a test corrupts on purpose. The file tier
    accepts puts however full the machine's disk is. A chunk is one block unless the test sets a size (None:
    the default), so that small prompts have many.
    """
    settings = {"request_deadline_s": PATIENCE_S, "audit_rate": 0, **extra_config}
    if "block_size" not in settings:
        settings.setdefault("blocks_per_chunk", 1)
    tiers = settings.get("secondary_tiers")
    if isinstance(tiers, list):
        settings["secondary_tiers"] = [_patient_tier(tier) for tier in tiers]
    return settings


def _patient_tier(tier: Any) -> Any:
    if not isinstance(tier, dict):
        return tier
    roomy = {"min_free_bytes": 0} if tier.get("type") == "fs" else {}
    return {"deadline_s": PATIENCE_S, **roomy, **tier}


def primary_tier(engine: Engine) -> tuple[int, int, Path]:
    """Return the primary tier's total slot bytes, the bytes of one slot, and its file."""
    metrics = engine.metrics()
    nbytes = int(metrics.value("kvtier_tier_capacity_bytes", tier="cpu"))
    (region,) = engine.regions
    return nbytes, nbytes // int(metrics.value("kvtier_slots")), region


def misplace_chunks(engine: Engine) -> None:
    """Shift the primary tier's contents by one slot.

    The control of tests that compare tokens: with the bytes of other chunks the tokens must differ, or the
    model's output does not depend on its cache.
    """
    nbytes, chunk_bytes, region = primary_tier(engine)
    with region.open("r+b") as file:
        held = file.read(nbytes)
        file.seek(0)
        file.write(held[-chunk_bytes:] + held[:-chunk_bytes])


def redis_servers() -> Any:
    """Return the module of the Redis tests that starts servers."""
    return load_file("kvtier_redis_tests_servers", PROJECT / "plugins/kvtier-redis/tests/redis_servers.py")


def chunk_files(root: Path) -> list[Path]:
    """Return the chunk files below the root of kvtier's or vLLM's own file tier."""
    return sorted(path for path in root.glob("*_r0*/*/*/*.bin"))


def chunks_in(root: Path) -> set[OffloadKey]:
    """Return the keys of the chunks below the root of a file tier."""
    found = set()
    with RootView(root) as opened:
        for data_dir in (path.name for path in root.glob("*_r0*")):
            for one in opened.chunks(data_dir):
                if isinstance(one, ChunkFile):
                    found.add(one.key)
    return found


def wait_until_removed(files: Iterable[Path]) -> None:
    """Wait until other processes have removed the files; a guard removes an engine's memory, for example."""
    wait_while(lambda: [file for file in files if file.exists()])


def namespaces(root: Path) -> list[str]:
    """Return the names of the caches below a root."""
    return sorted(path.parent.name for path in root.glob("*/config.json"))
