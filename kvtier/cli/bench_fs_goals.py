"""What is wanted of the file tier's speed, compared with what ``bench_fs`` has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtier.cli.bench_fs import Point

LIMIT_SHARES: Final = {65536: 0.7, 524288: 0.95, 2097152: 0.95}
BUSY_SHARE: Final = 0.8
HELD_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted of the format that suits a chunk's length, and what was seen.

    Attributes:
        what: what is compared.
        wanted: the bound.
        seen: what was measured.
        passed: whether it keeps to the bound.
    """

    what: str
    wanted: str
    seen: float
    passed: bool


def compare(points: Sequence[Point], *, shares_interpreter: bool) -> list[Goal]:
    """Compare each goal with the points. Of sizes that were not measured nothing is said.

    Args:
        points: what was measured.
        shares_interpreter: whether the tier is in the engine's process, and takes the interpreter from it.
    """
    by_key = {(point.path, point.chunk_bytes, point.verb, point.busy): point for point in points}
    return [
        goal
        for size in sorted({point.chunk_bytes for point in points})
        for verb in ("put", "get")
        for goal in _of_size(by_key, size, verb, shares_interpreter)
    ]


def _of_size(
    by_key: dict[tuple[str, int, str, bool], Point], size: int, verb: str, shares_interpreter: bool
) -> Iterator[Goal]:
    path = "files"
    idle, busy = by_key[path, size, verb, False], by_key[path, size, verb, True]
    vllm = by_key.get(("vllm", size, verb, False))
    name = f"{verb} {size // 1024} KiB ({path})"
    if size in LIMIT_SHARES:
        yield _at_least(f"{name}, share of the limit", LIMIT_SHARES[size], idle.ratio)
    alone = f" (the disk by itself: {busy.raw_busy:.2f})" if busy.raw_busy is not None else ""
    engine = "an engine's thread" if shares_interpreter else "an engine's process"
    what = f"{name}, beside {engine} / idle{alone}"
    yield _at_least(what, BUSY_SHARE, busy.ratio / idle.ratio)
    if vllm is not None:
        what = f"{name}, processor time a chunk without checksums / vLLM's"
        yield _at_most(what, 1.0, idle.bare_us_chunk / vllm.cpu_us_chunk)
    if shares_interpreter:
        assert busy.held_share is not None
        yield _at_most(f"{name}, interpreter taken from the engine's thread", HELD_SHARE, busy.held_share)


def _at_least(what: str, bound: float, seen: float) -> Goal:
    return Goal(what, f">= {bound:g}", seen, seen >= bound)


def _at_most(what: str, bound: float, seen: float) -> Goal:
    return Goal(what, f"<= {bound:g}", seen, seen <= bound)
