"""Why a request's prefix was found or not: one line per explained request, written and read here."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

PREFIX = "kvtier.explain: "
"""What comes before the JSON object in a line, whatever the log's format puts before it."""

logger = logging.getLogger("kvtier.explain")

_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How far a request's prefix was found, and why it ended there. Field names are those of the line.

    Attributes:
        request: the engine's id of the request.
        tokens: tokens loaded, by tier; `cpu` is the primary tier.
        prefix_end: tokens of the prompt, from its front, that need not be computed, those in the engine's own
            cache included; None where the engine asked for nothing, or does not say where in the prompt.
        reason: why the prefix ended there, in a word of `kvtier_misses`; None where nothing was missing.
        tiers: why each secondary tier that was considered did not give the chunk at which it ended.
        waited_s: seconds that the request waited for secondary tiers.
    """

    request: str
    tokens: dict[str, _Tokens]
    prefix_end: _Tokens | None
    reason: str | None
    tiers: dict[str, str]
    waited_s: Annotated[float, msgspec.Meta(ge=0)]


class DamagedLine(msgspec.Struct, frozen=True):
    """A line that has the prefix, and no explanation that can be read behind it."""

    problem: str


_decoder = msgspec.json.Decoder(Explanation)


def write(explanation: Explanation) -> None:
    """Log an explanation."""
    # In ASCII: a request's id may hold what the log's encoding lacks.
    logger.info("%s%s", PREFIX, json.dumps(msgspec.to_builtins(explanation)))


def enable() -> None:
    """Have explanations logged where nobody has configured that.

    vLLM configures its own loggers alone: without a configuration Python drops lines of other loggers below
    WARNING.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
        logger.addHandler(handler)


def read(lines: Iterable[bytes]) -> Iterator[Explanation | DamagedLine | None]:
    """Yield the explanation in each line of a log; None for lines that are about something else."""
    for line in lines:
        _, found, rest = line.rpartition(PREFIX.encode())
        if not found:
            yield None
            continue
        text = rest[: rest.rfind(b"}") + 1]  # what formats add to a line, such as colors, comes after it
        try:
            yield _decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            yield DamagedLine(str(error))
