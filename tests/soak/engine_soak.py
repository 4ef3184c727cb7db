"""A real engine whose tiers are all too small, and whose tier processes die.

A round takes a few seconds: batches of prompts that share beginnings, are new, or repeat earlier ones. Some
requests are aborted, and caches are reset. In mid-round the soak kills or stops the Redis server or the tier
process, and brings it back. A second engine without kvtier computes every prompt, and all tokens are
compared. After each round the fault ends, transfers end, and all figures are sampled.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.harness import TRAFFIC, Engine, Metrics, batches, redis_servers
from tests.soak.figures import (
    FEWEST_SAMPLES,
    Bound,
    ProcessStats,
    Sample,
    on_disk,
    shared_memory,
    zombies_of,
)

MIB = 1 << 20
CHUNK_BYTES = 128 * 1024
SLOTS = 40
REDIS_BYTES = 5 * MIB
FILES_BYTES = 10 * MIB
MOST_PATHS = 600
TIERS = ("redis", "files")
DEADLINE_S = 1.0
ROUND_S = 3.0
DRAIN_S = 90.0
OUTPUT_TOKENS = 4
SOCKET = "redis.sock"
IN_ENGINE = "tests.soak.in_engine"
_SIGNALS = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
_ASKED = "vllm:kv_offload_tiering_chunk_queries"

ENGINE: Mapping[str, Any] = {
    "num_gpu_blocks_override": 100,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
}

BOUNDS: Mapping[str, Bound] = {
    "engine: memory, MiB": Bound(16, "requests", 1 / 1024),
    "engine: python blocks": Bound(100_000, "requests", 1),
    "engine: objects of kvtier": Bound(40, "requests", 0.02),
    "engine: descriptors, not of roots": Bound(2, "kills", 0.25),
    "engine: descriptors, of roots": Bound(60, "kills", 0.25),
    "engine: threads": Bound(4, "kills", 0.25),
    "engine: tasks": Bound(2, "kills", 0.25),
    "engine: dead children": Bound(0, "kills", most=0),
    "core: requests": Bound(0, "requests", most=1),
    "core: transfers": Bound(0, "requests", most=0),
    "core: handles": Bound(0, "requests", most=0),
    "tiers' process: memory, MiB": Bound(8, "kills", 0.05),
    "tiers' process: descriptors": Bound(60, "kills", 0.25),
    "tiers' process: threads": Bound(4, "kills", 0.25),
    "processes": Bound(0, "kills"),
    "shared memory: files": Bound(0, "kills"),
    "disk, files: MiB": Bound(FILES_BYTES / MIB, "requests", most=FILES_BYTES / MIB),
    "disk: files and folders": Bound(MOST_PATHS, "requests", most=MOST_PATHS),
}
"""The growth that each figure may have; see ``figures``.

- If every kill leaks a descriptor, thread or task, the figure grows by the number of kills between the
  middles of the thirds. Allowed are 2 or 4, and a quarter of the kills. The constants cover pools:
  connections to Redis and worker threads are made on demand.
- Memory may grow by 16 MiB, and by 1 KiB per request. Without a leak it grows by one or two MiB, and by five
  in a run too short to fill all pools in its first third. An hour has some twenty thousand requests, so a
  leak of 4 KiB per request is found. Python's allocator counts blocks of at most 512 bytes. They vary by tens
  of thousands while roots are counted: a leak of twenty blocks per request is found.
- At rest the core has nothing in flight, except the last request: vLLM reports its end with the next one.
- No process and no file in shared memory is left. A root never exceeds its limit. Eighty chunk files have two
  folders each, and twice as many during the sweep after a reset.
