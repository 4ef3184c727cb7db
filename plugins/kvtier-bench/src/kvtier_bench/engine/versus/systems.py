"""The compared systems, each as its users run it: an engine, and its further processes."""

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
_STEADY_S = 0.5  # no file has changed for so long: everything is stored
_POLL_S = 0.05
SERVER_LOG = "lmcache-server.log"
KEEP_S, NO_MORE_S = 300.0, 0.1
AWAY_S = 15.0  # LMCache's engine notices within 10 s that its server is gone
_SHARED_MEMORY = Path(f"/dev/shm/lmcache_l1_pool_kvtier-bench-{os.getpid()}")


@dataclass(frozen=True)
class Setting:
    """Settings of all systems.

    Attributes:
        chunk_tokens: of each file, and the granularity of hits.
        host_mib: of host memory.
        device_blocks: of the engine's own cache, blocks of 32 tokens.
    """

    model: str
    chunk_tokens: int
    host_mib: int = 256
    device_blocks: int = 640
    max_tokens: int = 1536
    at_once: int = 32

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache of a token."""
        return block_bytes(self.model) // BLOCK_TOKENS

    def arguments(self) -> dict[str, Any]:
        """Return arguments that all engines get."""
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
    """One system: an engine with its cache, which can be stopped and started again on the same files.

    Args:
        name: one of ``SYSTEMS``, or ``PLAIN`` for an engine without a cache.
        setting: the settings of all systems.
        files: directory of its files.
        logs: directory of its logs.
        python: the interpreter of its environment.

    Attributes:
        ranks: tensor-parallel size of the engines started from now on.
        is_canonical: whether kvtier's engines share chunks with engines of other sizes.
        keep_s: how long host memory of kvtier's engines stays when they end; LMCache's is its server's.
    """

    def __init__(self, name: str, setting: Setting, files: Path, logs: Path, python: str) -> None:
        self.name = name
        self.files = files / re.sub(r"\W+", "-", name.lower())
        self.engine: Engine | None = None
        self.ranks = 1
        self.is_canonical = False
        self.keep_s = 0.0
        self.written = 0  # bytes, by processes that have ended, without those of their starts
        self._before = 0  # bytes that the start has written: PyTorch may have compiled kernels
        self._setting = setting
        self._logs = logs
        self._python = python
        self._server: subprocess.Popen[bytes] | None = None
        self._ports = (0, 0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of KV cache of a chunk."""
        return self._setting.chunk_tokens * self._setting.token_bytes

    def start(self, model: Path) -> float:
        """Start everything; return the seconds that it took.

        Raises:
            EngineError: it does not start.
        """
        self.files.mkdir(exist_ok=True)
        started = time.perf_counter()
        if self.name == LMCACHE and self._server is None:
            self._ports = free_port(), free_port()
            self.start_server()
        variables = {"LMCACHE_TRACK_USAGE": "false"}  # which would go to LMCache's makers
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
        self.engine.ask("generate", prompts=[[2] * 64], output_tokens=4, logprobs=0)  # the first is slow
        self._before = self._written()
        return seconds

    def stop(self) -> None:
        """Stop everything in an orderly way, or by force where that fails."""
        self.written, self._before = self.bytes_written(), 0
        self.stop_engine()
        if self._server is not None:
            for number in (signal.SIGCONT, signal.SIGTERM):  # it may have been stopped
                self._server.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(30.0)
            with suppress(ProcessLookupError):  # the group is empty
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None
            _SHARED_MEMORY.unlink(missing_ok=True)

    def stop_engine(self) -> None:
        """Stop the engine alone in an orderly way, or by force where that fails."""
        if self.engine is not None:
            with suppress(EngineError):
                self.engine.ask("stop", 30.0)
            self.kill_engine()

    def kill_engine(self) -> None:
        """End the engine by force."""
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
            *("--shm-name", _SHARED_MEMORY.name),  # without one, chunks go through a socket
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
        """Generate. ``compared.Engine.ask`` says what can go wrong."""
        assert self.engine is not None
        return self.engine.ask("generate", prompts=prompts, output_tokens=output_tokens, logprobs=0, **order)

    def await_stores(self) -> None:
        """Wait until everything is stored, in files too."""
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
        """Have the engine's own cache forget everything."""
        assert self.engine is not None
        self.engine.ask("call", module="kvtier_bench.engine.process", function="forget", arguments={})

    def chunks(self) -> dict[Path, int]:
        """Return the files that hold chunks, and their sizes: none is smaller than a tenth of a chunk."""
        least = self.chunk_bytes // 10
        return {path: size for path, size, _ in self._state() if size > least}

    def cache_process(self) -> int | None:
        """Return the process that the cache runs in; None if that is the engine's."""
        if self._server is not None:
            return self._server.pid
        if self.engine is None:
            return None
        found = [pid for pid in family(self.engine.pid) if "kvtier._isolation" in _command(pid)]
        return found[0] if found else None

    def kept_memory(self) -> Path | None:
        """Return the file of the host memory that outlives the engine, which runs; None if there is none."""
        if self.name == LMCACHE:
            return _SHARED_MEMORY
        assert self.engine is not None
        maps = Path("/proc", str(self.engine.pid), "maps").read_text()
        found = re.search(r"/dev/shm/kvtier_\S+", maps) if self.keep_s else None
        return Path(found[0] + KEPT) if found else None

    def restart_cache(self) -> None:
        """Do what a supervisor would when the cache's process has died: kvtier restarts its own itself."""
        if self._server is not None:
            self._server.wait()
            _SHARED_MEMORY.unlink(missing_ok=True)
            time.sleep(AWAY_S)
            self.start_server()

    def bytes_written(self) -> int:
        """Return the bytes that all processes have written after their starts, those that have ended too."""
        return self.written + self._written() - self._before

    def cpu_s(self) -> float:
        """Processor time that the processes that run now have taken, in seconds."""
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
        """Return the settings of an ``OffloadingConnector``; None for no connector, or another one."""
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

    It brings llvmlite, whose library claims to have any attribute. vLLM 0.32 on the CPU asks everything that
    was imported for its ``__dict__``, and would end at what it is given.
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
    """Return how LMCache moves chunks between its processes, from the logs of both."""
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
    """Return the figure behind a name in a file of /proc; 0 of a process that has ended."""
    with suppress(OSError):
        for line in Path("/proc", str(pid), file).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0
