"""Agents that return from tool calls, compared by the KV hints that they send. Each way has its own engine.

All engines run at once. Each turn goes to one engine after another, so a loaded machine slows all engines
equally. Pauses pass in virtual time: they determine which turns lie between two turns of an agent. Before an
engine gets the next turn it is idle and its transfers have ended.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvtier.errors import KVTierError
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    Engine,
    Sample,
    block_bytes,
    make_prompt,
    measure,
    open_engines,
    over_files,
    spread_of_median,
)
from kvtier_bench.machine import Machine, open_folder
from kvtier_bench.replay.records import percentile_ms
from kvtier_bench.replay.workload import conversations
from kvtier_bench.simulate.generate import Source, Workload
from kvtier_bench.simulate.trace import TimedLine, read_lines

PAUSE_S: Final = (5.0, 120.0)  # log-uniform between them
SERVICE_S: Final = 1.0  # duration of a turn, in virtual time
TTL_S: Final = 3600.0  # longer than a benchmark takes, so that nothing expires
TURNS: Final = range(3, 9)
OUTPUT_TOKENS: Final = 4
LONGEST_TOKENS: Final = 2000
DEVICE_TOKENS: Final = 2560
_STEP: Final = [2, 3]  # a prompt shorter than a block
_NONE, _HINTED, _OTHERS = "no hints", "with hints", "without hints"


@dataclass(frozen=True)
class Way:
    """A way of sending hints.

    Attributes:
        at_turn: types of the actions in each turn of a conversation except the last.
        at_end: types of the actions in the last turn.
        prefetch: when to prefetch the session: at the ``start`` of each pause, or just before its ``end``.
    """

    at_turn: Sequence[str] = ()
    at_end: Sequence[str] = ()
    prefetch: str = ""


WAYS: Final[Mapping[str, Way]] = {
    _NONE: Way(),
    "retain": Way(["kv.retain"], ["kv.release"]),
    "pin": Way(["kv.pin"], ["kv.release"]),
    "prefetch": Way(["kv.demote"], ["kv.release"], "start"),
    "all": Way(["kv.retain", "kv.pin"], ["kv.release"], "start"),
    "oracle": Way(["kv.demote"], ["kv.release"], "end"),
}


@dataclass(frozen=True)
class Turn:
    """A turn of an agent."""

    session: str
    is_hinted: bool
    is_first: bool
    is_last: bool
    tokens: Sequence[int]


@dataclass(frozen=True)
class Returning:
    """Turns after a pause: milliseconds to the first token, and prompt tokens by where they were

    Attributes:
        of: which agents the row covers: the agents that send hints, or the others.
        ratio: the time divided by the time of the same turn without hints; median, and its bounds.
        memory_percent: percent of the prompt tokens that were on the device or in host memory when the turn
            arrived.
        files_percent: percent of the prompt tokens that the turn fetched from files.
    """

    way: str
    of: str
    turns: int
    ttft_p50: float
    ttft_p95: float
    ratio: float
    low: float
    high: float
    memory_percent: float
    files_percent: float


@dataclass(frozen=True)
class Moved:
    """What each way moved, in all, and the outcomes of its actions"""

    way: str
    read_mib: float
    written_mib: float
    prefetched_chunks: float
    wrong: str
    outcomes: str


@dataclass(frozen=True)
class Agents:
    """Agents

    Attributes:
        at_once: number of concurrent agents; every second agent sends hints.
        host_chunks: capacity of host memory, in chunks.
    """

    trace: str
    conversations: int
    at_once: int
    tokens_per_chunk: int
    host_percent: float
    pin_budget: float
    model: str
    turns: int = 0
    different_chunks: int = 0
    host_chunks: int = 0


def run(
    trace: Path | None, work: Agents, seed: int, root: Path | None
) -> list[Returning | Moved | Agents | Machine]:
    """Measure.

    Args:
        trace: file in Mooncake's format; None to generate conversations.
        work: the workload; its last fields, the counts, are filled in.
        root: directory for the files of tiers.
    """
    turns = list(schedule(list(conversations_of(trace, work, seed)), work, seed))
    different = {tuple(turn.tokens[: at + BLOCK_TOKENS]) for turn in turns for at in _blocks(turn)}
    work = replace(work, turns=len(turns), different_chunks=len(different))
    work = replace(work, host_chunks=int(work.host_percent / 100 * len(different)))
    with open_folder(root) as folder, open_folder(None) as logs:
        machine = Machine.here(folder)
        host_bytes, budget = work.host_chunks * block_bytes(work.model), {"pin_budget": work.pin_budget}
        settings = {name: {**over_files(host_bytes, folder / name), **budget} for name in WAYS}
        arguments: dict[str, Any] = {
            "max_model_len": LONGEST_TOKENS + OUTPUT_TOKENS,
            "num_gpu_blocks_override": DEVICE_TOKENS // BLOCK_TOKENS,
        }
        with open_engines(logs, work.model, settings, **arguments) as engines:
            samples = measure(
                engines, range(len(turns)), lambda way, engine, at: _ask(engine, WAYS[way], turns[at])
            )
            moved = [_moved(way, engine, samples) for way, engine in engines.items()]
    return [*table(turns, samples), *moved, work, machine.again()]


# --- the turns -----------------------------------------------------------------------------------


def conversations_of(trace: Path | None, work: Agents, seed: int) -> Iterator[list[list[int | str]]]:
    """Yield conversations, each as a list of its turns' chunks."""
    chance = random.Random(seed)
    if trace is None:
        every = _generated(chance)
    else:
        lines = list(read_lines(trace, TimedLine))
        found = conversations(lines)
        chance.shuffle(found)
        every = ([list(lines[index].hash_ids) for index in one] for one in found)
    most, left = LONGEST_TOKENS // work.tokens_per_chunk, work.conversations
    for turns in every:
        if left and len(turns) in TURNS and max(map(len, turns)) <= most:
            left -= 1
            yield turns
        if not left:
            return
    raise KVTierError(f"{trace} lacks {left} conversations of 3 to 8 turns below {LONGEST_TOKENS} tokens")


