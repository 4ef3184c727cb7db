"""A real engine whose tiers are all too small, and whose tiers' processes die.

Rounds of a few seconds: batches of prompts that share beginnings, are new, or were asked before; some
requests are aborted; caches are reset; the Redis server and the tiers' process are killed or stopped in
the midst of it, and come back. A second engine without kvtier computes every prompt anew, and all tokens
are compared. After each round the faults end, transfers end, and all figures are sampled.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration.conftest import ENVIRONMENT, LLAMA
from tests.integration.harness import BLOCK_TOKENS, Engine, Launcher, Metrics, Tokens, prompt
from tests.soak.figures import FEWEST_SAMPLES, Bound, ProcessStats, Sample, on_disk, shared_memory, zombies_of
from tests.soak.server import RedisServer

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
STEMS = 6
STEM_TOKENS = 400
KEPT_PROMPTS = 40
LONGEST_TAIL = 240
IN_ENGINE = "tests.soak.in_engine"
_ASKED = "vllm:kv_offload_tiering_chunk_queries"

ENGINE: Mapping[str, Any] = {
    "num_gpu_blocks_override": 100,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
}

# oneDNN and torch keep what they have made for each number of tokens, up to a thousand of them, which grows
# a CPU engine by some hundred MiB with kvtier and without.
FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}

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
"""How much may grow; see ``trend``.

- A descriptor, thread or task leaked by every kill grows its figure by the kills between the middles of
  the thirds; 2, or 4, and a quarter of them are let pass. The constants are what pools do: connections to
  Redis and worker threads are made as they are needed.
- Memory may grow by 16 MiB, and by 1 KiB a request. Without a leak it does so by one or two, but by five in
  a run that is too short to have filled all pools in its first third. An hour has some twenty thousand
  requests, so 4 KiB that each leaves behind are found. Python's allocator counts blocks (of 512 bytes at
  most), which swing by tens of thousands while roots are counted: twenty that each request leaves are found.
- What the core has under way is nothing at rest, but for the last request, whose end vLLM tells with the
  next.
- No process is left, no file in shared memory; a root never holds more than it may. Eighty chunk files have
  two folders each: twice as many as that are there while a reset is swept.
"""


class SoakError(Exception):
    """Something is wrong that is no leak: a wrong token, a request that failed, no work done."""


@dataclass(frozen=True)
class Setup:
    """What engines are started from, and one without kvtier and without a prefix cache to compare with."""

    launcher: Launcher
    model: Path
    reference: Engine

    @staticmethod
    @contextmanager
    def opened(folder: Path) -> Iterator[Setup]:
        """Import the engine, make a model, start the engine to compare with; all in ``folder``."""
        with Launcher(folder, {**ENVIRONMENT, **FEW_SHAPES}) as launcher:
            model = launcher.make_model(folder / "model", "LlamaConfig", "LlamaForCausalLM", LLAMA)
            with launcher.start(model, enable_prefix_caching=False, **ENGINE) as reference:
                yield Setup(launcher, model, reference)


@contextmanager
def opened(setup: Setup, folder: Path, seed: int, isolation: str) -> Iterator[EngineSoak]:
    """Start an engine and a server, and stop them at the end.

    Args:
        setup: where the engine comes from.
        folder: for the roots and the server.
        seed: of all choices.
        isolation: where the tiers run.
    """
    with ExitStack() as stack:
        server = RedisServer(folder / "redis", REDIS_BYTES)
        server.start()
        stack.callback(server.kill)
        earlier = shared_memory()
        settings = _settings(folder, server, isolation)
        engine = setup.launcher.start(setup.model, settings, prepare=(IN_ENGINE, "hurry"), **ENGINE)
        stack.enter_context(engine)
        yield EngineSoak(engine, setup.reference, server, folder, earlier, isolation, seed)


def _settings(folder: Path, server: RedisServer, isolation: str) -> dict[str, Any]:
    """Return kvtier's settings: a primary tier of 40 chunks, and two more of which none holds it all."""
    quick = {"deadline_s": DEADLINE_S, "breaker_pause_s": 0.1}
    redis = {"type": "redis", "addresses": [str(server.path)], **quick}
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


