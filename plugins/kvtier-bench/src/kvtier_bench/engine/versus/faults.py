"""Requests while the cache fails: the same faults for all systems.

Each fault has its own prompts. Their chunks are in files when the system is restarted. Answers are compared
with the answers of an engine without a cache: tokens, and each token's log probability, because a damaged
cache need not change the likeliest token.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from kvtier_bench.engine.compared import PLAIN, EngineError, make_model, make_prompt, say
from kvtier_bench.engine.versus.systems import KEEP_S, NATIVE, NO_MORE_S, NotRun, System
from kvtier_bench.machine import drop_from_page_cache

CONTROL, FLIPPED, CUT, ZEROED = "none (control)", "one bit flipped", "file cut in half", "second half zeros"
WEIGHTS, KILLED, STOPPED = (
    "weights replaced in place",
    "kill -9 of the cache's process",
    "SIGSTOP of the cache's process for 15 s",
)
PROCESS = (STOPPED, KILLED)
HOST = "one bit flipped in kept host memory, engine restarted"
FULL, TENSORS = "disk full", "two tensor-parallel sizes, one directory"
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 512, 16
RUNS = 3  # Runs per fault of a process, because the outcome depends on its state at that moment.
TOLERANCE = 0.01  # Tolerance of log probabilities. Equal engines differ by 0.0001.
HANG_S, PATIENCE_S, PAUSE_S = 15.0, 60.0, 10.0
DISK_MIB = 24
_UNDER_WAY_S = 0.5  # By then a request that waits for a stopped process makes no more progress.
_NEW_WEIGHTS = 7
_POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """Faults: the outcome of requests

    Attributes:
        wrong: answers that differ from those of an engine without a cache, out of all.
        failed: requests without an answer, out of all.
        longest_s: seconds until the last answer or failure; "> 60" if the wait ended there.
        from_cache: prompt tokens that were not computed, of all.
        recovers: result of sending the same prompts later: "yes" if all answers are right and come from the
            cache again.
        error: the first failure.
    """

    fault: str
    system: str
    wrong: str
    failed: str
    longest_s: str
    from_cache: str
    recovers: str
    error: str | None


@dataclass(frozen=True)
class Bounded:
    """Disk full: free space on a file system of a few MiB after more was stored than it holds"""

    system: str
    size_mib: int
    stored_mib: float
    free_mib: float


Answers = Mapping[str, Any]
Record = Outcome | Bounded | NotRun


@dataclass(frozen=True)
class _Seen:
    failed: int
    wrong: int
    cached: int
    longest_s: float
    error: str | None = None
    given_up: bool = False
    recovers: str = ""


def _run_of(fault: str, number: int) -> str:
    return f"{fault}, run {number}"


def _later(prompts: str) -> list[str]:
    """Return the prompts to send after a fault: new ones if host memory would answer the same ones."""
    if prompts.startswith(PROCESS):
        return [f"{prompts}, {number} later" for number in range(3)]
    return [prompts, prompts]


_DAMAGED = (CONTROL, FLIPPED, CUT, ZEROED)
_BY_ONE, _BY_TWO = f"{TENSORS}, stored by one rank", f"{TENSORS}, stored by two"
_RUNS = tuple(_run_of(fault, number) for fault in PROCESS for number in range(RUNS))
_OF_PROCESS = (*_RUNS, *(prompts for one in _RUNS for prompts in _later(one)))


def prompts_of(fault: str) -> list[list[int]]:
    """Return the prompts of a fault."""
    return [make_prompt(f"{fault} {i}", PROMPT_TOKENS) for i in range(PROMPTS)]


def count_wrong(answer: Answers, reference: Answers) -> int:
    """Count answers whose tokens or log probabilities differ from the reference."""
    return sum(
        tokens != expected or not all(map(_is_close, found, wanted))
        for tokens, expected, found, wanted in zip(
            answer["answers"], reference["answers"], answer["logprobs"], reference["logprobs"], strict=True
        )
        if len(tokens) == len(expected)  # otherwise the request failed
    )


def count_failed(answer: Answers, reference: Answers) -> int:
    """Count the answers that ended early."""
    pairs = zip(answer["answers"], reference["answers"], strict=True)
    return sum(len(tokens) != len(expected) for tokens, expected in pairs)


def _is_close(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted, abs_tol=TOLERANCE, rel_tol=0.0)  # nothing is close to NaN


class Faults:
    """Applies all faults to one system after another.

    Args:
        make: creates a system that has never run, with its files below a directory.
        folder: directory for files.
        models: directory for models.
        size: size of the model.
    """

    def __init__(self, make: Callable[[str, Path], System], folder: Path, models: Path, size: str) -> None:
        self._make = make
        self._folder = folder
        self._old = make_model(models, size)
        self._new = make_model(models, size, _NEW_WEIGHTS)
        self._model = models / "replaced"
        self._reference: dict[str, Answers] = {}

    def run(self, names: Sequence[str]) -> Generator[Record]:
        """Yield the findings."""
        self._refer((*_DAMAGED, *_OF_PROCESS, FULL, _BY_ONE, _BY_TWO, HOST), self._old)
        self._refer((WEIGHTS,), self._new)
        for name in names:
            self._replace_model(self._old)
            system = self._make(name, self._folder)
            try:
                yield from self._attempt(system, "faults", self._go_through)
            finally:
                system.stop()
            yield from self._fill_disk(name)
            yield from self._share_directory(name)
            yield from self._damage_memory(name)

    def _attempt(
        self, system: System, fault: str, go: Callable[[System], Iterator[Record]]
    ) -> Iterator[Record]:
        """Apply a fault to a running system. An error is recorded; later faults still run."""
        try:
            self._start(system)
            yield from go(system)
        except (EngineError, OSError) as error:
            say(str(error))
            system.stop()
            yield NotRun(system.name, f"{fault}: {_first_line(error)}")

    def _start(self, system: System) -> None:
        if system.engine is None:
            system.start(self._model)

    def _refer(self, names: Sequence[str], model: Path) -> None:
        system = self._make(PLAIN, self._folder)
        self._replace_model(model)
        try:
            system.start(self._model)
            for prompts in names:
                self._reference[prompts] = system.ask(prompts_of(prompts), OUTPUT_TOKENS)
        finally:
            system.stop()

    def _replace_model(self, model: Path) -> None:
        shutil.copytree(model, self._model, dirs_exist_ok=True)

    def _go_through(self, system: System) -> Iterator[Record]:
        own_process = system.cache_process() is not None
        stored = (*_DAMAGED, WEIGHTS, *(_OF_PROCESS if own_process else ()))
        files = {prompts: self._fill(system, prompts) for prompts in stored}
        system.stop()
        for fault, damage in _DAMAGES.items():
            for path in files[fault]:
                damage(path)
        drop_from_page_cache(system.files)
        for fault in _DAMAGED:
            yield from self._attempt(system, fault, partial(self._ask_stored, fault, files[fault]))
        for fault in PROCESS:
            if own_process:
                yield from self._attempt(system, fault, partial(self._signal, fault))
            else:
                yield NotRun(system.name, f"{fault}: the cache runs in the engine's process")
        system.stop()
        self._replace_model(self._new)
        yield from self._attempt(system, WEIGHTS, partial(self._ask_stored, WEIGHTS, files[WEIGHTS]))

    def _ask_stored(self, fault: str, files: Sequence[Path], system: System) -> Iterator[Record]:
        if not files:
            raise EngineError("no file holds chunks of its prompts, so nothing was damaged")
        yield _outcome(fault, system, [self._ask(system, fault)])

    def _signal(self, fault: str, system: System) -> Iterator[Record]:
        """Stop the cache's process, so that requests wait for it; then resume or kill it."""
        seen = []
        for number in range(RUNS):
            self._start(system)
            if (process := system.cache_process()) is None:
                raise EngineError("there is no process of the cache")
            os.kill(process, signal.SIGSTOP)
            try:
                seen.append(self._ask(system, _run_of(fault, number), partial(_END[fault], system, process)))
            finally:
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(process, signal.SIGCONT)
        yield _outcome(fault, system, seen)

    def _fill(self, system: System, prompts: str) -> list[Path]:
        before = system.chunks()
        system.ask(prompts_of(prompts), 1)
        system.await_stores()
        return [path for path in system.chunks() if path not in before]

    def _ask(self, system: System, prompts: str, meanwhile: Callable[[], object] | None = None) -> _Seen:
        """Send the prompts of a fault while ``meanwhile`` runs, then check the state."""
        say(f"{system.name}: {prompts}")
        seen = self._answer(system, prompts, meanwhile)
        after = ", after the engine was started again" if system.engine is None else ""
        return replace(seen, recovers=self._recovers(system, prompts) + after)

    def _answer(self, system: System, prompts: str, meanwhile: Callable[[], object] | None = None) -> _Seen:
        """Return the outcome of requests. Kill an engine that has died or does not answer."""
        self._start(system)
        engine = system.engine
        assert engine is not None
        order = {"prompts": prompts_of(prompts), "output_tokens": OUTPUT_TOKENS, "logprobs": 0}
        started = time.perf_counter()
        engine.tell("generate", **order)
        if meanwhile is not None:
            meanwhile()
        listening = time.perf_counter()
        try:
            answer = engine.hear("generate", PATIENCE_S)
        except EngineError as error:
            ended = time.perf_counter()
            say(str(error)[-3000:])
            system.kill_engine()
            system.stop()
            given_up = ended - listening >= PATIENCE_S
            return _Seen(PROMPTS, 0, 0, ended - started, _first_line(error), given_up)
        reference = self._reference[prompts]
        failed, wrong = count_failed(answer, reference), count_wrong(answer, reference)
        return _Seen(failed, wrong, sum(answer["cached"]), answer["wall_s"])

    def _recovers(self, system: System, prompts: str) -> str:
        """Return the outcome of requests after a fault, for the same prompts or for others from files."""
        for number, later in enumerate(_later(prompts)):
            time.sleep(PAUSE_S if number else 0.0)
            self._start(system)
            system.forget()
            seen = self._answer(system, later)
            if seen.failed or seen.wrong:
                return f"no: {seen.wrong} wrong, {seen.failed} failed"
            if seen.cached:
                return f"yes, {number * PAUSE_S:.0f} s later" if number else "yes"
            system.await_stores()
        return "right answers, nothing from the cache"

    def _fill_disk(self, name: str) -> Iterator[Record]:
        folder = self._folder / "full"
        with ExitStack() as stack:
            try:
                stack.enter_context(_small_disk(folder))
            except (OSError, subprocess.CalledProcessError) as error:
                yield NotRun(name, f"{FULL}: a tmpfs cannot be mounted here: {error}")
                return
            system = self._make(name, folder)
            stack.callback(system.stop)
            self._replace_model(self._old)
            yield from self._attempt(system, FULL, partial(self._overfill, folder))

    def _share_directory(self, name: str) -> Iterator[Record]:
        if name == NATIVE:
            reason = "vLLM shares chunks between sizes, which is meant for the layouts of its own workers"
            yield NotRun(name, f"{TENSORS}: {reason}")
            return
        (folder := self._folder / "ranks").mkdir(exist_ok=True)
        system = self._make(name, folder)
        system.is_canonical = True
        self._replace_model(self._old)
        try:
            yield from self._attempt(system, TENSORS, self._change_ranks)
        finally:
            system.stop()

    def _change_ranks(self, system: System) -> Iterator[Record]:
        """Read chunks stored by one rank with two ranks, then chunks stored by two ranks with one."""
        seen = []
        for prompts, ranks in ((_BY_ONE, 2), (_BY_TWO, 1)):
            self._start(system)
            if not self._fill(system, prompts):
                raise EngineError("no file holds chunks of its prompts")
            system.stop()
            system.ranks = ranks
            seen.append(self._ask(system, prompts))
        yield _outcome(TENSORS, system, seen)

    def _damage_memory(self, name: str) -> Iterator[Record]:
        if name == NATIVE:
            yield NotRun(name, f"{HOST}: its host memory ends with the engine")
            return
        (folder := self._folder / "kept").mkdir(exist_ok=True)
        system = self._make(name, folder)
        system.keep_s = KEEP_S
        self._replace_model(self._old)
        try:
            yield from self._attempt(system, HOST, self._restart_on_damage)
        finally:
            system.stop()

    def _restart_on_damage(self, system: System) -> Iterator[Record]:
        self._fill(system, HOST)
        memory = system.kept_memory()
        system.stop_engine()
        deadline = time.monotonic() + PATIENCE_S
        while memory is None or not memory.exists():
            if memory is None or time.monotonic() > deadline:
                raise EngineError("no host memory is kept")
            time.sleep(_POLL_S)
        flip_bits(memory, system.chunk_bytes)
        system.keep_s = NO_MORE_S
        yield _outcome(HOST, system, [self._ask(system, HOST)])

    def _overfill(self, folder: Path, system: System) -> Iterator[Record]:
        """Store more than a file system holds, and request the last prompts after a restart."""
        for number in range(6):
            system.ask(prompts_of(f"filler {number}"), 1)
            system.await_stores()
        seen = self._ask(system, FULL)
        self._start(system)
        system.await_stores()
        disk = shutil.disk_usage(folder)
        yield Bounded(system.name, DISK_MIB, disk.used / 2**20, disk.free / 2**20)
        system.stop()
        again = self._answer(system, FULL)
        newest = "the newest is in files" if again.cached else "the newest is not in files"
        if again.failed or again.wrong:
            newest = f"no: {again.wrong} wrong, {again.failed} failed"
        yield _outcome(FULL, system, [replace(seen, recovers=f"{seen.recovers}; after a restart: {newest}")])


