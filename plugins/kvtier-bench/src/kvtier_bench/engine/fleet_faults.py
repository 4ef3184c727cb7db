"""Answers of an engine that reads another engine's memory, while that memory or engine fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier_bench.engine.compared import Sample
from kvtier_bench.engine.pair import Pair, Prompts
from kvtier_bench.engine.versus.faults import flip_number
from kvtier_bench.machine import family

CONTROL, ALTERED, STOPPED = (
    "none (control)",
    "bits flipped in the first engine's memory",
    "first engine stopped amid a fetch, and continued when its peer had given up",
)
_LATE_S = 3.0  # By then a resumed engine has sent all data in flight.


@dataclass(frozen=True)
class Fault:
    """Answers of the second engine when the first one fails

    Attributes:
        wrong: answers whose tokens differ from the computed answer, out of all.
        from_cache: tokens of the fetched prompts that were not computed, out of all.
        longest_s: longest time to the first token, in seconds.
    """

    fault: str
    way: str
    wrong: str
    from_cache: str
    longest_s: float


@dataclass(frozen=True)
class Seen:
    """The observations of one pair of engines during one fault.

    Attributes:
        pairs: pairs of a fetched and a computed answer.
        fetched: results of the prompts whose chunks the first engine had.
    """

    fault: str
    pairs: list[tuple[Sequence[int], Sequence[int]]]
    fetched: Sample


@dataclass(frozen=True)
class Faults:
    """Faults of a pair of engines. The second engine reads the first one's memory.

    Attributes:
        prompts: callable that makes the prompts for a name.
        memory_bytes: the size of the smallest memory that holds chunks.
    """

    pair: Pair
    prompts: Callable[[str], Prompts]
    memory_bytes: int
    chunk_bytes: int

    def run(self) -> Iterator[Seen]:
        """Yield the observations for each fault."""
        self._fetch(CONTROL, "the first fetch connects")
        control = self._fetch(CONTROL)
        yield control
        yield self._fetch(ALTERED, before=self._flip)
        yield self._stop(control.fetched.wall_s / 2)

    def _fetch(self, fault: str, name: str = "", before: Callable[[], object] = lambda: None) -> Seen:
        prompts = self.prompts(name or fault)
        computed = self.pair.ask(self.pair.first, prompts)
        before()
        fetched = self.pair.fetch(prompts)
        return Seen(fault, [*zip(fetched.answers, computed.answers, strict=True)], fetched)

    def _flip(self) -> None:
        flip_memory(self.pair.first.pid, self.memory_bytes, self.chunk_bytes)

    def _stop(self, after_s: float) -> Seen:
        """Stop the first engine during a fetch, and resume it after its peer has reused the slots."""
        prompts, others, second = self.prompts(STOPPED), self.prompts("other chunks"), self.pair.second
        computed = self.pair.ask(self.pair.first, prompts)

        def stop() -> None:
            time.sleep(after_s)
            stack.enter_context(_stopped(self.pair.first.pid))

        with self.pair.steps(), ExitStack() as stack:
            fetched = self.pair.fetch(prompts, stop)
            stored = self.pair.ask(second, others)
        time.sleep(_LATE_S)
        second.ask("call", module="kvtier_bench.engine.process", function="forget", arguments={})
        again = self.pair.ask(second, [*prompts, *others])
        answers = [*fetched.answers, *again.answers]
        expected = [*computed.answers, *computed.answers, *stored.answers]
        return Seen(STOPPED, [*zip(answers, expected, strict=True)], fetched)


def table(way: str, seen: Sequence[Seen]) -> list[Fault]:
    """Return a row for each fault, summed over all pairs of engines that were exposed to it."""
    return [
        _row(way, fault, [one for one in seen if one.fault == fault]) for fault in (CONTROL, ALTERED, STOPPED)
    ]


def _row(way: str, fault: str, seen: Sequence[Seen]) -> Fault:
    pairs = [pair for one in seen for pair in one.pairs]
    fetched = [one.fetched for one in seen]
    cached, tokens = (sum(one.counts[name] for one in fetched) for name in ("cached", "tokens"))
    return Fault(
        fault,
        way,
        wrong=f"{sum(mine != its for mine, its in pairs)} of {len(pairs)}",
        from_cache=f"{cached:.0f} of {tokens:.0f}",
        longest_s=max(time_s for one in fetched for time_s in one.ttft_s),
    )


@contextmanager
def _stopped(root: int) -> Iterator[None]:
    """Stop a process and its descendants while the context is entered."""
    processes = family(root)
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def flip_memory(root: int, nbytes: int, chunk_bytes: int) -> None:
    """Flip a bit in each quarter of a chunk, in all shared memory of a process and its descendants.

    Args:
        nbytes: size of the smallest mapping to change.
    """
    places = {}  # Processes map the same memory, so that each location must be flipped only once.
    for pid in family(root):
        for line in Path("/proc", str(pid), "maps").read_text().splitlines():
            addresses, access, _, device, inode, *_ = line.split(maxsplit=5)
            start, end = (int(address, 16) for address in addresses.split("-"))
            if access == "rw-s" and end - start >= nbytes:
                places[device, inode] = pid, start, end
    if not places:
        raise RuntimeError(f"no process of {root} has {nbytes} bytes of shared memory")
    for pid, start, end in places.values():
        with Path("/proc", str(pid), "mem").open("r+b", buffering=0) as memory:
            for at in range(start + chunk_bytes // 8, end, chunk_bytes // 4):
                flip_number(memory, at // 4 * 4)
