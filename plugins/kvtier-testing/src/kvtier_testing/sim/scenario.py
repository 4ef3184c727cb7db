"""The scenario drawn from a seed: engine, tiers, fault schedule and ends of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

from kvtier._core.limits import Limits
from kvtier.keys import OffloadKey, pack_key
from kvtier.tiers import TierConfig
from kvtier_testing.sim.backend import NO_FAULTS, FaultProfile
from kvtier_testing.sim.model import CHUNK_BYTES
from kvtier_testing.sim.network import LinkFault
from kvtier_testing.sim.tiers import SimTierConfig

_MOST_PROMPTS = 8
_PORT = 18_570


class Owner(Enum):
    """The driver of the core."""

    ENGINE = "engine"  # an engine's scheduler, step by step, next to the executor
    TASKS = "tasks"  # TieringManager, from tasks of the event loop


class End(Enum):
    """The way a process ends."""

    CRASH = "crash"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class TierScenario:
    """A tier and its faults.

    Attributes:
        verifies: whether it verifies its chunks itself.
        capacity: its capacity in chunks.
        is_recreated: whether a failed open is retried with a new object.
        checks_damage: whether the run ends with a check that a damaged chunk is set aside.
        fault_schedule: start times and faults; no faults before the first entry or after the last.
        preloaded: for each prompt, the number of chunks that an earlier engine stored there.
        corrupts_at_s: times when some of its chunks are damaged.
        loses_at_s: times when it evicts some chunks unprompted.
        shared_at_s: prompt whose chunks another engine stores there, and the time for each chunk.
    """

    config: TierConfig
    verifies: bool
    capacity: int
    is_recreated: bool
    checks_damage: bool
    fault_schedule: tuple[tuple[float, FaultProfile], ...]
    preloaded: tuple[int, ...]
    corrupts_at_s: tuple[float, ...]
    loses_at_s: tuple[float, ...]
    shared_at_s: tuple[tuple[int, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Scenario:
    """An engine's part of a run.

    Attributes:
        owner: driver of the core.
        windowed: whether one group is looked up from the back.
        tiers: the tiers, in their order.
        process_ends: time and way of each process's end. One more process follows; it outlives
            the faults and is checked after it has drained.
        faults_end_s: end of the last fault.
        step_s: approximate duration of an engine's step, or of a task's pause.
        requests: number of requests per process.
        resets: fraction of steps that give the engine new weights.
        copy_failures: fraction of device copies that fail.
        copy_s: longest duration of a device copy.
        prompts: prompts; each request asks for the beginning of one.
        chunk_s: reported compute time per chunk; 0 if none is reported, so that the core loads everything.
        waits_s: times that requests wait for chunks of other engines; each draws one.
        identity: the engine's index in ``IDENTITIES``.
        keeps_memory: whether a process adopts the chunks in the slots of the one before.
    """

    owner: Owner
    policy: str
    slots: int
    limits: Limits
    windowed: bool
    tiers: tuple[TierScenario, ...]
    process_ends: tuple[tuple[float, End], ...]
    faults_end_s: float
    step_s: float
    requests: int
    resets: float
    copy_failures: float
    copy_s: float
    prompts: tuple[tuple[OffloadKey, ...], ...] = field(repr=False)
    chunk_s: float
    waits_s: tuple[float, ...]
    identity: int = 0
    keeps_memory: bool = False

    @staticmethod
    def draw(seed: object) -> Scenario:
        """Draw a run. The same seed draws the same run."""
        drawn, keeping = Scenario._draw(seed), Random(f"{seed}/keeping")
        if drawn.owner is Owner.TASKS or keeping.random() < 0.7:
            return drawn
        ends = drawn.process_ends or _process_ends(keeping, drawn.faults_end_s, (1, 1, 2))
        return replace(drawn, keeps_memory=True, process_ends=ends)

    @staticmethod
    def _draw(seed: object) -> Scenario:
        chance, sharing = Random(f"{seed}/plan"), Random(f"{seed}/sharing")
        faults_end_s = chance.choice((0.3, 1.0, 1.0, 3.0))
        slots = chance.randint(3, 16)
        windowed = chance.random() < 0.15
        return Scenario(
            owner=chance.choice((Owner.ENGINE, Owner.ENGINE, Owner.TASKS)),
            policy=chance.choice(("lru", "lru", "arc")),
            slots=slots,
            limits=_limits(chance),
            windowed=windowed,
            tiers=tuple(
                _tier(chance, sharing, slots, faults_end_s)
                for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3)))
            ),
            process_ends=_process_ends(chance, faults_end_s, (0, 0, 0, 1, 1, 2)),
            faults_end_s=faults_end_s,
            step_s=faults_end_s / chance.choice((15, 30, 40)),
            requests=chance.randint(4, 16),
            resets=chance.choice((0.0, 0.0, 0.03, 0.1)),
            copy_failures=chance.choice((0.0, 0.0, 0.1)),
            copy_s=chance.choice((0.0, 0.001, 0.02, 0.1)),
            prompts=_prompts(chance, windowed=windowed),
            chunk_s=chance.choice((0.0, 0.0, 0.0001, 0.002, 0.02)),
            waits_s=sharing.choice(((0.0,), (0.0, 0.05, 0.5), (0.5, 2.0))),
        )


@dataclass(frozen=True)
class Fleet:
    """A run of engines that share tiers and read from each other.

    Attributes:
        engines: the engines.
        peers: index of the tier that reads from peers; None if there is none.
        latency_s: longest time that a message takes.
        read_s: durations of memory reads; each read draws one.
        link_faults: faults of the network.
    """

    engines: tuple[Scenario, ...]
    peers: int | None = None
    latency_s: float = 0.0
    read_s: tuple[float, ...] = (0.0,)
    link_faults: tuple[LinkFault, ...] = ()

    @staticmethod
    def draw(seed: object, count: int, *, has_peers: bool) -> Fleet:
        """Draw a run of ``count`` engines. The same seed draws the same run."""
        base = Scenario.draw(seed)
        if count == 1:
            return Fleet((base,))
        chance = Random(f"{seed}/fleet")
        tiers = [
            _tier(chance, chance, base.slots, base.faults_end_s) for _ in range(chance.choice((1, 1, 2)))
        ]
        drawn = [Scenario.draw(f"{seed}/{number}") for number in range(count)]
        end_s = max(1.0, *(it.faults_end_s for it in drawn))
        others = chance.choice((0.0, 0.0, 0.3))  # fraction of engines with another identity
        engines = [
            replace(
                engine,
                identity=int(chance.random() < others),
                prompts=base.prompts,
                windowed=base.windowed,
                faults_end_s=end_s,
                resets=engine.resets / 4,  # an engine that was reset has no peers
                tiers=tuple(_of_another_engine(tier, chance, end_s) for tier in tiers),
            )
            for engine in drawn
        ]
        if not has_peers:
            return Fleet(tuple(engines))
        peers = chance.choice((0, 0, len(tiers)))
        shared = _peer_settings(chance, count)
        for number, engine in enumerate(engines):
            tier = peer_tier(shared | {"listen": f"{host(number)}:{_PORT}"}, end_s)
            engines[number] = replace(engine, tiers=(*engine.tiers[:peers], tier, *engine.tiers[peers:]))
        return Fleet(
            tuple(engines),
            peers,
            latency_s=chance.choice((0.0005, 0.002)),
            read_s=chance.choice(((0.0, 0.001), (0.0, 0.02, 0.1, 0.5), (0.0, 0.1, 1.0))),
            link_faults=tuple(
                _link_fault(chance, count, end_s) for _ in range(chance.randint(0, 2 + count // 4))
            ),
        )

    @staticmethod
    def quiet(count: int) -> Fleet:
        """Return a run of ``count`` engines without faults, which have only the peer tier.

        More engines get fewer requests each, because the cost of a lookup grows with the engines.
        """
        room = {name: 1000 * CHUNK_BYTES for name in ("serve_bytes", "receive_bytes")}
        settings: dict[str, object] = {"peers": peer_addresses(count), **room}
        engine = replace(
            Scenario.draw("quiet"),
            owner=Owner.ENGINE,
            policy="lru",
            slots=16,
            limits=Limits(),
            windowed=False,
            process_ends=(),
            faults_end_s=10.0,
            step_s=0.2,
            requests=max(2, 512 // count),
            resets=0.0,
            copy_failures=0.0,
            prompts=tuple(chain(f"{number}.", 8) for number in range(50)),
            chunk_s=0.0,
            waits_s=(0.0,),
        )
        engines = [
            replace(engine, tiers=(peer_tier(settings | {"listen": address}, engine.faults_end_s),))
            for address in peer_addresses(count)
        ]
        return Fleet(tuple(engines), peers=0, latency_s=0.001)


def draw_count(seed: object) -> int:
    """Draw the number of engines in a fleet: mostly few, because small fleets find most per second."""
    return Random(f"{seed}/count").choice((2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 6, 6, 8, 12, 64))


def host(number: int) -> str:
    """Return the address of an engine's host: a loopback address, which needs no secret."""
    return f"127.0.{1 + number // 250}.{1 + number % 250}"


