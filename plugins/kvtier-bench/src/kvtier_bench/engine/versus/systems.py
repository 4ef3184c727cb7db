"""The compared systems, each run as its users run it: an engine and its additional processes."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier._memory._locked_file import KEPT
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    FOR_A_GPU,
    PLAIN,
    START_S,
    Engine,
    EngineError,
    Settings,
    block_bytes,
    end_of,
    engine_arguments,
)
from kvtier_bench.engine.server import free_port
from kvtier_bench.machine import family, processor_s

KVTIER, NATIVE, LMCACHE = "kvtier", "vLLM native", "LMCache"
SYSTEMS = (KVTIER, NATIVE, LMCACHE)

_SETTLE_S = 60.0
_STEADY_S = 0.5  # Everything is stored once no file has changed for this long.
_POLL_S = 0.05
SERVER_LOG = "lmcache-server.log"
KEEP_S, NO_MORE_S = 300.0, 0.1
AWAY_S = 15.0  # LMCache's engine notices the loss of its server within 10 s.
_SHARED_MEMORY = Path(f"/dev/shm/lmcache_l1_pool_kvtier-bench-{os.getpid()}")


@dataclass(frozen=True)
class Setting:
    """Settings of all systems.

    Attributes:
        chunk_tokens: tokens in each file, which is also the granularity of hits.
        host_mib: MiB of host memory.
        device_blocks: size of the engine's own cache, in blocks of 32 tokens.
    """

    model: str
    chunk_tokens: int
    host_mib: int = 256
    device_blocks: int = 640
    max_tokens: int = 1536
    at_once: int = 32

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token."""
        return block_bytes(self.model) // BLOCK_TOKENS

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that all engines get."""
        arguments: dict[str, Any] = {
            "num_gpu_blocks_override": self.device_blocks,
            "max_model_len": self.max_tokens,
            "max_num_seqs": self.at_once,
        }
        if self.model == FOR_A_GPU:
            arguments |= {"dtype": "bfloat16", "load_format": "dummy"}
            arguments |= {"gpu_memory_utilization": 0.3, "max_num_batched_tokens": 8192}
        return arguments


@dataclass(frozen=True)
class NotRun:
    """Not run"""

    system: str
    reason: str


class System:
    """One system: an engine with its cache. It can be stopped and restarted on the same files.

    Args:
        name: one of ``SYSTEMS``, or ``PLAIN`` for an engine without a cache.
        setting: the settings of all systems.
        files: directory of its files.
        logs: directory of its logs.
        python: the interpreter of its environment.

    Attributes:
        ranks: tensor-parallel size of the engines started from now on.
        is_canonical: whether kvtier's engines share chunks with engines of other sizes.
        keep_s: seconds for which kvtier's host memory outlives its engine; LMCache's memory belongs to its
            server.
    """

    def __init__(self, name: str, setting: Setting, files: Path, logs: Path, python: str) -> None:
        self.name = name
        self.files = files / re.sub(r"\W+", "-", name.lower())
        self.engine: Engine | None = None
        self.ranks = 1
        self.is_canonical = False
        self.keep_s = 0.0
        self.written = 0  # Bytes written by processes that have ended, excluding their starts.
        self._before = 0  # Bytes written during the start, in which PyTorch may have compiled kernels.
        self._setting = setting
        self._logs = logs
        self._python = python
        self._server: subprocess.Popen[bytes] | None = None
        self._ports = (0, 0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of KV cache per chunk."""
        return self._setting.chunk_tokens * self._setting.token_bytes

    def start(self, model: Path) -> float:
        """Start all processes; return the seconds that it took.

        Raises:
            EngineError: a process does not start.
        """
        self.files.mkdir(exist_ok=True)
        started = time.perf_counter()
        if self.name == LMCACHE and self._server is None:
            self._ports = free_port(), free_port()
            self.start_server()
        variables = {"LMCACHE_TRACK_USAGE": "false"}  # Telemetry would go to LMCache's makers.
        more = self._setting.arguments() | self._transfer()
        if self.ranks > 1:
            cores = sorted(os.sched_getaffinity(0))
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[: self.ranks]))
            more |= {"tensor_parallel_size": self.ranks, "distributed_executor_backend": "mp"}
        self.engine = Engine(self.name, self._logs, self._python, variables)
        arguments = engine_arguments(model, self._connector(), more)
        self.engine.ask("load", START_S)
        if self.name == LMCACHE:
            self.engine.ask("call", START_S, module=__name__, function="load_lmcache", arguments={})
        self.engine.ask("start", START_S, arguments=arguments)
        seconds = time.perf_counter() - started
        # the first request is slow
        self.engine.ask("generate", prompts=[[2] * 64], output_tokens=4, logprobs=0)
        self._before = self._written()
        return seconds

    def stop(self) -> None:
        """Shut all processes down; kill those that do not end."""
        self.written, self._before = self.bytes_written(), 0
        self.stop_engine()
        if self._server is not None:
            for number in (signal.SIGCONT, signal.SIGTERM):  # the process may have been stopped by a signal
                self._server.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(30.0)
            with suppress(ProcessLookupError):  # the process group is empty
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None
            _SHARED_MEMORY.unlink(missing_ok=True)

    def stop_engine(self) -> None:
        """Shut down only the engine; kill it if that fails."""
        if self.engine is not None:
            with suppress(EngineError):
                self.engine.ask("stop", 30.0)
            self.kill_engine()

    def kill_engine(self) -> None:
        """Kill the engine."""
        if self.engine is not None:
            self.engine.__exit__()
            self.engine = None

    def start_server(self) -> None:
        """Start LMCache's server and wait until it answers."""
        log = self._logs / SERVER_LOG
        port, http_port = map(str, self._ports)
        command = [
            *(str(Path(self._python).with_name("lmcache")), "server", "--port", port),
            *("--http-port", http_port, "--supported-transfer-mode", "auto"),
            *("--chunk-size", str(self._setting.chunk_tokens), "--eviction-policy", "LRU"),
            *("--l1-size-gb", str(self._setting.host_mib / 1024), "--no-l1-use-lazy"),
            *("--shm-name", _SHARED_MEMORY.name),  # Without this, chunks are sent through a socket.
            *("--l2-adapter", json.dumps({"type": "fs", "base_path": str(self.files)})),
        ]
        with log.open("ab") as output:
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._logs,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not _answers(int(http_port)):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"LMCache's server does not start\n{end_of(log)}")
            time.sleep(_POLL_S)

    def ask(self, prompts: Sequence[Sequence[int]], output_tokens: int, **order: Any) -> dict[str, Any]:
        """Generate answers. Raises the errors of ``compared.Engine.ask``."""
        assert self.engine is not None
        return self.engine.ask("generate", prompts=prompts, output_tokens=output_tokens, logprobs=0, **order)

    def await_stores(self) -> None:
        """Wait until all chunks are stored, including in files."""
        assert self.engine is not None
        self.engine.ask("settle")
        deadline, last, since = time.monotonic() + _SETTLE_S, self._state(), time.monotonic()
        while time.monotonic() - since < _STEADY_S and self.name != PLAIN:
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name}: files still change after {_SETTLE_S:g} s")
            time.sleep(_POLL_S)
            if (now := self._state()) != last:
                last, since = now, time.monotonic()

    def forget(self) -> None:
        """Clear the engine's own cache."""
        assert self.engine is not None
        self.engine.ask("call", module="kvtier_bench.engine.process", function="forget", arguments={})

    def chunks(self) -> dict[Path, int]:
        """Return the files that hold chunks, with their sizes. Files below a tenth of a chunk are ignored."""
        least = self.chunk_bytes // 10
        return {path: size for path, size, _ in self._state() if size > least}

    def cache_process(self) -> int | None:
        """Return the id of the cache's process, or None if the cache runs in the engine's process."""
        if self._server is not None:
            return self._server.pid
        if self.engine is None:
            return None
        found = [pid for pid in family(self.engine.pid) if "kvtier._isolation" in _command(pid)]
        return found[0] if found else None

    def kept_memory(self) -> Path | None:
        """Return the file of the host memory that outlives the running engine, or None if there is none."""
        if self.name == LMCACHE:
            return _SHARED_MEMORY
        assert self.engine is not None
        maps = Path("/proc", str(self.engine.pid), "maps").read_text()
        found = re.search(r"/dev/shm/kvtier_\S+", maps) if self.keep_s else None
        return Path(found[0] + KEPT) if found else None

    def restart_cache(self) -> None:
        """Restart a dead cache process, as a supervisor would. kvtier restarts its own process itself."""
        if self._server is not None:
            self._server.wait()
            _SHARED_MEMORY.unlink(missing_ok=True)
            time.sleep(AWAY_S)
            self.start_server()

    def bytes_written(self) -> int:
        """Return the bytes that all processes, including ended ones, have written since their starts."""
        return self.written + self._written() - self._before

    def cpu_s(self) -> float:
        """Processor time of the running processes, in seconds."""
        return sum(map(processor_s, self.processes()))

    def memory_mib(self) -> float:
        """Return the memory of all processes in MiB. Shared memory counts once."""
        return sum(_figure(pid, "smaps_rollup", "Pss:") for pid in self.processes()) / 1024

    def _written(self) -> int:
        return sum(_figure(pid, "io", "write_bytes:") for pid in self.processes())

    def processes(self) -> list[int]:
        """Return all processes."""
        roots = [self.engine.pid] if self.engine else []
        roots += [self._server.pid] if self._server else []
        return [pid for root in roots for pid in family(root)]

    def _state(self) -> list[tuple[Path, int, int]]:
        found = []
        for parent, _, names in os.walk(self.files):
            for name in names:
                with suppress(OSError):
                    status = (path := Path(parent, name)).stat()
                    found.append((path, status.st_size, status.st_mtime_ns))
        return found

    def _connector(self) -> Settings | None:
        """Return the settings of an ``OffloadingConnector``, or None if the system does not use one."""
        tier = {"type": "fs", "root_dir": str(self.files)}
        common = {
            "cpu_bytes_to_use": self._setting.host_mib * 2**20,
            "block_size": self._setting.chunk_tokens,
            "secondary_tiers": [tier],
        }
        if self.name == KVTIER:
            own = {"spec_name": "KVTierOffloadingSpec", "canonical_layout": self.is_canonical}
            return {**common, **own, "keep_host_memory_s": self.keep_s}
        if self.name == NATIVE:
            module = "kvtier_bench.managers.vllm_tiering"
            return {**common, "spec_name": "NativeTieringSpec", "spec_module_path": module}
        return None

    def _transfer(self) -> dict[str, Any]:
        if self.name != LMCACHE:
            return {}
        return {
            "kv_transfer_config": {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://localhost",
                    "lmcache.mp.port": self._ports[0],
                },
            }
        }


