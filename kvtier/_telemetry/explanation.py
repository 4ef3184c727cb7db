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
    tokens: dict[str, _Tokens]  # tokens loaded, by tier; "cpu" is the primary tier
    # Tokens at the prompt's front that need no computing, the engine's own cache included. None if the engine
    # looked up no chunk, or does not say where in the prompt.
    prefix_end: _Tokens | None
    # why the prefix ended there, as a word of ``kvtier_misses``; None if nothing was missing
    reason: str | None
    tiers: dict[str, str]  # for each considered tier, why it did not return the chunk at the prefix's end
    waited_s: Annotated[float, msgspec.Meta(ge=0)]  # for secondary tiers
    hints: list[str] = []  # its client's actions, each with its outcome


def write(explanation: Explanation) -> None:
    # In ASCII, because a request's id may contain characters that the log's encoding lacks, or half of one.
    request = explanation.request.encode(errors="replace").decode()
    fields = msgspec.to_builtins(msgspec.structs.replace(explanation, request=request))
    line = f"{PREFIX}{json.dumps(fields)}"
    if logger.hasHandlers():
        logger.info("%s", line)
    elif logger.isEnabledFor(logging.INFO):  # no handler is configured, so Python would drop the line
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