"""


class SoakError(Exception):
    """A failure other than a leak: a wrong token, a failed request, no work done."""


def redis_server(folder: Path) -> Any:
    """Return a Redis server that evicts all the time, not yet started. It is empty after each start."""
    limits = f"--maxmemory {REDIS_BYTES} --maxmemory-policy allkeys-lru"
    return redis_servers().Server(folder / "redis", f"--unixsocket {folder / SOCKET} {limits}")


def settings(folder: Path, isolation: str) -> dict[str, Any]:
    """Return kvtier's settings: a primary tier of 40 chunks, and two tiers that are also too small."""
    quick = {"deadline_s": DEADLINE_S, "breaker_pause_s": 0.1}
    redis = {"type": "redis", "addresses": [str(folder / SOCKET)], **quick}
    small = {"min_free_bytes": 0, "max_bytes": FILES_BYTES, "recount_s": 20, "n_threads": 4, **quick}
    return {
        "cpu_bytes_to_use": SLOTS * CHUNK_BYTES,
        "request_deadline_s": DEADLINE_S,
        "secondary_tiers": [
            redis,
            {"type": "fs", "name": "files", "root_dir": str(folder / "files"), **small},
        ],
        "isolation": isolation,
    }


# The faults: name, start and end.
Fault = tuple[str, Callable[[], object], Callable[[], object]]