def _generated(chance: random.Random) -> Iterator[list[list[int | str]]]:
    source = Source(Workload(), chance)
    heads = [source.new(8) for _ in range(10)]
    while True:
        ids: list[int | str] = [*chance.choice(heads)]
        yield [(ids := [*ids, *source.new(10)]) for _ in range(chance.choice(TURNS))]


def schedule(chosen: Sequence[Sequence[Sequence[int | str]]], work: Agents, seed: int) -> Iterator[Turn]:
    """Yield the turns of all conversations in the order of their virtual times."""
    chance, now_s = random.Random(seed), 0.0
    waiting = [(chance.uniform(0, PAUSE_S[1]), number, 0) for number in range(work.at_once)]
    begun = work.at_once
    waiting.sort()
    while waiting:
        at_s, number, turn = heappop(waiting)
        ids = chosen[number]
        tokens = [it for id_ in ids[turn] for it in make_prompt(f"{seed} {id_}", work.tokens_per_chunk)]
        is_last = turn == len(ids) - 1
        yield Turn(f"agent {number}", number % 2 == 0, turn == 0, is_last, [*tokens, *_STEP])
        now_s = max(at_s, now_s) + SERVICE_S
        again_s = now_s + PAUSE_S[0] * (PAUSE_S[1] / PAUSE_S[0]) ** chance.random()
        if not is_last:
            heappush(waiting, (again_s, number, turn + 1))
        elif begun < len(chosen):
            heappush(waiting, (again_s, begun, 0))
            begun += 1


