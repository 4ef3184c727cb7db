"""The primary tier's memory outlives an engine that is killed; the next engine loads from it."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtier import Identity
from kvtier._build import adopted_slots
from kvtier._core.slot_trailers import slot_trailers_bytes
from kvtier._memory.region import Region
from kvtier.keys import pack_key
from kvtier.tiers._seal import seal
from kvtier_bench.engine.compared import EngineError
from tests.common import wait_until
from tests.integration.conftest import Ask
from tests.integration.harness import PROMPT_CHUNKS, TWO_RANKS, Engine, Launcher, prompt

SHM = Path("/dev/shm")
PROCESS = "kvtier_bench.engine.process"
SETTINGS = {"cpu_bytes_to_use": "64MiB", "keep_host_memory_s": 600}


def kept() -> list[Path]:
    return [*SHM.glob("kvtier_*.kept")]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    for path in kept():
        path.unlink()


@contextmanager
def started(launcher: Launcher, model: Path) -> Iterator[Engine]:
    """Run an engine whose tier process is ready."""
    with launcher.start(model, SETTINGS) as engine:
        engine.until_up("adopted")
        yield engine


def killed(engine: Engine) -> None:
    """Kill an engine that has stored everything, and wait until its guard keeps the memory."""
    engine.settled()
    engine.kill()
    wait_until(lambda: len(kept()) == 1)


def test_chunks_survive_a_killed_engine(launcher: Launcher, llama: Path, reference: Ask) -> None:
    prompts = [prompt(seed) for seed in (1, 2, 3)]
    with started(launcher, llama) as engine:
        assert engine.served(*prompts[:2]) == (reference(*prompts[:2]), {})
        killed(engine)
    with started(launcher, llama) as engine:
        assert not kept()
        again = engine.served(*prompts)
        engine.reset(connector=False)
        once_more = engine.served(*prompts)
        killed(engine)
    assert again == (reference(*prompts), {"adopted": 2 * PROMPT_CHUNKS})
    assert once_more == (reference(*prompts), {"cpu": 3 * PROMPT_CHUNKS})
    with started(launcher, llama) as engine:  # the chunks of two engines
        wait_until(lambda: not engine.call("unverified", module=PROCESS)["chunks"])
        assert engine.served(*prompts) == (reference(*prompts), {"adopted": 3 * PROMPT_CHUNKS})
        assert not engine.last.value("vllm:kv_offload_tiering_chunk_queries", tier="adopted")


@pytest.mark.full
def test_engine_killed_at_any_moment(launcher: Launcher, llama: Path, reference: Ask) -> None:
    generator, prompts, loaded = random.Random(3), [prompt(seed) for seed in range(1, 13)], 0
    for _ in range(8):
        with started(launcher, llama) as engine:
            answers, found = engine.served(*prompts[:4])
            assert answers == reference(*prompts[:4])
            loaded += found.get("adopted", 0)
            generator.shuffle(prompts)
            killer = threading.Timer(generator.uniform(0.0, 2.0), os.kill, (engine.pid, signal.SIGKILL))
            killer.start()
            with suppress(EngineError):
                engine.generate(*prompts, together=True)
                engine.reset(connector=generator.random() < 0.2)
                engine.generate(*prompts)
            killer.join()
            engine.kill()
        wait_until(lambda: len(kept()) == 1)
    assert loaded > 0


@pytest.mark.full
def test_both_ranks_find_their_parts(launcher: Launcher, llama: Path, reference: Ask) -> None:
    for expected in ({}, {"adopted": PROMPT_CHUNKS}):
        with launcher.start(llama, SETTINGS, **TWO_RANKS) as engine:
            engine.until_up("adopted")
            assert engine.served(prompt(1)) == (reference(prompt(1)), expected)
            killed(engine)


def test_chunks_of_another_identity_are_not_adopted() -> None:
    ours, theirs = Identity.make("model", {"weights": 1}), Identity.make("model", {"weights": 2})
    keys = [pack_key(bytes([number])) for number in range(3)]
    with Region.unnamed(4, mmap.PAGESIZE, slot_trailers_bytes(4)) as region:
        region.trailers.fill(range(4))
        for slot, (key, identity) in enumerate(
            [(keys[0], ours), (keys[1], theirs), (keys[2], ours), (keys[0], ours)]
        ):
            region.trailers.write(slot, seal(key, region.view(slot), identity.short_digest))
            region.trailers.use([slot])
        assert [*adopted_slots(region.trailers, ours).items()] == [(keys[2], 2), (keys[0], 3)]


def test_nothing_is_adopted_from_an_engine_that_was_reset(
    launcher: Launcher, llama: Path, reference: Ask
) -> None:
    """It may have had other weights since than those in the model's files."""
    with started(launcher, llama) as engine:
        engine.served(prompt(1))
        engine.reset()
        engine.served(prompt(2))
        killed(engine)
    for expected in ({}, {"adopted": 2 * PROMPT_CHUNKS}):
        with started(launcher, llama) as engine:
            assert engine.served(prompt(1), prompt(2)) == (reference(prompt(1), prompt(2)), expected)
            killed(engine)