def peer_tier(settings: dict[str, object], faults_end_s: float) -> TierScenario:
    """Return a tier that reads from peers. Only the peers and the network fail, not its wrapper."""
    from kvtier_nixl import NixlConfig

    return TierScenario(
        config=NixlConfig.model_validate(settings),
        verifies=False,
        capacity=0,
        is_recreated=True,
        checks_damage=False,
        fault_schedule=((faults_end_s, NO_FAULTS),),
        preloaded=(),
        corrupts_at_s=(),
        loses_at_s=(),
        shared_at_s=(),
    )


def peer_addresses(count: int) -> tuple[str, ...]:
    """Return the listen addresses of ``count`` engines."""
    return tuple(f"{host(number)}:{_PORT}" for number in range(count))


def _peer_settings(chance: Random, count: int) -> dict[str, object]:
    answer_timeout_s = chance.choice((0.05, 0.2))
    return {
        "peers": peer_addresses(count),
        "serve_bytes": chance.choice((2, 4, 4, 8, 100)) * CHUNK_BYTES,
        "receive_bytes": chance.choice((1, 3, 100)) * CHUNK_BYTES,
        "lease_s": chance.choice((0.01, 0.03, 1.0)),
        "answer_timeout_s": answer_timeout_s,
        "deadline_s": chance.choice((3, 8)) * answer_timeout_s,
        "max_concurrency": chance.choice((1, 2, 8)),
        "breaker_pause_s": chance.choice((0.05, 0.5)),
        "retry_share": chance.choice((0.0, 1.0)),
    }


