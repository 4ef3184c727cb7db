"""A life: an engine's configuration and its requests, and how it is printed as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

from tests.differential.models import Model

BESIDE_A_TRANSPORT = ("beside", "behind", "blind")
"""Places in a MultiConnector: KVTierConnector before or after a transport, OffloadingConnector after it."""

Piece = tuple[int, int]
"""Tokens of a prompt: their seed and their number."""


@dataclass(frozen=True)
class Case:
    """An engine and its connector.

    Attributes:
        model: the engine's model.
        chunk_blocks: blocks per chunk; None for kvtier's default.
        host_chunks: slots of the primary tier.
        connector: ``OffloadingConnector``, ``KVTierConnector`` or one of ``BESIDE_A_TRANSPORT``.
        arguments: the engine's arguments.
        settings: kvtier's own.
        tiers: settings of each secondary tier.
        copy_s: seconds that each copy between device and host waits before it begins.
        publishes: whether a router follows its KV events.
        ranks: workers of tensor parallelism.
    """

    model: Model = field(default_factory=Model)
    chunk_blocks: int | None = 1
    host_chunks: int = 64
    connector: str = "OffloadingConnector"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    tiers: tuple[Mapping[str, Any], ...] = ()
    copy_s: float = 0
    publishes: bool = False
    ranks: int = 1

    @property
    def block_tokens(self) -> int:
        return int(self.arguments.get("block_size", 32))

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk; kvtier's default is 256, since the models are small."""
        return self.block_tokens * (self.chunk_blocks or 256 // self.block_tokens)

    @property
    def lacks_parts(self) -> bool:
        """Whether windows often move past a chunk's first blocks before the chunk is stored."""
        step = int(self.arguments.get("max_num_batched_tokens", 2048))
        # With a higher threshold the device has the chunk before kvtier stores it.
        is_early = self.settings.get("store_threshold", 1) == 1
        kept = max(self.block_tokens, self.model.window, is_early * step // 2)
        return self.model.groups > 1 and self.chunk_tokens > kept

    def leaves_no_hit(self, chunks: int) -> bool:
        """Return whether a prompt of ``chunks`` chunks leaves no hit in host memory.

        vLLM stores windows only at a prompt's end. Earlier chunks fill the slots; up to a tenth stay free.
        """
        return self.model.groups > 1 and chunks >= self.host_chunks * 9 // 10

    @property
    def longest(self) -> int:
        return int(self.arguments.get("max_model_len", 1024))


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        name: its unique number.
        pieces: the tokens at the end of its prompt.
        after: the request that it continues: its text, and its answer if it has ended.
        keep: how many tokens of that text; None for all.
        say: number of tokens to generate.
        at: its first step, counted in its round.
        abort: steps after which it is aborted.
        more: further inputs of a streaming session, and the tokens to generate for each.
        eager: whether the inputs come at once, rather than each after the previous answer.
        hint: ``kv_transfer_params``.
    """

    name: int
    pieces: tuple[Piece, ...]
    after: int | None = None
    keep: int | None = None
    say: int = 4
    at: int = 0
    abort: int | None = None
    more: tuple[tuple[tuple[Piece, ...], int], ...] = ()
    eager: bool = False
    salt: str = ""
    adapter: int = 0
    priority: int = 0
    prompt_logprobs: bool = False
    hint: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """Concurrent requests.

    Attributes:
        before: the first action. ``settle`` waits for stores; ``forget`` also resets the device's cache;
            ``reset`` resets everything, for new weights; ``restart`` and ``kill`` start the engine again.
        resets: steps and kinds of resets: ``device``, ``all``, or ``preempt``, which preempts requests, as
            ``preempt device`` does. The model gets new weights unless it is the device's, or vLLM refuses.
            ``weights`` and ``preempt weights`` reset the device alone, and then load new weights.
        engine: 0 or 1; two engines share the tiers.
    """

    asks: tuple[Ask, ...]
    before: str = ""
    resets: tuple[tuple[int, str], ...] = ()
    engine: int = 0


@dataclass(frozen=True)
class Probe:
    """The last requests: a new prompt, optionally another one, and the first again, which must be a hit.

    Attributes:
        tokens: length of the prompt.
        others: length of another prompt in between; 0 for none.
        times: number of earlier requests for the prompt.
    """

    tokens: int
    others: int = 0
    times: int = 1


@dataclass(frozen=True)
class Life:
    """An engine, the rounds of its requests, and a last check of its hits."""

    case: Case
    rounds: tuple[Round, ...]
    probe: Probe | None = None


def code(value: Any) -> str:
    """Return the expression that makes a value, without its default fields."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = []
        for each in fields(value):
            here = getattr(value, each.name)
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            if here != default:
                shown.append(f"{each.name}={code(here)}")
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(code, value))}{',' * (len(value) == 1)})"
    return repr(value)


def joined(lives: Sequence[Life]) -> Life:
    """Return the life that consists of all lives of an engine so far."""
    return replace(lives[-1], rounds=tuple(each for life in lives for each in life.rounds))
