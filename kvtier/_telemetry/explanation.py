"""Why a request's prefix was found or not: one line per explained request. ``kvtier explain`` reads it."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import msgspec

from kvtier._log import GuardedLogger

PREFIX = "kvtier.explain: "
"""Precedes the JSON object in a line. The log's format may put more before it."""

logger = GuardedLogger("kvtier.explain")

_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How far a request's prefix was found, and why it ended there. The line has the same field names."""

    request: str  # the engine's id
    tokens: dict[str, _Tokens]  # loaded, by tier; "cpu" is the primary tier
    # Tokens at the prompt's front that need no computing, the engine's own cache included. None if the engine
    # looked up no chunk, or does not say where in the prompt.
    prefix_end: _Tokens | None
    reason: str | None  # why it ended there, in a word of ``kvtier_misses``; None if nothing was missing
    tiers: dict[str, str]  # why each tier that was considered did not give the chunk at its end
    waited_s: Annotated[float, msgspec.Meta(ge=0)]  # for secondary tiers
    hints: list[str] = []  # its client's actions, each with its outcome


def write(explanation: Explanation) -> None:
    # In ASCII: a request's id may hold what the log's encoding lacks, or half of a character.
    request = explanation.request.encode(errors="replace").decode()
    fields = msgspec.to_builtins(msgspec.structs.replace(explanation, request=request))
    line = f"{PREFIX}{json.dumps(fields)}"
    if logger.hasHandlers():
        logger.info("%s", line)
    elif logger.isEnabledFor(logging.INFO):  # no handler is configured: Python would drop it
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
        handler.handle(logger.logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (), None))


def enable() -> None:
    """Set a level for kvtier's loggers if none is set: Python drops lines below WARNING otherwise."""
    one: logging.Logger | None = logger.logger
    while one is not None and not isinstance(one, logging.RootLogger):
        if one.level != logging.NOTSET:
            return
        one = one.parent
    logger.setLevel(logging.INFO)