def _link_fault(chance: Random, count: int, faults_end_s: float) -> LinkFault:
    """Draw a partition: between two hosts, around one host, or between two halves."""
    hosts = [host(number) for number in range(count)]
    chance.shuffle(hosts)
    left, right = chance.choice(
        (((0, 1), (1, 2)), ((0, 1), (1, count)), ((0, count // 2), (count // 2, count)))
    )
    begin_s = chance.random() * faults_end_s
    return LinkFault(
        begin_s=begin_s,
        end_s=begin_s + (faults_end_s - begin_s) * chance.choice((0.1, 0.5, 1.0)),
        left=frozenset(hosts[slice(*left)]),
        right=frozenset(hosts[slice(*right)]),
        delay_s=chance.choice((math.inf, math.inf, 0.03, 0.3)),
        reads=chance.random() < 0.7,
    )


def _of_another_engine(tier: TierScenario, chance: Random, faults_end_s: float) -> TierScenario:
    """Draw an engine's own part of a shared tier: its faults, and damage and loss of its chunks."""
    own = _tier(chance, chance, 1, faults_end_s)
    return replace(own, config=tier.config, verifies=tier.verifies, capacity=tier.capacity)


def _limits(chance: Random) -> Limits:
    return Limits(
        request_deadline_s=chance.choice((0.1, 0.5, 2.0)),
        promotion_budget=chance.choice((0.1, 0.25, 1.0)),
        promotion_reserve=chance.choice((0.0, 1 / 8, 0.5)),
        put_backlog=chance.choice((0.25, 0.5, 1.0)),
        pin_budget=chance.choice((0.0, 0.25, 0.5, 0.9)),
        store_threshold=chance.choice((0, 0, 0, 0, 0, 0, 2)),
        max_tracker_size=chance.choice((4, 100)),
        max_announced=chance.choice((3, 1000)),
        load_gate="latency",
    )


def _tier(chance: Random, sharing: Random, slots: int, faults_end_s: float) -> TierScenario:
    config = SimTierConfig(
        deadline_s=chance.choice((0.05, 0.3, 1.0)),
        max_concurrency=chance.choice((1, 2, 8)),
        breaker_failures=chance.choice((1, 2, 5)),
        breaker_pause_s=chance.choice((0.05, 0.5)),
        retry_share=chance.choice((0.0, 0.5, 1.0)),
        write_policy=chance.choice(("all", "all", "all", "adaptive", "reused")),
        write_bytes_per_day=chance.choice((None, None, None, 24 * 64 * 20)),
        complete_index=chance.random() < 0.5,
        durable=chance.choice((0.0, 0.7, 1.0, 1.0)),
        evicts=chance.random() < 0.7,
        reports_evictions=chance.random() < 0.7,
        drains=chance.random() < 0.5,
    )
    return TierScenario(
        config=config,
        verifies=chance.random() < 0.3,
        capacity=chance.choice((2, slots, 4 * slots, 1000)),
        is_recreated=chance.random() < 0.5,
        checks_damage=chance.random() < 0.5,
        fault_schedule=_fault_schedule(chance, faults_end_s),
        preloaded=tuple(chance.choice((0, 2, 20, 20)) for _ in range(_MOST_PROMPTS)),
        corrupts_at_s=_times(chance, faults_end_s, 0.2),
        loses_at_s=_times(chance, faults_end_s, 0.4),
        shared_at_s=tuple(_shared(sharing, faults_end_s) for _ in range(sharing.choice((0, 2, 4)))),
    )


def _times(chance: Random, faults_end_s: float, share: float) -> tuple[float, ...]:
    return tuple(chance.random() * faults_end_s for _ in range(3) if chance.random() < share)


def _shared(chance: Random, faults_end_s: float) -> tuple[int, tuple[float, ...]]:
    """Draw times for another engine to store the chunks of a prompt, mostly in order."""
    begin_s, chunk_s = chance.random() * faults_end_s, chance.choice((0.0, 0.01, 0.1))
    times = tuple(begin_s + chunk_s * index for index in range(chance.choice((2, 20))))
    return chance.randrange(_MOST_PROMPTS), times if chance.random() < 0.8 else times[::-1]


def _fault_schedule(chance: Random, faults_end_s: float) -> tuple[tuple[float, FaultProfile], ...]:
    changes = sorted(chance.random() * faults_end_s * 0.8 for _ in range(chance.choice((0, 1, 2, 3))))
    if changes and chance.random() < 0.3:
        changes[0] = 0.0
    phases = [
        (when, _fault_profile(chance) if index % 2 == 0 else NO_FAULTS) for index, when in enumerate(changes)
    ]
    return (*phases, (faults_end_s, NO_FAULTS))


def _fault_profile(chance: Random) -> FaultProfile:
    """Draw one or two kinds of faults; all at once would hide each other."""
    shares = {
        name: chance.choice((0.2, 0.5, 1.0))
        for name in ("error", "lost", "hang", "late", "cancelled", "chunks", "damage", "again")
    }
    kinds = set(chance.choices((*shares, "hang", "late", "closed", "full"), k=chance.choice((1, 1, 2, 3))))
    return FaultProfile(
        latency_s=chance.choice((0.0, 0.002, 0.02)),
        only=chance.choice((None, None, ("get",), ("get",), ("put",), ("get", "put", "reset"))),
        closed="closed" in kinds,
        full="full" in kinds,
        **{name: share for name, share in shares.items() if name in kinds},
    )


def _process_ends(
    chance: Random, faults_end_s: float, counts: Sequence[int]
) -> tuple[tuple[float, End], ...]:
    ends = sorted(chance.random() * faults_end_s for _ in range(chance.choice(counts)))
    return tuple((when, chance.choice((End.CRASH, End.CRASH, End.SHUTDOWN))) for when in ends)


def _prompts(chance: Random, *, windowed: bool) -> tuple[tuple[OffloadKey, ...], ...]:
    """Draw prompts; some share a beginning."""
    shared = chain("s", chance.randint(1, 5))
    prompts = [(*shared, *chain(name, chance.randint(1, 6))) for name in "abc"[: chance.randint(0, 3)]]
    prompts += [chain(name, chance.randint(1, 8)) for name in "def"[: chance.randint(1, 3)]]
    if windowed:
        prompts += [chain("w", 6, group=1), chain("v", 3, group=1)]
        prompts += [(*chain(name, 6), *chain(name, 6, group=1)) for name in "su"]
    return tuple(prompts)


def chain(name: str, length: int, group: int = 0) -> tuple[OffloadKey, ...]:
    """Make the keys of a prompt's chunks."""
    return tuple(pack_key(f"{name}{index}".encode(), group) for index in range(length))
