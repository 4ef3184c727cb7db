"""What becomes of requests when the cache fails: the same faults for all systems.

Each fault has prompts of its own, whose chunks lie in files when the system is started again. Answers are
compared with those of an engine without a cache: tokens, and the logarithm of each one's probability,
because a damaged cache need not change the likeliest token.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_bench.engine.compared import PLAIN, EngineError, make_model, make_prompt, say
from kvtier_bench.engine.versus.systems import NotRun, System
from kvtier_bench.machine import drop_from_page_cache

CONTROL, FLIPPED, CUT, ZEROED = "none (control)", "one bit flipped", "file cut in half", "second half zeros"
WEIGHTS, KILLED, STOPPED = (
    "weights replaced in place",
    "kill -9 of the cache's process",
    "SIGSTOP of the cache's process for 15 s",
)
FULL, TENSORS = "disk full", "two tensor-parallel sizes, one directory"
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 512, 16
TOLERANCE = 0.01  # of a logarithm of a probability; equal engines differ by 0.0001
HANG_S, PATIENCE_S, PAUSE_S = 15.0, 120.0, 10.0
DISK_MIB = 24
_UNDER_WAY_S = 0.5  # a request that waits for a stopped process has come as far as it can
_NEW_WEIGHTS = 7


@dataclass(frozen=True)
class Outcome:
    """Faults: what became of requests

    Attributes:
        wrong: answers that differ from those of an engine without a cache, of all.
        failed: requests without an answer, of all.
        longest_s: until the last answer or failure.
        from_cache: tokens of prompts that were not computed, of all.
        recovers: what the same prompts got later: "yes" where all is right and comes from the cache again.
    """

    fault: str
    system: str
    wrong: str
    failed: str
    longest_s: float
    from_cache: str
    recovers: str


@dataclass(frozen=True)
class Bounded:
    """Disk full: what is left on a file system of a few MiB after more was stored than it holds"""

    system: str
    size_mib: int
    stored_mib: float
    free_mib: float


Answers = Mapping[str, Any]


def _later(fault: str) -> list[str]:
    """Return which prompts are sent after a fault: others where the same would come from host memory."""
    if fault in (STOPPED, KILLED):
        return [f"{fault}, {number} later" for number in range(4)]
    return [fault, fault]


_STORED = (
    *(CONTROL, FLIPPED, CUT, ZEROED, STOPPED, KILLED),
    *(prompts for fault in (STOPPED, KILLED) for prompts in _later(fault)),
)


def prompts_of(fault: str) -> list[list[int]]:
    """Return the prompts of a fault."""
    return [make_prompt(f"{fault} {i}", PROMPT_TOKENS) for i in range(PROMPTS)]


def count_wrong(answer: Answers, reference: Answers) -> int:
    """Count answers whose tokens, or probabilities of them, are not those of the reference."""
    return sum(
        tokens != expected or not all(map(_is_close, found, wanted))
        for tokens, expected, found, wanted in zip(
            answer["answers"], reference["answers"], answer["logprobs"], reference["logprobs"], strict=True
        )
        if len(tokens) == len(expected)  # else it has failed
    )


def count_failed(answer: Answers, reference: Answers) -> int:
    """Count answers that ended early."""
    pairs = zip(answer["answers"], reference["answers"], strict=True)
    return sum(len(tokens) != len(expected) for tokens, expected in pairs)


def _is_close(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted, abs_tol=TOLERANCE, rel_tol=0.0)  # nothing is close to NaN


class Faults:
    """Has one system after another go through all faults.

    Args:
        make: makes a system that has never run, with its files below a directory.
        folder: for files.
        models: for models.
        size: of the model.
    """

    def __init__(self, make: Callable[[str, Path], System], folder: Path, models: Path, size: str) -> None:
        self._make = make
        self._folder = folder
        self._old = make_model(models, size)
        self._new = make_model(models, size, _NEW_WEIGHTS)
        self._model = models / "replaced"
        self._reference: dict[str, Answers] = {}

    def run(self, names: Sequence[str]) -> Iterator[Outcome | Bounded | NotRun]:
        """Yield what was found."""
        self._refer((*_STORED, FULL), self._old)
        self._refer((WEIGHTS,), self._new)
        for name in names:
            system = self._make(name, self._folder)
            try:
                yield from self._go_through(system)
            except (EngineError, OSError) as error:
                say(str(error))
                yield NotRun(name, f"faults: {str(error).partition(chr(10))[0]}")
            finally:
                system.stop()
            yield from self._fill_disk(name)
        yield NotRun("all", f"{TENSORS}: the engines of this benchmark have one rank")

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

    def _go_through(self, system: System) -> Iterator[Outcome | NotRun]:
        self._replace_model(self._old)
        system.start(self._model)
        files = {prompts: self._fill(system, prompts) for prompts in (*_STORED, WEIGHTS)}
        system.stop()
        for fault, damage in _DAMAGES.items():
            for path in files[fault]:
                damage(path)
        drop_from_page_cache(system.files)
        system.start(self._model)
        for fault in (CONTROL, *_DAMAGES):
            yield self._ask(system, fault)
        if system.cache_process() is None:
            for fault in (KILLED, STOPPED):
                yield NotRun(system.name, f"{fault}: the cache runs in the engine's process")
        else:
            # Stopped before they are sent, so that requests wait for it: it is killed in mid-request.
            _signal(system, signal.SIGSTOP)
            continue_it = lambda: _signal(system, signal.SIGCONT)  # noqa: E731
            yield self._ask(system, STOPPED, lambda: _call_after(HANG_S, continue_it))
            _signal(system, signal.SIGSTOP)
            yield self._ask(system, KILLED, lambda: _call_after(_UNDER_WAY_S, lambda: _kill(system)))
        system.stop()
        self._replace_model(self._new)
        system.start(self._model)
        yield self._ask(system, WEIGHTS)

    def _fill(self, system: System, prompts: str) -> list[Path]:
        before = system.chunks()
        system.ask(prompts_of(prompts), 1)
        system.settle()
        return [path for path in system.chunks() if path not in before]

    def _ask(self, system: System, fault: str, meanwhile: Callable[[], object] | None = None) -> Outcome:
        """Ask for the prompts of a fault while something happens, and see what comes after it."""
        say(f"{system.name}: {fault}")
        started = time.perf_counter()
        answer = self._answer(system, fault, meanwhile)
        waited_s = time.perf_counter() - started if answer is None else answer["wall_s"]
        if answer is None:
            system.kill_engine()
            system.stop()
            system.start(self._model)
        failed, wrong, cached = self._judge(answer, fault)
        after = ", after the engine was started again" if answer is None else ""
        return Outcome(
            fault,
            system.name,
            f"{wrong} of {PROMPTS}",
            f"{failed} of {PROMPTS}",
            waited_s,
            f"{cached} of {PROMPTS * PROMPT_TOKENS}",
            self._recovers(system, fault) + after,
        )

    def _answer(
        self, system: System, prompts: str, meanwhile: Callable[[], object] | None = None
    ) -> Answers | None:
        """Return the answers; None if the engine has died, or does not answer."""
        engine = system.engine
        assert engine is not None
        order = {"prompts": prompts_of(prompts), "output_tokens": OUTPUT_TOKENS, "logprobs": 0}
        try:
            engine.tell("generate", **order)
            if meanwhile is not None:
                meanwhile()
            return engine.hear("generate", PATIENCE_S)
        except EngineError as error:
            say(str(error)[-3000:])
            return None

    def _judge(self, answer: Answers | None, prompts: str) -> tuple[int, int, int]:
        """Return how many answers have failed, how many are wrong, and tokens from the cache."""
        if answer is None:
            return PROMPTS, 0, 0
        reference = self._reference[prompts]
        return count_failed(answer, reference), count_wrong(answer, reference), sum(answer["cached"])

    def _recovers(self, system: System, fault: str) -> str:
        """Return what becomes of requests after a fault: of the same, or of others in files."""
        for number, prompts in enumerate(_later(fault)):
            time.sleep(PAUSE_S if number else 0.0)
            system.forget()
            failed, wrong, cached = self._judge(self._answer(system, prompts), prompts)
            if failed or wrong:
                return f"no: {wrong} wrong, {failed} failed"
            if cached:
                return f"yes, {number * PAUSE_S:.0f} s later" if number else "yes"
            system.settle()
        return "right answers, nothing from the cache"

    def _fill_disk(self, name: str) -> Iterator[Outcome | Bounded | NotRun]:
        """Store more than a file system holds, and ask for the last of it after a restart."""
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
            try:
                system.start(self._model)
                for number in range(6):
                    system.ask(prompts_of(f"filler {number}"), 1)
                    system.settle()
                outcome = self._ask(system, FULL)
                system.settle()
                disk = shutil.disk_usage(folder)
                yield Bounded(name, DISK_MIB, disk.used / 2**20, disk.free / 2**20)
                system.stop()
                system.start(self._model)
                _, _, cached = self._judge(self._answer(system, FULL), FULL)
                newest = "yes: the newest is in files" if cached else "no: the newest is not in files"
                yield dataclasses.replace(outcome, recovers=newest)
            except (EngineError, OSError) as error:
                say(str(error))
                yield NotRun(name, f"{FULL}: {str(error).partition(chr(10))[0]}")


# --- faults -------------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    """Flip the highest bit of the exponent of one number in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 8 * 4 + 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zero(path: Path) -> None:
    """Leave what a crash does of a file that was not flushed: its length, and zeros at its end."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


_DAMAGES: Mapping[str, Callable[[Path], None]] = {FLIPPED: flip_a_bit, CUT: _cut, ZEROED: _zero}


def _call_after(seconds: float, end: Callable[[], None]) -> None:
    time.sleep(seconds)
    end()


def _signal(system: System, number: signal.Signals) -> None:
    if (process := system.cache_process()) is not None:
        with suppress(ProcessLookupError):  # somebody has ended it
            os.kill(process, number)


def _kill(system: System) -> None:
    _signal(system, signal.SIGKILL)
    system.restart_cache()


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