def _blocks(turn: Turn) -> range:
    return range(0, len(turn.tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)


# --- one turn ------------------------------------------------------------------------------------


def _ask(engine: Engine, way: Way, turn: Turn) -> Sample:
    """Send a turn to an engine, with the hint messages before and after it."""
    prefetch = [_action("kv.prefetch", turn.session)]
    if turn.is_hinted and not turn.is_first and way.prefetch == "end":
        _send(engine, _STEP, prefetch)
    before = _fetched(engine)
    kinds = way.at_end if turn.is_last else way.at_turn
    is_named = way.at_turn != ["kv.retain"]
    actions = [_action(kind, turn.session if is_named else None) for kind in kinds]
    answer = _send(engine, turn.tokens, actions if turn.is_hinted else [])
    counts = {"cached": answer["cached"][0], "fetched": _fetched(engine) - before}
    if turn.is_hinted and not turn.is_last and way.prefetch == "start":
        _send(engine, _STEP, prefetch)
    return Sample(answer["wall_s"], answer["ttft_s"], answer["answers"], counts)


def _send(engine: Engine, tokens: Sequence[int], actions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    envelope = {"protocol_version": "0.1", "message_id": "1", "actions": actions}
    params = {"kvtier": {"hints": envelope}} if actions else None
    order: dict[str, Any] = {"prompts": [tokens], "output_tokens": OUTPUT_TOKENS}
    answer = engine.ask("generate", **order, kv_transfer_params=params)
    engine.ask("settle")
    return answer


def _action(kind: str, session: str | None) -> dict[str, Any]:
    payload: dict[str, Any] = {"priority": 2} if kind == "kv.retain" else {}
    payload |= {"session": session} if session and kind != "kv.retain" else {}
    payload |= {"ttl_s": TTL_S} if kind in ("kv.pin", "kv.prefetch") else {}
    return {"action_id": kind, "action_type": kind, "action_version": "0.1", "payload": payload}


def _fetched(engine: Engine) -> float:
    """Return the number of chunks that requests have fetched, without concurrent prefetches."""
    fetched, ahead = (_counters(engine, f"kvtier_{name}_chunks") for name in ("fetched", "prefetched"))
    return sum(fetched.values()) - sum(ahead.values())


def _counters(engine: Engine, name: str, *labels: str) -> dict[str, float]:
    found: Counter[str] = Counter()
    for sample, its, value in engine.ask("metrics")["samples"]:
        if sample == f"{name}_total":
            found[" ".join(its[label] for label in labels)] += value
    return dict(found)


# --- figures -------------------------------------------------------------------------------------


def table(turns: Sequence[Turn], samples: Mapping[str, Sequence[Sample]]) -> list[Returning]:
    """Compare turns after a pause with the same turns in the engine without hints."""
    later = [at for at, turn in enumerate(turns) if not turn.is_first]
    groups = {of: [at for at in later if turns[at].is_hinted is (of == _HINTED)] for of in (_HINTED, _OTHERS)}
    return [_returning(way, of, at, turns, samples) for of, at in groups.items() if at for way in samples]


def _returning(
    way: str, of: str, at: Sequence[int], turns: Sequence[Turn], samples: Mapping[str, Sequence[Sample]]
) -> Returning:
    rows = [samples[way][number] for number in at]
    ttft = [row.ttft_s[0] for row in rows]
    ratios = [mine / samples[_NONE][number].ttft_s[0] for mine, number in zip(ttft, at, strict=True)]
    prompts = sum(len(turns[number].tokens) for number in at)
    files = BLOCK_TOKENS * sum(row.counts["fetched"] for row in rows)
    cached = sum(row.counts["cached"] for row in rows)
    return Returning(
        way,
        of,
        len(at),
        percentile_ms(ttft, 50),
        percentile_ms(ttft, 95),
        median(ratios),
        *spread_of_median(ratios),
        100 * (cached - files) / prompts,
        100 * files / prompts,
    )


def _moved(way: str, engine: Engine, samples: Mapping[str, Sequence[Sample]]) -> Moved:
    pairs = zip(samples[way], samples[_NONE], strict=True)
    wrong = sum(mine.answers != its.answers for mine, its in pairs)
    outcomes = _counters(engine, "kvtier_hint_actions", "action", "outcome", "reason")
    read, written, prefetched = (
        sum(_counters(engine, name).values())
        for name in (
            "vllm:kv_offload_tiering_read_bytes",
            "vllm:kv_offload_tiering_write_bytes",
            "kvtier_prefetched_chunks",
        )
    )
    return Moved(
        way,
        read / 2**20,
        written / 2**20,
        prefetched,
        f"{wrong} of {len(samples[way])}",
        ", ".join(f"{words} {count:.0f}" for words, count in sorted(outcomes.items())) or "-",
    )
