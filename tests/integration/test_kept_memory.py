"""The primary tier's memory outlives a killed engine; the next engine loads from it."""

from __future__ import annotations

import itertools
import mmap
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from kvtier import Identity
from kvtier._build import adopted_slots
from kvtier._core.slot_trailers import slot_trailers_bytes
from kvtier._memory._locked_file import KEPT, KEPT_FOR, NOTE_BYTES
from kvtier._memory.region import Region
from kvtier.keys import pack_key
from kvtier.tiers._seal import seal
from kvtier_bench.engine.compared import EngineError
from tests.common import wait_until, wait_while
from tests.effort import effort
from tests.integration import kills
from tests.integration.conftest import Ask
from tests.integration.harness import (
    OUTPUT_TOKENS,
    PROMPT_CHUNKS,
    SHARED_MEMORY,
    TWO_RANKS,
    Engine,
    Launcher,
    Tokens,
    prompt,
)

PROCESS = "kvtier_bench.engine.process"
SETTINGS = {"cpu_bytes_to_use": "64MiB", "keep_host_memory_s": 600}

Regions = Callable[[], list[Path]]


def owner_of(region: Path) -> str:
    """Return the engine's token in a region's note; "" if the region is not to be kept."""
    with region.open("rb") as file:
        file.seek(-NOTE_BYTES, os.SEEK_END)
        note = file.read().decode(errors="replace")
    return note.removeprefix(KEPT_FOR).split(" ")[0] if note.startswith(KEPT_FOR) else ""


@pytest.fixture(scope="module")
def owner(launcher: Launcher, llama: Path) -> str:
    """The token of these tests' engines."""
    with launcher.start(llama, SETTINGS | {"keep_host_memory_s": 0.1}) as engine:
        (region,) = engine.regions
        return owner_of(region)


@pytest.fixture
def regions(owner: str) -> Iterator[Regions]:
    """Find the memory of these engines, kept or in use; remove it at the end."""

    def find() -> list[Path]:
        return [path for path in SHARED_MEMORY.glob("kvtier_*") if _is_of(owner, path)]

    yield find
    for path in find():
        path.unlink()


def _is_of(owner: str, region: Path) -> bool:
    try:
        return owner_of(region) == owner
    except OSError:  # its guard renames it, or it is too short for a note
        return False


def is_kept(regions: Regions) -> bool:
    return [path.name.endswith(KEPT) for path in regions()] == [True]


@contextmanager
def started(launcher: Launcher, model: Path) -> Iterator[Engine]:
    """Run an engine until its tier process is ready, and yield it."""
    with launcher.start(model, SETTINGS) as engine:
        engine.until_up("adopted")
        yield engine


def killed(engine: Engine, regions: Regions) -> None:
    """Kill an engine that has stored everything; wait until its guard keeps the memory."""
    engine.settled()
    engine.kill()
    wait_until(lambda: is_kept(regions))


def test_chunks_survive_a_killed_engine(
    launcher: Launcher, llama: Path, reference: Ask, regions: Regions
) -> None:
    prompts = [prompt(seed) for seed in (1, 2, 3)]
    with started(launcher, llama) as engine:
        assert engine.served(*prompts[:2]) == (reference(*prompts[:2]), {})
        killed(engine, regions)
    with started(launcher, llama) as engine:
        assert not is_kept(regions)
        again = engine.served(*prompts)
        engine.reset(connector=False)
        once_more = engine.served(*prompts)
        killed(engine, regions)
    assert again == (reference(*prompts), {"adopted": 2 * PROMPT_CHUNKS})
    assert once_more == (reference(*prompts), {"cpu": 3 * PROMPT_CHUNKS})
    with started(launcher, llama) as engine:  # the chunks of two engines
        wait_until(lambda: not engine.call("unverified", module=PROCESS)["chunks"])
        assert engine.served(*prompts) == (reference(*prompts), {"adopted": 3 * PROMPT_CHUNKS})
        assert not engine.last.value("vllm:kv_offload_tiering_chunk_queries", tier="adopted")


@pytest.mark.full
def test_both_ranks_find_their_parts(
    launcher: Launcher, llama: Path, reference: Ask, regions: Regions
) -> None:
    for expected in ({}, {"adopted": PROMPT_CHUNKS}):
        with launcher.start(llama, SETTINGS, **TWO_RANKS) as engine:
            engine.until_up("adopted")
            assert engine.served(prompt(1)) == (reference(prompt(1)), expected)
            killed(engine, regions)


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
    launcher: Launcher, llama: Path, reference: Ask, regions: Regions
) -> None:
    """Since then it may have had weights other than those in the model's files."""
    with started(launcher, llama) as engine:
        engine.served(prompt(1))
        engine.reset()
        engine.served(prompt(2))
        killed(engine, regions)
    for expected in ({}, {"adopted": 2 * PROMPT_CHUNKS}):
        with started(launcher, llama) as engine:
            assert engine.served(prompt(1), prompt(2)) == (reference(prompt(1), prompt(2)), expected)
            killed(engine, regions)