class Prompts:
    """Prompts that share beginnings: new ones, and such as were asked before.

    Args:
        chance: where they come from.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._stems: list[Tokens] = []
        self._asked: deque[Tokens] = deque(maxlen=KEPT_PROMPTS)

    def batch(self) -> list[Tokens]:
        """Make one to six prompts."""
        made = [self._one() for _ in range(self._chance.randrange(1, 7))]
        self._asked.extend(made)
        return made

    def _one(self) -> Tokens:
        if self._asked and self._chance.random() < 0.4:
            again = self._chance.choice(self._asked)
            blocks = BLOCK_TOKENS * self._chance.randrange(1, len(again) // BLOCK_TOKENS + 2)
            return again[: self._chance.choice([blocks, len(again)])]
        if len(self._stems) < STEMS or self._chance.random() < 0.05:
            self._stems = [*self._stems[1 - STEMS :], self._new(STEM_TOKENS)]  # the oldest goes
        shared = self._chance.choice(self._stems)[: self._chance.randrange(STEM_TOKENS)]
        return self._new(len(shared) + self._chance.randrange(1, LONGEST_TAIL), shared)

    def _new(self, length: int, shared: Sequence[int] = ()) -> Tokens:
        return prompt(self._chance.getrandbits(60), length, shared=shared)


@dataclass(frozen=True)
class Fault:
    """Something that can be taken away and comes back.

    Attributes:
        name: in tallies.
        begin: takes it away.
        end: brings it back.
        is_kill: whether something dies of it.
    """

    name: str
    begin: Callable[[], object]
    end: Callable[[], object] = lambda: None
    is_kill: bool = True


@dataclass
class EngineSoak:
    """Two engines and a server, and what is done to them.

    Args:
        engine: with kvtier.
        reference: without it, and without a prefix cache.
        server: the Redis server.
        folder: the roots.
        earlier: the files in shared memory that were there before the engine.
        isolation: where the tiers run.
        seed: of all choices.

    Attributes:
        seen: what has happened how often.
        samples: of all figures, in order.
        work: what the tiers had done at each sample.
    """

    engine: Engine
    reference: Engine
    server: RedisServer
    folder: Path
    earlier: set[Path]
    isolation: str
    seed: int
    seen: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    work: list[Counter[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._prompts = Prompts(self._chance)
        self._began_s = time.monotonic()
        self._fault: Fault | None = None
        self._fault_begins = self._fault_ends = 0
        self._faults_begun = 0

    def run(self, seconds: float) -> None:
        """Run for so long.

        Raises:
            SoakError: see there.
            EngineError: an engine has failed.
        """
        until_s = self._began_s + seconds
        while time.monotonic() < until_s or len(self.samples) < FEWEST_SAMPLES:
            self._reset(connector=len(self.samples) % 3 == 2)
            ends_s = time.monotonic() + ROUND_S
            self._fault_begins = self.seen["batches"] + self._chance.randrange(3)
            while time.monotonic() < ends_s or self.seen["batches"] <= self._fault_begins:
                self._batch()
            self._drain()
            self._sample()

    def require_work(self) -> None:
        """Check that everything was as busy as it was meant to be, in what is judged.

        Raises:
            SoakError: the soak has shown nothing, because something did nothing.
        """
        done = Counter(self.work[-1])
        done.subtract(self.work[len(self.work) // 3])
        if idle := [what for what, count in sorted(done.items()) if count <= 0]:
            raise SoakError(f"nothing has happened of: {', '.join(idle)}; {dict(done)}")

    # --- requests --------------------------------------------------------------------------------

    def _batch(self) -> None:
        prompts = self._prompts.batch()
        aborts = {
            str(place): self._chance.randrange(1, 6)
            for place in range(len(prompts))
            if self._chance.random() < 0.2
        }
        order = {"prompts": prompts, "output_tokens": OUTPUT_TOKENS, "aborts": aborts}
        name = f"batch-{self.seen['batches']}"
        self.engine.tell("call", module=IN_ENGINE, function="batch", arguments={"name": name, **order})
        self.reference.tell("generate", prompts=prompts, output_tokens=OUTPUT_TOKENS, together=True)
        self._meddle()
        done = self.engine.hear("batch")
        expected = self.reference.hear("generate")["answers"]
        for place, right in enumerate(expected):
            self._compare(
                prompts[place], done["answers"][place], done["ended"][place], right, str(place) in aborts
            )
        self.seen["batches"] += 1
        self.seen["requests"] += len(prompts)

    def _compare(self, asked: Tokens, said: Tokens, has_ended: bool, right: Tokens, may_abort: bool) -> None:
        if not has_ended and not may_abort:
            raise SoakError(f"a request did not end, and was not aborted: it said {said} to {asked}")
        if said != right[: len(said)] or (has_ended and len(said) != OUTPUT_TOKENS):
            raise SoakError(f"wrong tokens: {said} instead of {right}, to {asked}")
        self.seen["requests that ended" if has_ended else "requests that were aborted"] += 1

    def _reset(self, connector: bool) -> None:
        done = self.engine.ask("reset", connector=connector)["done"]
        self.seen["resets of all tiers" if connector else "resets of the device's cache"] += bool(done)

    # --- faults ----------------------------------------------------------------------------------

    def _meddle(self) -> None:
        """Begin or end a fault while a batch is under way; one in each round at least."""
        if self._fault is not None:
            if self.seen["batches"] >= self._fault_ends:
                self._end_fault()
        elif self.seen["batches"] == self._fault_begins or self._chance.random() < 0.1:
            time.sleep(self._chance.random() * 0.1)
            self._begin_fault()

    def _begin_fault(self) -> None:
        """Begin one of the faults; each has its turn."""
        possible = self._faults()
        fault = possible[self._faults_begun % len(possible)]
        self._faults_begun += 1
        self._fault, self._fault_ends = fault, self.seen["batches"] + self._chance.randrange(1, 4)
        fault.begin()
        self.seen[fault.name] += 1
        self.seen["kills"] += fault.is_kill

    def _end_fault(self) -> None:
        if self._fault is not None:
            self._fault.end()
            self._fault = None

    def _faults(self) -> list[Fault]:
        server = self.server
        faults = [
            Fault("redis killed", self._kill_redis, server.start),
            Fault(
                "redis stopped",
                partial(server.send, signal.SIGSTOP),
                partial(server.send, signal.SIGCONT),
                is_kill=False,
            ),
        ]
        for pid in self._tiers_processes():
            faults += [
                Fault("tiers' process killed", partial(_send, pid, signal.SIGKILL)),
                Fault(  # the engine ends it if that takes long
                    "tiers' process stopped",
                    partial(_send, pid, signal.SIGSTOP),
                    partial(_send, pid, signal.SIGCONT),
                ),
            ]
        return faults

    def _kill_redis(self) -> None:
        self.seen["evicted by redis"] += self.server.evicted()
        self.server.kill()

    def _tiers_processes(self) -> list[int]:
        return [pid for pid in self.engine.processes if pid != self.engine.pid]

    # --- figures ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Wait until every tier is up and nothing is under way.

        Raises:
            EngineError, SoakError: that takes too long.
        """
        self._end_fault()
        deadline_s = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline_s:
            pids = self._tiers_processes()  # first: what has just died is not told by the metrics yet
            self.engine.until(_is_drained, "all is idle, and every tier is up", DRAIN_S)
            under_way = self.engine.ask("call", module=IN_ENGINE, function="transfers", arguments={})
            is_complete = len(pids) == (self.isolation == "process") and pids == self._tiers_processes()
            if is_complete and not under_way["transfers"]:
                return
        raise SoakError(f"within {DRAIN_S:g} s transfers do not end, or the tiers' process is not there")

    def _sample(self) -> None:
        pids = [self.engine.pid, *self._tiers_processes()]
        core = self.engine.ask("call", module=IN_ENGINE, function="sample", arguments={})
        shared = shared_memory() - self.earlier
        paths, disk_bytes = on_disk(self.folder / "files")
        figures = {
            **self._figures_of_engine(core),
            **self._figures_of_tiers(pids[1:]),
            "processes": len(pids),
            "shared memory: files": len(shared),
            "disk, files: MiB": disk_bytes / MIB,
            "disk: files and folders": paths,
        }
        events = {name: self.seen[name] for name in ("requests", "kills")}
        self.samples.append(Sample(time.monotonic() - self._began_s, events, figures))
        self.work.append(self._work())

    def _figures_of_engine(self, core: Mapping[str, float]) -> dict[str, float]:
        its = ProcessStats.of(self.engine.pid, self.folder)
        plain = ProcessStats.of(self.reference.pid, self.folder)
        return {
            "engine: memory, MiB": its.memory_bytes / MIB,
            "engine without kvtier: memory, MiB": plain.memory_bytes / MIB,
            "engine: descriptors, not of roots": its.other_files,
            "engine: descriptors, of roots": its.disk_files,
            "engine: threads": its.threads,
            "engine: dead children": zombies_of(self.engine.pid),
            **core,
        }

    def _figures_of_tiers(self, pids: Sequence[int]) -> dict[str, float]:
        if not pids:
            return {}
        stats = [ProcessStats.of(pid, self.folder) for pid in pids]
        return {
            "tiers' process: memory, MiB": sum(its.memory_bytes for its in stats) / MIB,
            "tiers' process: descriptors": sum(its.disk_files + its.other_files for its in stats),
            "tiers' process: threads": sum(its.threads for its in stats),
        }

    def _work(self) -> Counter[str]:
        metrics = self.engine.metrics()
        work = Counter({"evicted from the primary tier": int(metrics.value("kvtier_evicted_chunks"))})
        for tier in TIERS:
            work[f"put into {tier}"] = int(metrics.value("kvtier_put_chunks", tier=tier))
            work[f"asked of {tier}"] = int(metrics.value(_ASKED, tier=tier))
        for tier in TIERS[1:]:  # the server is emptied by each kill: it does not have much to give
            work[f"loaded from {tier}"] = int(metrics.value("kvtier_loaded_chunks", tier=tier))
        work["evicted by redis"] = self.seen["evicted by redis"] + self.server.evicted()
        for what in ("requests that were aborted", "resets of all tiers", "kills"):
            work[what] = self.seen[what]
        return work


def _is_drained(metrics: Metrics) -> bool:
    ups = [value for name, labels, value in metrics.samples if name == "kvtier_tier_up" and labels]
    return metrics.is_idle and all(ups)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
