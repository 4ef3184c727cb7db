"""Tiers in a thread of the engine's process against tiers in a process of their own.

Questions, each answered by ratios of one run, in rounds of random order.

*How soon can a tier be used?* A process has to start first, and the engine's start waits for its first word.

*How long does a promotion take?* No engine is needed: this process stands for it. It asks a tier for
chunks, and the clock runs until it learns that they have landed in their slots. Meanwhile it does nothing,
as an engine that waits for its device, or it computes in pure Python without a pause and looks for answers
now and then, as an engine whose thread is the bottleneck: there the executor's thread has to wait for the
interpreter lock, and the other process has not. While promotions run all the time, the same computing takes
longer: that is what is taken from the engine's thread.

*What does the engine lose?* Real engines without a connector, with a thread and with a process, asked in
turns with prompts that nobody has seen, as in ``bench_overhead``.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kvtier.build import make_tiers, start_executor
from kvtier.cli.bench_overhead import (
    PLAIN,
    Loss,
    Plan,
    Share,
    Work,
    device_blocks,
    explain,
    losses,
    measure,
    spread_of_median,
    work,
)
from kvtier.cli.engines import KVTIER, Site, block_bytes, open_folder, open_forge, say
from kvtier.cli.room import files_below
from kvtier.config import TieringConfig
from kvtier.core.messages import Answer, Fetch, Fetched, Put, PutEnded
from kvtier.errors import KVTierError
from kvtier.executor import AnyExecutor
from kvtier.identity import Identity
from kvtier.keys import OffloadKey, pack_key
from kvtier.memory.region import Region

THREAD, PROCESS = "thread", "process"
ISOLATIONS = (THREAD, PROCESS)
TIERS = ("dummy", "fs")
IDLE, BUSY = "idle", "busy"
COUNTS = (1, 8, 64)
AT_ONCE = 4  # promotions under way where they run all the time
LOOK_EVERY_S = 50e-6
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Promotion:
    """Time from asking for chunks until their owner knows that they have landed.

    Attributes:
        tier: which tier has them. ``dummy`` keeps them in memory: nearly all of its time is the way there
            and back.
        owner: what the asking thread does meanwhile.
        chunks: how many were asked for at once.
        isolation: where the tier runs.
        ms: median.
        p95_ms: what 95 % stay below.
        ratio: to the thread's time in the same round, median over the rounds.
        low, high: 95 % of the medians of resampled rounds lie between them.
    """

    tier: str
    owner: str
    chunks: int
    isolation: str
    ms: float
    p95_ms: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Taken:
    """What a computing owner loses while promotions run all the time, four at once.

    Attributes:
        tier: which tier has the chunks.
        isolation: where it runs.
        chunks: of each promotion.
        blocked_percent: of its processor time, how long it waited for the interpreter lock: neither running
            nor ready to run, as the kernel counts, less what it waits without promotions. Median over the
            rounds. It does not depend on who else uses the machine's processors.
        low, high: 95 % of the medians of resampled rounds lie between them.
        blocked_us_a_chunk: the same for each chunk that has landed meanwhile.
        longer_percent: by how much the same computing takes longer on the wall's clock: that, and processors
            that others use, the tier's process among them.
        chunks_s: how many landed in a second.
        others_us_a_chunk: processor time of everything but the owner's thread.
    """

    tier: str
    isolation: str
    chunks: int
    blocked_percent: float
    low: float
    high: float
    blocked_us_a_chunk: float
    longer_percent: float
    chunks_s: float
    others_us_a_chunk: float


@dataclass(frozen=True)
class Start:
    """How soon a tier can be used: what an engine's start, and its first lookups, wait for.

    Attributes:
        tier: which tier.
        isolation: where it runs.
        returns_ms: until the call that starts the executor returns, and the engine goes on: median.
        answers_ms: until the tier, which is opened meanwhile, has answered for the first time: median.
        longest_ms: the same, the longest.
    """

    tier: str
    isolation: str
    returns_ms: float
    answers_ms: float
    longest_ms: float


@dataclass(frozen=True)
class Sizes:
    """Promotions measured"""

    chunk_kib: int
    rounds: int


@dataclass(frozen=True)
class Stretch:
    """Some computing and what went on beside it.

    Attributes:
        wall_s: seconds that it took.
        own_s: processor time of the computing thread.
        blocked_s: seconds in which that thread neither ran nor was ready to run.
        chunks: how many landed.
        others_s: processor time of all other threads, the tier's process included.
    """

    wall_s: float
    own_s: float
    blocked_s: float
    chunks: int
    others_s: float


class BenchError(KVTierError):
    """A tier did not do what it was asked for, so nothing can be measured."""


class Bed:
    """A tier with chunks, and the executor it runs in.

    Args:
        isolation: where the tier runs.
        tier: its settings.
        chunk_bytes: of a chunk.
        chunks: how many chunks the tier gets.

    Attributes:
        returns_s: how long the call has taken that starts the executor.
        answers_s: from its begin until the tier has answered for the first time.
    """

    def __init__(self, isolation: str, tier: Mapping[str, Any], chunk_bytes: int, chunks: int) -> None:
        config = TieringConfig.from_mapping(
            {
                "cpu_bytes_to_use": AT_ONCE * chunks * chunk_bytes,
                "isolation": isolation,
                "secondary_tiers": [{"deadline_s": PATIENCE_S, **tier}],
            }
        )
        self.chunks = chunks
        self._region = Region.unnamed(AT_ONCE * chunks, chunk_bytes)
        identity = Identity.make("kvtier-bench", {"dtype": "int8"})
        begun_s = time.perf_counter()
        self._executor: AnyExecutor = start_executor(config, make_tiers(config), identity, self._region)
        self.returns_s = time.perf_counter() - begun_s
        self._ids = itertools.count(1)
        self._keys = [pack_key(number.to_bytes(16, "big"), 0) for number in range(chunks)]
        self.answers_s = self.returns_s + self._ask_first()

    def _ask_first(self) -> float:
        """Ask for a chunk that nobody has; return the seconds until the answer has come."""
        begun_s = time.perf_counter()
        self._ask(1)
        while not list(self._ended()):
            if time.perf_counter() - begun_s > PATIENCE_S:
                raise BenchError("the tier does not answer")
            wait()
        return time.perf_counter() - begun_s

    def fill(self) -> None:
        """Put the tier's chunks. Pages of all slots are touched."""
        for slot in range(self._region.slots):
            view = self._region.view(slot)
            view[:] = random.Random(slot).randbytes(len(view))
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._put():
            if time.monotonic() > deadline_s:
                raise BenchError("the tier does not take what is put into it")
            time.sleep(0.05)

    def promote(self, count: int, meanwhile: Callable[[], object]) -> float:
        """Ask for chunks; return the seconds until they have landed."""
        started = time.perf_counter()
        self._ask(count)
        while not (ended := list(self._ended())):
            meanwhile()
        seconds = time.perf_counter() - started
        landed = _landed(ended[0])
        if landed != count:
            raise BenchError(f"of {count} chunks {landed} were promoted")
        return seconds

    def compute_beside(self, count: int, units: int) -> Stretch:
        """Compute so much while promotions run all the time; with a count of 0 while none does."""
        pids, chunks = [os.getpid(), *_children()], 0
        cpu_s, own, started = _cpu_seconds(pids), _own_schedule(), time.perf_counter()
        under_way = {self._ask(count, place): place for place in range(AT_ONCE)} if count else {}
        for _ in range(units):
            compute()
            for ended in self._ended():
                chunks += _landed(ended)
                place = under_way.pop(ended.id)
                under_way[self._ask(count, place)] = place
        wall_s = time.perf_counter() - started
        ran_s, waited_s = (after - before for after, before in zip(_own_schedule(), own, strict=True))
        others_s = _cpu_seconds(pids) - cpu_s - ran_s
        while under_way:
            for ended in self._ended():
                del under_way[ended.id]
            wait()
        return Stretch(wall_s, ran_s, max(0.0, wall_s - ran_s - waited_s), chunks, others_s)

    def close(self) -> None:
        """Close the tier and give the memory back."""
        if self._executor.close(drain_s=1.0):
            self._region.close()

    def _ask(self, count: int, place: int = 0) -> int:
        transfer = next(self._ids)
        first = place * self.chunks
        keys: Sequence[OffloadKey] = self._keys[:count]
        self._executor.submit([Fetch(transfer, 0, keys, range(first, first + count), located=False)])
        return transfer

    def _ended(self) -> Iterator[Fetched]:
        """Yield the promotions that have ended since the last time."""
        while self._executor.events:
            event = self._executor.events.popleft()
            if isinstance(event, Fetched):
                yield event

    def _put(self) -> bool:
        transfer = next(self._ids)
        self._executor.submit([Put(transfer, 0, self._keys, range(self.chunks))])
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            while self._executor.events:
                event = self._executor.events.popleft()
                if isinstance(event, PutEnded) and event.id == transfer:
                    return all(event.kept)
            time.sleep(0.001)
        return False


