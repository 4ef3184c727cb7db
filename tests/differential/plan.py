"""A plain model of a life's caches that predicts its loads. It uses no engine and none of kvtier's code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from tests.differential.lives import Ask, Case, Life, Piece, Round

ENOUGH = 8
"""In chunks. A life that must load this many loads at least one."""

Key = int
Text = list[int]
_PLACE_BITS = 12


class Plan:
    """Simulates a life with dictionaries.

    Each answer has unique tokens. Requests of a round follow each other, and none is aborted; but the uses of
    aborted ones do not count for ``store_threshold``.

    Attributes:
        loads: chunks of prompts loaded from host memory.
        promotions: those that a tier provides.
    """

    def __init__(self, life: Life) -> None:
        self.loads = self.promotions = 0
        self._case, self._given = life.case, _given(life.case)
        self._texts: dict[int | None, Text] = {None: []}
        self._engines: dict[int, _Engine] = {}
        self._tier: set[Key] = set()
        self._uses: Counter[Key] = Counter()
        for each in life.rounds:
            self._round(each)

    @property
    def is_fit(self) -> bool:
        """Whether the life loads enough, including from a tier if one accepts chunks predictably."""
        return self.loads >= ENOUGH and (self.promotions > 0 or not self._given)

    def _round(self, each: Round) -> None:
        engine = self._engines.setdefault(each.engine, _Engine(self._case))
        if each.before == "reset":
            self._tier.clear()
        if each.before in ("reset", "restart", "kill"):
            engine.host.clear()
        if each.before in ("restart", "kill"):
            engine.uses.clear()
            engine.ends.clear()
        if each.before in ("forget", "reset", "restart", "kill"):
            engine.device.clear()
        for ask in each.asks:
            self._ask(engine, ask)

    def _ask(self, engine: _Engine, ask: Ask) -> None:
        prompt = [*self._texts[ask.after][: ask.keep], *_tokens(ask.pieces)]
        text = [*prompt, *_tokens([(-ask.name, ask.say)])]
        keys = list(_keys(prompt, self._case.chunk_tokens, (ask.salt, ask.adapter)))
        self._texts[ask.name] = text
        missing = [
            key for key in keys[: (len(prompt) - 1) // self._case.chunk_tokens] if key not in engine.device
        ]
        for key in missing:
            if key not in engine.host and key not in self._tier:
                break
            self.loads += 1
            self.promotions += key not in engine.host
            engine.host.add([key])
        engine.device.add(keys)
        self._uses.update(keys)
        if ask.abort is None:  # else the engine may offer nothing
            engine.uses.update(keys)
        if not ask.more:
            self._store(engine, keys)

    def _store(self, engine: _Engine, keys: Sequence[Key]) -> None:
        threshold = self._case.settings.get("store_threshold", 1)
        engine.ends.update(keys[-1:])
        if self._case.model.groups > 1 and any(engine.ends[key] < threshold for key in keys[-1:]):
            return  # vLLM offers windows only at a prompt's end
        stored = [key for key in keys if engine.uses[key] >= threshold]
        if self._case.leaves_no_hit(len(stored)):
            engine.host.clear()
            return
        engine.host.add(stored)
        if self._given:
            self._tier.update(key for key in stored if self._uses[key] >= self._given)


class _Engine:
    """The caches of an engine, and the uses that it counts for ``store_threshold``."""

    def __init__(self, case: Case) -> None:
        chunk_blocks, groups = case.chunk_tokens // case.block_tokens, case.model.groups
        blocks = case.arguments.get("num_gpu_blocks_override", 80) * case.arguments.get(
            "enable_prefix_caching", True
        )
        self.uses: Counter[Key] = Counter()
        self.ends: Counter[Key] = Counter()  # prompts by their last chunk
        self.device, self.host = _Cache(blocks // chunk_blocks // groups), _Cache(case.host_chunks // groups)


class _Cache(OrderedDict[Key, None]):
    """Keys, least recently used first."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def add(self, keys: Iterable[Key]) -> None:
        for key in reversed(list(keys)):
            self[key] = None
            self.move_to_end(key)
        while len(self) > self._room:
            self.popitem(last=False)


def _given(case: Case) -> int:
    """Return the number of uses after which a tier gets a chunk; 0 if that is unpredictable."""
    uses = {"all": 1, "reused": 2}
    return min((uses[tier["write_policy"]] for tier in case.tiers if tier["write_policy"] in uses), default=0)


def _tokens(pieces: Iterable[Piece]) -> Iterator[int]:
    for seed, tokens in pieces:
        yield from range(seed << _PLACE_BITS, (seed << _PLACE_BITS) + tokens)


def _keys(text: Text, width: int, root: Hashable) -> Iterator[Key]:
    key = hash(root)
    for end in range(width, len(text) + 1, width):
        key = hash((key, *text[end - width : end]))  # a hash of numbers alone is equal in each process
        yield key