def _outcome(fault: str, system: System, seen: Sequence[_Seen]) -> Outcome:
    runs = len(seen)
    longest = max(seen, key=lambda one: one.longest_s)
    recovers = Counter(one.recovers for one in seen)
    return Outcome(
        fault,
        system.name,
        _of_all([one.wrong for one in seen]),
        _of_all([one.failed for one in seen]),
        f"> {longest.longest_s:.0f}" if longest.given_up else f"{longest.longest_s:.1f}",
        f"{sum(one.cached for one in seen)} of {runs * PROMPTS * PROMPT_TOKENS}",
        "; ".join(f"{text} ({of} of {runs} runs)" if runs > 1 else text for text, of in recovers.items()),
        next((one.error for one in seen if one.error), None),
    )


def _of_all(counts: Sequence[int]) -> str:
    runs = f", in {sum(map(bool, counts))} of {len(counts)} runs" if len(counts) > 1 else ""
    return f"{sum(counts)} of {len(counts) * PROMPTS}{runs}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# --- faults -------------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    """Flip the highest exponent bit of one number in the middle of a file."""
    with path.open("r+b") as file:
        flip_number(file, path.stat().st_size // 8 * 4)


def flip_bits(path: Path, chunk_bytes: int) -> None:
    """Flip that bit in one number in each quarter of each whole chunk of a file."""
    with path.open("r+b") as file:
        chunks = path.stat().st_size // chunk_bytes
        for at in range(chunk_bytes // 8, chunks * chunk_bytes, chunk_bytes // 4):
            flip_number(file, at // 4 * 4)


def flip_number(file: IO[bytes], number: int) -> None:
    """Flip the highest exponent bit of the number at an offset."""
    file.seek(number + 3)
    byte = file.read(1)[0]
    file.seek(number + 3)
    file.write(bytes([byte ^ 0x40]))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zero(path: Path) -> None:
    """Leave an unflushed file as a crash would: the length is kept, but the end contains zeros."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


_DAMAGES: Mapping[str, Callable[[Path], None]] = {FLIPPED: flip_a_bit, CUT: _cut, ZEROED: _zero}


def _continue(_: System, process: int) -> None:
    time.sleep(HANG_S)
    with suppress(ProcessLookupError):  # it has ended
        os.kill(process, signal.SIGCONT)


def _kill(system: System, process: int) -> None:
    time.sleep(_UNDER_WAY_S)
    os.kill(process, signal.SIGKILL)
    system.restart_cache()


_END: Mapping[str, Callable[[System, int], None]] = {STOPPED: _continue, KILLED: _kill}


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)],
        check=True,
        capture_output=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
