"""Traces of requests, read from a file. Large traces are reduced to a sample of their chunks."""

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

MAX_LOOKUPS = 800_000  # lookups of one trace: some seconds for each policy and capacity
# Keys of these ids are cached. This bounds the cache to 50 MB for any number of distinct ids.
_RECENT_IDS = 1 << 18


CHUNK_TOKENS: Final = 512  # number of tokens that an id of a trace stands for
_Count = Annotated[int, msgspec.Meta(ge=1)]


class Line(msgspec.Struct, frozen=True):
    """A request of a trace: the chunks of its prompt."""

    hash_ids: list[int | str]


class TimedLine(Line, frozen=True):
    """A request with its time in milliseconds and its lengths in tokens."""

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
    """The chunks that each request looks up, in the order of its prompt.

    Attributes:
        requests: the keys of each request, of sampled chunks only.
        sampled: one in ``sampled`` chunks is in the sample.
        lookups: number of chunks looked up, including those not in the sample.
    """

    requests: list[list[OffloadKey]]
    sampled: int
    lookups: int

    @property
    def unique(self) -> int:
        """The number of distinct chunks, estimated if the trace is sampled."""
        return len({key for keys in self.requests for key in keys}) * self.sampled

    @property
    def excess(self) -> float:
        """Number of lookups in the sample beyond its expected share.

        A chunk that every request begins with is either in the sample or not, and so has too much or too
        little weight. It hits in the first cache, whose hits are therefore corrected by this number
        (SHARDS-adj).
        """
        return sum(map(len, self.requests)) - self.lookups / self.sampled


def read(path: Path) -> Iterator[Sequence[int | str]]:
    """Yield the chunks of each request: ``hash_ids`` of each line, as in Mooncake's traces.

    Raises:
        KVTierError: a line has no such field.
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
    """Return the trace, sampled so that it has at most ``max_lookups`` lookups.

    Chunks are sampled by their hash, so the sample contains all uses of a chunk or none. A cache of 1/n of
    the size then behaves on the sample as the whole cache does on the whole trace (SHARDS, FAST 2015).
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