class Restarts:
    """Engines that use the same memory one after the other. A process of each is killed at a random moment.

    Args:
        launcher: starts them.
        model: the model of all engines.
        reference: the right answers.
        regions: finds their memory.
        chance: draws victims, moments and prompts.
        settings: kvtier's settings.
        arguments: arguments of ``Launcher.start``.

    Attributes:
        counts: kills by victim and moment, and adopted chunks that were loaded.
    """

    def __init__(
        self,
        launcher: Launcher,
        model: Path,
        reference: Ask,
        regions: Regions,
        chance: random.Random,
        settings: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._launcher, self._reference, self._regions = launcher, reference, regions
        self._chance = chance
        self._start = lambda prepare=None: launcher.start(model, settings, prepare=prepare, **arguments)
        self._moments = [it for it in kills.LINES if it != "promotion" or "secondary_tiers" in settings]
        self._victims = [kills.ENGINE, kills.TIERS, kills.GUARD, kills.ALL]
        self._victims += [kills.WORKER] if arguments else []
        self._first = len(launcher.engines)
        self._prompts = (prompt(seed) for seed in itertools.count(chance.getrandbits(40)))
        self._asked = [next(self._prompts) for _ in range(4)]  # the most recent ones first
        self._whole: Sequence[Tokens] = ()  # prompts whose chunks were stored: the next engine has them
        self._was_reset = True  # or has never run
        self._inode: int | None = None  # of their memory
        self._is_guarded = False  # if not, an engine that another test starts removes it

    def run(self, rounds: int) -> None:
        """Kill an engine per round, and stop the last one in an orderly way."""
        for _ in range(rounds):
            self._restart()
        with self._start() as engine:
            self._check(engine)
        wait_until(lambda: is_kept(self._regions))
        self._regions()[0].unlink()
        wait_while(lambda: self._regions() or kills.guards(self._pids))

    @property
    def _pids(self) -> list[int]:
        return [engine.pid for engine in self._launcher.engines[self._first :]]

    def _restart(self) -> None:
        chance, moment = self._chance, self._chance.choice(self._moments)
        arm: dict[str, Any] = {
            "function": "arm",
            "module": kills.__name__,
            "moment": moment,
            "line": int(exp(chance.uniform(0, log(kills.LINES[moment])))),
            "delay_s": chance.choice([0.0, exp(chance.uniform(log(1e-4), log(2e-2)))]),
            "victim": (victim := chance.choice(self._victims)),
            "engines": self._pids,
        }
        is_late = moment != "adoption"
        try:
            with self._start(None if is_late else arm) as engine:
                self._check(engine)
                if is_late:
                    engine.call(**arm)
                self._use(engine, is_reset=moment == "reset" or chance.random() < 0.1)
                engine.kill()
        except EngineError:
            if kills.KILLED not in self._launcher.engines[-1].log():
                raise
        was_hit = kills.KILLED in self._launcher.engines[-1].log()
        self.counts[f"{victim} in {moment}" if was_hit else f"all after {moment}"] += 1
        self._is_guarded = is_late and not (victim == kills.GUARD and was_hit)
        if self._is_guarded and chance.random() < 0.5:  # if not, the next engine starts at once
            wait_until(lambda: is_kept(self._regions))

    def _check(self, engine: Engine) -> None:
        """Compare the chunks that the previous engine's memory must hold."""
        engine.until_up("adopted")
        (inode,) = {path.stat().st_ino for path in self._regions()}
        if inode != self._inode:
            assert not self._is_guarded
            self._inode, self._whole = inode, ()
        answers, found = engine.served(*self._asked[:4])
        assert answers == self._reference(*self._asked[:4])
        assert found.get("adopted", 0) + found.get("cpu", 0) >= len(self._whole) * PROMPT_CHUNKS, found
        assert not (self._was_reset and "adopted" in found), found
        self._whole, self._was_reset = self._asked[:4], False
        self.counts["adopted chunks"] += found.get("adopted", 0)
        self.counts["engines that adopted"] += "adopted" in found

    def _use(self, engine: Engine, *, is_reset: bool) -> None:
        """Store, load, and optionally reset. The engine may be killed meanwhile."""
        new = [next(self._prompts) for _ in range(4)]
        old = self._chance.sample(self._asked, 4)
        self._asked = [*self._chance.sample([*self._whole, *new], 4), *self._asked][:40]
        self._whole = [one for one in self._whole if one in self._asked[:4]]
        for prompts in (new, [*old, *new]):
            assert engine.generate(*prompts, together=True) == self._reference(*prompts)
            engine.call("forget", module=PROCESS)
        if is_reset:
            self._whole, also = (), [next(self._prompts) for _ in range(2)]
            order: dict[str, Any] = {"prompts": [*new, *also], "output_tokens": OUTPUT_TOKENS}
            answer = engine.call("requests", **order, resets=[(self._chance.randrange(1, 4), True)])
            assert answer["answers"] == self._reference(*new, *also)
            self._was_reset = all(answer["were_reset"])


def restart_often(restarts: Restarts, rounds: int) -> None:
    try:
        restarts.run(rounds)
    finally:
        print(*sorted(restarts.counts.items()), sep="\n")


@pytest.mark.parametrize("seed", range(effort(1, 9)))
def test_processes_killed_at_any_moment(
    launcher: Launcher, llama: Path, reference: Ask, regions: Regions, tmp_path: Path, seed: int
) -> None:
    files = {"secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}
    settings = SETTINGS | {"cpu_bytes_to_use": "32MiB"} | (files if seed % 2 else {})
    restarts = Restarts(launcher, llama, reference, regions, random.Random(seed), settings, {})
    restart_often(restarts, effort(3, 20))
    assert restarts.counts["adopted chunks"] > 0


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_processes_of_two_ranks_killed(
    launcher: Launcher, llama: Path, reference: Ask, regions: Regions, seed: int
) -> None:
    restarts = Restarts(launcher, llama, reference, regions, random.Random(seed), SETTINGS, TWO_RANKS)
    restart_often(restarts, 10)
    assert restarts.counts["adopted chunks"] > 0