def _landed(ended: Fetched) -> int:
    return sum(answer is Answer.LANDED for answer in ended.answers)


def compute() -> int:
    """Compute in pure Python, for some ten microseconds."""
    total = 0
    for number in range(300):
        total += number
    return total


def wait() -> None:
    """Do nothing, for as long."""
    time.sleep(LOOK_EVERY_S)


def run(
    root: Path | None = None,
    *,
    chunk_bytes: int = 512 * 1024,
    promotion_rounds: int = 40,
    stretch_s: float = 0.5,
    engine: bool = True,
    model: str = "medium",
    rounds: int = 10,
    prompts: int = 16,
    prompt_tokens: int = 512,
    output_tokens: int = 32,
    at_once: int = 8,
) -> list[Start | Promotion | Taken | Sizes | Loss | Share | Work | Site]:
    """Measure.

    Args:
        root: directory for files; what is written there is removed. Default: a temporary one.
        chunk_bytes: of a promoted chunk.
        promotion_rounds: how often each promotion is measured; the owner's loss a quarter as often.
        stretch_s: seconds of computing in each stretch that is compared with another.
        engine: whether engines are measured, too.
        model, rounds, prompts, prompt_tokens, output_tokens, at_once: of the engines; see
            ``bench_overhead.run``.
    """
    with open_folder(root) as folder:
        site = Site.of(folder)
        found: list[Any] = []
        for tier in TIERS:
            found += _starts(tier, folder / f"{tier}-starts", chunk_bytes, max(1, promotion_rounds // 4))
        for tier in TIERS:
            found += _promotions(tier, folder / tier, chunk_bytes, promotion_rounds, stretch_s)
        found.append(Sizes(chunk_bytes // 1024, promotion_rounds))
        if engine:
            plan = Plan(
                model, rounds, prompts, prompt_tokens, output_tokens, at_once, control=True, native=False
            )
            found += _engines(plan, folder)
        return [*_by_kind(found), site.again()]


# --- promotions --------------------------------------------------------------------------------------


def _promotions(
    tier: str, folder: Path, chunk_bytes: int, rounds: int, stretch_s: float
) -> list[Promotion | Taken]:
    with ExitStack() as stack:
        beds = {
            isolation: stack.enter_context(_bed(isolation, _tier(tier, folder / isolation), chunk_bytes))
            for isolation in ISOLATIONS
        }
        seconds = _measure_promotions(beds, tier, rounds)
        stretches = _measure_stretches(beds, tier, max(1, rounds // 4), stretch_s)
    return [*promotions(tier, seconds), *taken(tier, stretches, COUNTS[1])]


def _starts(tier: str, folder: Path, chunk_bytes: int, rounds: int) -> list[Start]:
    times: dict[str, list[tuple[float, float]]] = {isolation: [] for isolation in ISOLATIONS}
    order = random.Random(2)
    for number in range(rounds):
        for isolation in order.sample(ISOLATIONS, len(ISOLATIONS)):
            bed = Bed(isolation, _tier(tier, folder / f"{isolation}-{number}"), chunk_bytes, 1)
            bed.close()
            times[isolation].append((bed.returns_s * 1e3, bed.answers_s * 1e3))
    rows = []
    for isolation, pairs in times.items():
        returns_ms, answers_ms = zip(*pairs, strict=True)
        rows.append(Start(tier, isolation, median(returns_ms), median(answers_ms), max(answers_ms)))
    return rows


@contextmanager
def _bed(isolation: str, tier: Mapping[str, Any], chunk_bytes: int) -> Iterator[Bed]:
    bed = Bed(isolation, tier, chunk_bytes, max(COUNTS))
    try:
        bed.fill()
        yield bed
    finally:
        bed.close()


def _tier(tier: str, folder: Path) -> dict[str, Any]:
    return files_below(folder) if tier == "fs" else {"type": tier}


Seconds = dict[tuple[str, int, str], list[float]]


def _measure_promotions(beds: Mapping[str, Bed], tier: str, rounds: int) -> Seconds:
    """Measure each promotion once a round: by owner, number of chunks and isolation."""
    seconds: Seconds = {}
    cases = list(itertools.product((IDLE, BUSY), COUNTS, beds))
    generator = random.Random(0)
    for number in range(-1, rounds):
        generator.shuffle(cases)
        for owner, count, isolation in cases:
            took = beds[isolation].promote(count, compute if owner == BUSY else wait)
            if number >= 0:
                seconds.setdefault((owner, count, isolation), []).append(took)
    say(f"{tier}: {rounds} rounds of promotions")
    return seconds


def promotions(tier: str, seconds: Mapping[tuple[str, int, str], Sequence[float]]) -> list[Promotion]:
    """Compare the isolations, round by round."""
    found = []
    for (owner, count, isolation), took in sorted(seconds.items()):
        base = seconds[owner, count, THREAD]
        ratios = [mine / its for mine, its in zip(took, base, strict=True)]
        low, high = spread_of_median(ratios)
        p95_s = quantiles(took, n=20, method="inclusive")[-1] if len(took) > 1 else took[0]
        found.append(
            Promotion(
                tier, owner, count, isolation, median(took) * 1e3, p95_s * 1e3, median(ratios), low, high
            )
        )
    return found


Pairs = dict[str, list[tuple[Stretch, Stretch]]]


def _measure_stretches(beds: Mapping[str, Bed], tier: str, rounds: int, stretch_s: float) -> Pairs:
    """Compute without promotions and beside them, once a round, with the same work."""
    units = _units_in(stretch_s)
    pairs: Pairs = {isolation: [] for isolation in beds}
    order, generator = list(beds), random.Random(0)
    for number in range(-1, rounds):
        generator.shuffle(order)
        for isolation in order:
            bed = beds[isolation]
            alone, beside = bed.compute_beside(0, units), bed.compute_beside(COUNTS[1], units)
            if number >= 0:
                pairs[isolation].append((alone, beside))
    say(f"{tier}: {rounds} rounds of computing beside promotions")
    return pairs


def taken(tier: str, pairs: Mapping[str, Sequence[tuple[Stretch, Stretch]]], count: int) -> list[Taken]:
    """Compare computing beside promotions with computing alone, in the same round."""
    found = []
    for isolation, rows in pairs.items():
        blocked = [
            100 * (beside.blocked_s / beside.own_s - alone.blocked_s / alone.own_s) for alone, beside in rows
        ]
        low, high = spread_of_median(blocked)
        each = [(beside.blocked_s - alone.blocked_s) / max(1, beside.chunks) for alone, beside in rows]
        found.append(
            Taken(
                tier,
                isolation,
                count,
                median(blocked),
                low,
                high,
                median(each) * 1e6,
                median(100 * (beside.wall_s / alone.wall_s - 1) for alone, beside in rows),
                median(beside.chunks / beside.wall_s for _, beside in rows),
                median(beside.others_s / max(1, beside.chunks) for _, beside in rows) * 1e6,
            )
        )
    return found


def _own_schedule() -> tuple[float, float]:
    """Return the seconds that this thread has run, and has been ready to run without a processor."""
    waited_ns = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return time.thread_time(), int(waited_ns) / 1e9


def _units_in(seconds: float) -> int:
    """Return how often ``compute`` runs in so much processor time."""
    started, units = time.thread_time(), 0
    while time.thread_time() - started < seconds:
        compute()
        units += 1
    return units


def _children() -> list[int]:
    """Return the processes that were started by this one and live."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of all threads of some processes; of this one also of those that ended."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = usage.ru_utime + usage.ru_stime
    for pid in pids:
        if pid != os.getpid():
            for task in Path("/proc", str(pid), "task").iterdir():
                with suppress(OSError):
                    total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


# --- engines -----------------------------------------------------------------------------------------


def _engines(plan: Plan, folder: Path) -> list[Loss | Share | Work]:
    with ExitStack() as stack:
        forge = stack.enter_context(open_forge())
        engines = {
            name: stack.enter_context(
                forge.engine(
                    name,
                    plan.model,
                    settings,
                    num_gpu_blocks_override=device_blocks(plan),
                    max_model_len=plan.prompt_tokens + plan.output_tokens,
                    max_num_seqs=plan.at_once,
                )
            )
            for name, settings in _connectors(plan, folder).items()
        }
        samples = measure(engines, plan)
        return [*losses(samples), *explain(engines, plan, samples), work(plan)]


def _connectors(plan: Plan, folder: Path) -> dict[str, dict[str, Any] | None]:
    nbytes = plan.slots * block_bytes(plan.model)
    connectors: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for isolation in ISOLATIONS:
        connectors[isolation] = {
            **KVTIER,
            "cpu_bytes_to_use": nbytes,
            "isolation": isolation,
            "secondary_tiers": [files_below(folder / f"engine-{isolation}")],
        }
    return connectors


def _by_kind(records: Sequence[Any]) -> list[Any]:
    """Sort records so that those of one class follow one another, classes in the order of their first."""
    kinds = list(dict.fromkeys(type(record) for record in records))
    return sorted(records, key=lambda record: kinds.index(type(record)))