def load_lmcache(_: object) -> dict[str, Any]:
    """Import LMCache in the engine's process.

    It imports llvmlite, whose library object claims to have any attribute. vLLM 0.32 on the CPU reads
    ``__dict__`` of everything that was imported, and would fail on the value that llvmlite returns.
    """
    importlib.import_module("lmcache.integration.vllm.lmcache_mp_connector")
    library: Any = importlib.import_module("llvmlite.binding.ffi")._lib_wrapper
    made_up = library.__getattr__

    def __getattr__(self: object, name: str) -> object:
        if name == "__dict__":
            raise AttributeError(name)
        return made_up(self, name)

    library.__getattr__ = __getattr__
    return {}


def transfers_of(logs: Path) -> str:
    """Return how LMCache moves chunks between its processes, according to the logs of both."""
    texts = [
        path.read_text(errors="replace")
        for path in (logs / SERVER_LOG, logs / "lmcache.log")
        if path.exists()
    ]
    named = re.findall(r"Using .+ transfer strategy|Creating EngineDrivenContext\w+", "\n".join(texts))
    return ", ".join(dict.fromkeys(named)) or "no transfer strategy in its log"


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_text()
    return ""


def _figure(pid: int, file: str, name: str) -> int:
    """Return the figure that follows a name in a file of /proc, or 0 if the process has ended."""
    with suppress(OSError):
        for line in Path("/proc", str(pid), file).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0
