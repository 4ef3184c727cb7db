"""kvtier's manager agrees with vLLM's own CPU manager on random traces: hits, evictions and events.

No engine runs: the test drives the managers as vLLM's scheduler does.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvtier._core.messages import SlotsReady
from kvtier._core.tiering import Tiering
from kvtier.adapters.vllm._manager import KVTierManager
from kvtier.keys import pack_key
from kvtier.policies import LRU
from kvtier_bench.managers.core import MemoryTier

pytestmark = pytest.mark.releases

GROUPS = 2
MOST_CHUNKS = 10
SLOTS = 64
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def kvtier_manager() -> KVTierManager:
    """Return kvtier's manager without tiers."""
    executor = MemoryTier(0)
    core = Tiering(LRU(), track_kv_events=True)
    core.on_event(SlotsReady(range(SLOTS)), 0.0)
    return KVTierManager(core, executor)  # type: ignore[arg-type]


def vllm_manager() -> CPUOffloadingManager:
    """Return vLLM's manager."""
    return CPUOffloadingManager(SLOTS, "lru", enable_events=True)


class Life:
    """A request in one manager: its lookups, its load, and its stores step by step."""

    def __init__(self, manager: OffloadingManager, name: str, prompt: Sequence[bytes]) -> None:
        self.manager = manager
        self.prompt = [[pack_key(chunk, group) for group in range(GROUPS)] for chunk in prompt]
        self.context = ReqContext(name)
        for place, keys in enumerate(self.prompt, 1):
            for key in keys:
                self.context.set_offload_key_position(OffloadKey(key), place * 16)
        self.manager.on_new_request(self.context)
        self.evicted: list[OffloadKey] = []
        self.hits = self._load()

    def _load(self) -> int:
        """Load the prefix that both groups have; return its length."""
        hits = 0
        while hits < len(self.prompt) and all(self._is_hit(key) for key in self.prompt[hits]):
            hits += 1
        keys = by_group(self.prompt[:hits])
        if keys:
            self.manager.prepare_load(keys, self.context)
        self.manager.on_schedule_end(STEP)
        if keys:
            self.manager.complete_load(set(keys), self.context)
        return hits

    def _is_hit(self, key: bytes) -> bool:
        return self.manager.lookup(OffloadKey(key), self.context) is LookupResult.HIT

    def store(self, first: int, end: int) -> None:
        """Store the chunks of one step."""
        output = self.manager.prepare_store(by_group(self.prompt[first:end]), self.context)
        if output is not None and output.keys_to_store:
            self.evicted += output.evicted_keys
            self.manager.complete_store(set(output.keys_to_store), self.context)
        self.manager.on_schedule_end(STEP)

    def end(self) -> list[Any]:
        """End the request; return its events, in order, as sets."""
        self.manager.on_request_finished(self.context)
        return [(event.removed, event.medium, set(event.keys)) for event in self.manager.take_events()]


def by_group(chunks: Sequence[Sequence[bytes]]) -> list[OffloadKey]:
    """Return the keys of chunks in the order in which vLLM offers them: one group after the other."""
    return [OffloadKey(keys[group]) for group in range(GROUPS) for keys in chunks]


def prompts(random: Random) -> list[list[bytes]]:
    """Return the prompts of chats that grow from turn to turn."""
    chats = [[random.randbytes(16) for _ in range(MOST_CHUNKS)] for _ in range(6)]
    return [random.choice(chats)[: random.randint(1, MOST_CHUNKS)] for _ in range(80)]


@pytest.mark.parametrize("batch", [1, 3, MOST_CHUNKS])
@pytest.mark.parametrize("seed", range(6))
def test_sequential_requests_agree(seed: int, batch: int) -> None:
    managers, compared = (kvtier_manager(), vllm_manager()), 0
    for number, prompt in enumerate(prompts(Random(seed))):
        ours, theirs = lives = [Life(manager, f"r{number}", prompt) for manager in managers]
        assert ours.hits == theirs.hits
        for first in range(ours.hits, len(prompt), batch):
            for life in lives:
                life.store(first, min(first + batch, len(prompt)))
        if set(theirs.evicted).intersection(by_group(theirs.prompt)):
            managers = kvtier_manager(), vllm_manager()  # vLLM has evicted the prefix of this very request
            continue
        assert set(ours.evicted) == set(theirs.evicted)
        assert ours.end() == theirs.end()
        compared += 1
    assert compared > 40


@pytest.mark.parametrize("batch", [1, 3, MOST_CHUNKS])
def test_concurrent_requests_hit_as_often(batch: int) -> None:
    ours, theirs = (
        sum(hits_of(make(), seed, batch) for seed in range(6)) for make in (kvtier_manager, vllm_manager)
    )
    assert ours >= 0.98 * theirs > 0


def hits_of(manager: OffloadingManager, seed: int, batch: int) -> int:
    """Return the hits of a trace that runs four requests at a time."""
    random, hits = Random(seed), 0
    running: list[tuple[Life, int]] = []
    for number, prompt in enumerate(prompts(Random(seed))):
        life = Life(manager, f"r{number}", prompt)
        hits += life.hits
        running.append((life, life.hits))
        while len(running) > 3:
            life, done = running.pop(random.randrange(len(running)))
            if done >= len(life.prompt):
                life.end()
            else:
                life.store(done, min(done + batch, len(life.prompt)))
                running.append((life, done + batch))
    return hits