class EngineSoak:
    """Two engines and a server, and their faults.

    Args:
        engine: the engine with kvtier.
        reference: an engine without kvtier and without a prefix cache.
        server: the Redis server.
        folder: the folder of the roots.
        earlier: the files in shared memory before the engine started.
        isolation: the setting of that name.
        seed: the seed of all choices.

    Attributes:
        seen: the number of each event.
        samples: the samples of all figures, in order.
    """

    def __init__(
        self,
        engine: Engine,
        reference: Engine,
        server: Any,
        folder: Path,
        earlier: set[Path],
        isolation: str,
        seed: int,
    ) -> None:
        self.seen: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._engine = engine
        self._reference = reference
        self._server = server
        self._folder = folder
        self._earlier = earlier
        self._isolation = isolation
        self._chance = random.Random(seed)
        self._batches = batches(self._chance)
        self._began_s = time.monotonic()

    def run(self, seconds: float) -> None:
        """Run for this long.

        Raises:
            SoakError: see its docstring.
            EngineError: an engine has failed.
        """
        while time.monotonic() < self._began_s + seconds or len(self.samples) < FEWEST_SAMPLES:
            number = len(self.samples)
            self._reset(connector=number % 3 == 2)
            faults = self._faults()
            what, begin, end = faults[number % len(faults)]
            ends_s = time.monotonic() + ROUND_S
            self._batch()
            self._batch(begin)
            while time.monotonic() < ends_s:
                self._batch()
            end()
            self.seen[what] += 1
            self.seen["kills"] += "killed" in what
            self._drain()
            self._sample()
        self._require_work()

    def _require_work(self) -> None:
        """Check that every part was busy: a soak with an idle part proves nothing."""
        metrics = self._engine.metrics()
        self.seen["evicted from the primary tier"] = int(metrics.value("kvtier_evicted_chunks"))
        self.seen["evicted by redis"] += self._evicted_by_redis()
        for tier in TIERS:
            self.seen[f"put into {tier}"] = int(metrics.value("kvtier_put_chunks", tier=tier))
            self.seen[f"asked of {tier}"] = int(metrics.value(_ASKED, tier=tier))
        # Each kill empties the server, so it has few chunks to return.
        self.seen["loaded from files"] = int(metrics.value("kvtier_loaded_chunks", tier="files"))
        wanted = [*self.seen, "requests that were aborted", "resets of all tiers", "kills"]
        if idle := sorted({what for what in wanted if not self.seen[what]}):
            raise SoakError(f"nothing has happened of: {', '.join(idle)}; {dict(self.seen)}")

    # --- requests --------------------------------------------------------------------------------

    def _batch(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        prompts = next(self._batches)
        aborts = {
            str(place): self._chance.randrange(1, 6)
            for place in range(len(prompts))
            if self._chance.random() < 0.2
        }
        order = {"prompts": prompts, "output_tokens": OUTPUT_TOKENS, "aborts": aborts}
        self._engine.tell("call", module=TRAFFIC, function="requests", arguments=order)
        self._reference.tell("generate", prompts=prompts, output_tokens=OUTPUT_TOKENS, together=True)
        time.sleep(self._chance.random() * 0.1)
        meanwhile()
        done = self._engine.hear("requests")
        expected = self._reference.hear("generate")["answers"]
        for place, right in enumerate(expected):
            said, has_ended = done["answers"][place], done["ends"][place] == "length"
            if not has_ended and str(place) not in aborts:
                raise SoakError(f"a request did not end, and was not aborted: {said} to {prompts[place]}")
            if said != right[: len(said)] or (has_ended and len(said) != OUTPUT_TOKENS):
                raise SoakError(f"wrong tokens: {said} instead of {right}, to {prompts[place]}")
            self.seen["requests that ended" if has_ended else "requests that were aborted"] += 1
        self.seen["batches"] += 1
        self.seen["requests"] += len(prompts)

    def _reset(self, connector: bool) -> None:
        done = self._engine.call("reset", connector=connector)["done"]
        self.seen["resets of all tiers" if connector else "resets of the device's cache"] += bool(done)

    # --- faults ----------------------------------------------------------------------------------

    def _faults(self) -> list[Fault]:
        server, stopped = self._server, ExitStack()
        faults: list[Fault] = [
            ("redis killed", self._kill_redis, server.start),
            ("redis stopped", lambda: stopped.enter_context(server.stopped()), stopped.close),
        ]
        for pid in self._tiers_processes():
            kill, stop, go_on = (partial(_send, pid, number) for number in _SIGNALS)
            faults.append(("tiers' process killed", kill, lambda: None))
            faults.append(("tiers' process stopped", stop, go_on))  # the engine kills it if that takes long
        return faults

    def _evicted_by_redis(self) -> int:
        with self._server.client() as client:
            return int(client.info("stats")["evicted_keys"])

    def _kill_redis(self) -> None:
        self.seen["evicted by redis"] += self._evicted_by_redis()
        self._server.kill()

    def _tiers_processes(self) -> list[int]:
        return [pid for pid in self._engine.processes if pid != self._engine.pid]

    # --- figures ---------------------------------------------------------------------------------

    def _call(self, function: str) -> Any:
        return self._engine.call(function, module=IN_ENGINE)

    def _drain(self) -> None:
        """Wait until every tier is up and nothing is in flight.

        Raises:
            EngineError, SoakError: the wait took too long.
        """
        deadline_s = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline_s:
            pids = self._tiers_processes()  # first: the metrics may not show a death yet
            self._engine.until(_is_drained, "all is idle, and every tier is up", DRAIN_S)
            under_way = self._call("transfers")["transfers"]
            is_complete = len(pids) == (self._isolation == "process") and pids == self._tiers_processes()
            if is_complete and not under_way:
                return
        raise SoakError(f"within {DRAIN_S:g} s transfers do not end, or the tiers' process is not there")

    def _sample(self) -> None:
        its = ProcessStats.of(self._engine.pid, self._folder)
        paths, disk_bytes = on_disk(self._folder / "files")
        figures: dict[str, float] = {
            "engine: memory, MiB": its.memory_bytes / MIB,
            "engine: descriptors, not of roots": its.other_files,
            "engine: descriptors, of roots": its.disk_files,
            "engine: threads": its.threads,
            "engine: dead children": zombies_of(self._engine.pid),
            **self._call("sample"),
            "processes": len(self._engine.processes),
            "shared memory: files": len(shared_memory() - self._earlier),
            "disk, files: MiB": disk_bytes / MIB,
            "disk: files and folders": paths,
        }
        for pid in self._tiers_processes():
            its = ProcessStats.of(pid, self._folder)
            figures["tiers' process: memory, MiB"] = its.memory_bytes / MIB
            figures["tiers' process: descriptors"] = its.disk_files + its.other_files
            figures["tiers' process: threads"] = its.threads
        events = {name: self.seen[name] for name in ("requests", "kills")}
        self.samples.append(Sample(time.monotonic() - self._began_s, events, figures))


def _is_drained(metrics: Metrics) -> bool:
    ups = [value for name, labels, value in metrics.samples if name == "kvtier_tier_up" and labels]
    return metrics.is_idle and all(ups)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
