"""Traces of requests, read from a file. A large trace is reduced to a sample of its chunks."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from kvtier.errors import KVTierError
from kvtier.keys import OffloadKey, pack_key

MAX_LOOKUPS = 800_000  # of one trace; some seconds for each policy and capacity
_RECENT_IDS = 1 << 18  # whose keys are not computed again: 50 MB, however many different ones come


CHUNK_TOKENS: Final = 512  # that an id of a trace stands for
_Count = Annotated[int, msgspec.Meta(ge=1)]


class Line(msgspec.Struct, frozen=True):
    """A request of a trace: the chunks of its prompt."""

    hash_ids: list[int | str]


class TimedLine(Line, frozen=True):
    """A request with its time, in milliseconds, and its lengths, in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count


LineT = TypeVar("LineT", bound=Line)
_WORDS: Final = {
    Line: '"hash_ids", a list of numbers or strings, one for each chunk of the prompt',
    TimedLine: '"timestamp" (milliseconds), "input_length", "output_length" (tokens) and "hash_ids", '
    f"a list of numbers or strings, one for each {CHUNK_TOKENS} tokens of the prompt",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """The chunks that each request asks for, in the order of its prompt.

    Attributes:
        requests: the keys of each request, of sampled chunks only.
        sampled: one in ``sampled`` chunks counts.
        lookups: chunks asked for, those that are not sampled included.
    """

    requests: list[list[OffloadKey]]
    sampled: int
    lookups: int

    @property
    def unique(self) -> int:
        """The number of different chunks, estimated where the trace is sampled."""
        return len({key for keys in self.requests for key in keys}) * self.sampled

    @property
    def excess(self) -> float:
        """Look-ups in the sample beyond its share of all.

        A chunk that every request begins with is in the sample or not, and weighs too much or too little.
        It hits in whatever cache comes first, so hits there are corrected by this number (SHARDS-adj).
        """
        return sum(map(len, self.requests)) - self.lookups / self.sampled


def read(path: Path) -> Iterator[Sequence[int | str]]:
    """Yield the chunks of each request: ``hash_ids`` of each line, as in Mooncake's traces.

    Raises:
        KVTierError: a line has none.
    """
    return (line.hash_ids for line in read_lines(path, Line))


def read_lines(path: Path, kind: type[LineT]) -> Iterator[LineT]:
    """Yield the requests of a trace in Mooncake's format.

    Raises:
        KVTierError: a line lacks a field of this kind, or a field has another type.
    """
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(BOM_UTF8).strip()
            if not text:
                continue
            try:
                yield decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise KVTierError(
                    f"{path}, line {number}: {error}; each line is an object with {_WORDS[kind]}"
                ) from None


def sample(requests: Iterable[Sequence[int | str]], max_lookups: int = MAX_LOOKUPS) -> Trace:
    """Return the trace, of as many chunks as give at most ``max_lookups``.

    Chunks are sampled by their hash, so all uses of a chunk are in the sample or none: a cache of
    1/n of the size sees the sample as the whole cache sees the whole trace (SHARDS, FAST 2015).
    """
    key_of = lru_cache(_RECENT_IDS)(_key)
    kept: list[list[OffloadKey]] = []
    sampled, lookups, kept_lookups = 1, 0, 0
    for ids in requests:
        keys = dict.fromkeys(map(key_of, ids))
        chosen = [key for key in keys if _is_sampled(key, sampled)]
        lookups += len(keys)
        kept_lookups += len(chosen)
        kept.append(chosen)
        if kept_lookups > max_lookups:
            sampled *= 2
            kept = [[key for key in chosen if _is_sampled(key, sampled)] for chosen in kept]
            kept_lookups = sum(map(len, kept))
    return Trace(kept, sampled, lookups)


def _key(id_: int | str) -> OffloadKey:
    return pack_key(blake2b(str(id_).encode(), digest_size=16).digest())


def _is_sampled(key: OffloadKey, sampled: int) -> bool:
    return not int.from_bytes(key[:4], "big") % sampled
