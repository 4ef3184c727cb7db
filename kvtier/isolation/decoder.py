"""What the process of the tiers says becomes events for the core, once it is known to make sense."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from kvtier import reasons
from kvtier.core.messages import (
    Answer,
    Event,
    Fetch,
    Fetched,
    Put,
    PutEnded,
    Removed,
    TierDown,
    TierUp,
)
from kvtier.executor import NamedTier, TierActivity
from kvtier.isolation import wire
from kvtier.isolation.link import Link
from kvtier.isolation.wire import WireError
from kvtier.tiers.base import Usage

_OURS = "kvtier"


class MessageDecoder:
    """Takes in what processes say, one after the other.

    The core relies on what it is told, in the engine's thread, and a tier's bug can do anything to the
    memory of its process. So what comes from there is checked like what comes from a network.

    Args:
        tiers: the tiers, in the core's order.

    Attributes:
        events: what has happened.
        activity: what each tier was doing when it last said so.
    """

    def __init__(self, tiers: Sequence[NamedTier]) -> None:
        self.events: deque[Event] = deque()
        self.activity = tuple(TierActivity(named.tier.config.max_concurrency) for named in tiers)
        self._words = [frozenset(reasons.TRANSFER).union(named.tier.reasons) for named in tiers]

    def take(self, frame: bytes, link: Link, *, last: bool = False) -> bool:
        """Take in a frame; return whether it answers a ``Ping``: the loop runs.

        Args:
            frame: what ``link`` has said.
            link: who.
            last: whether it was given up since: what it says of its tiers is of no account then.

        Raises:
            WireError: it makes no sense.
        """
        answers = False
        for report in wire.unpack_reports(frame):
            if isinstance(report, PutEnded | Fetched):
                self._end(report, link)
            elif isinstance(report, wire.Pong):
                answers = True
            elif isinstance(report, wire.Reached):
                if (done := link.waiting.pop(report.id, None)) is not None:
                    done()
            elif isinstance(report, wire.LogLine):
                _log(report)
            else:
                self._hear_of_tier(report, last=last)
        return answers

    def forget(self) -> None:
        """Nothing is under way any more: the process has ended."""
        for activity in self.activity:
            activity.usage = None
            for turns in (activity.puts, activity.gets):
                turns.submitted = turns.running = 0

    def _end(self, event: PutEnded | Fetched, link: Link) -> None:
        owed = link.in_flight.get(event.id)
        if owed is None:
            raise WireError(f"transfer {event.id} is not under way")
        _require_answer(event, owed, self._words[owed.tier])
        del link.in_flight[event.id]
        self.events.append(event)

    def _hear_of_tier(self, report: TierDown | TierUp | Removed | wire.Activity, *, last: bool) -> None:
        if report.tier >= len(self.activity):
            raise WireError(f"there is no tier {report.tier}")
        if isinstance(report, wire.Activity):
            _note(report, self.activity[report.tier])
        elif isinstance(report, Removed) or not last:
            self.events.append(report)


def _require_answer(event: PutEnded | Fetched, owed: Put | Fetch, words: frozenset[str]) -> None:
    """Raise WireError where an end is none of the command with its id, or says what cannot be."""
    if isinstance(event, PutEnded):
        answers = isinstance(owed, Put) and len(event.kept) == len(owed.keys)
    else:
        landed = [index for index, answer in enumerate(event.answers) if answer is Answer.LANDED]
        answers = isinstance(owed, Fetch) and len(event.answers) == len(owed.keys)
        answers = answers and (not landed or landed[-1] < len(owed.slots))
    if not answers:
        raise WireError(f"the answer to transfer {owed.id} is none to {type(owed).__name__}")
    if not math.isfinite(event.seconds):
        raise WireError(f"transfer {event.id} took {event.seconds} s")
    if not words.issuperset(event.reasons) or sum(event.reasons.values()) > len(owed.keys):
        raise WireError(f"transfer {event.id} failed for reasons that do not exist")
    if event.retry and event.retry not in reasons.RETRY:
        raise WireError(f"transfer {event.id} was repeated in a way that does not exist")


def _note(report: wire.Activity, activity: TierActivity) -> None:
    activity.puts.submitted, activity.puts.running = report.puts_submitted, report.puts_running
    activity.gets.submitted, activity.gets.running = report.gets_submitted, report.gets_running
    activity.usage = Usage(report.used_bytes, report.capacity_bytes) if report.knows_usage else None


def _log(line: wire.LogLine) -> None:
    name = line.logger if line.logger.startswith(_OURS) else _OURS
    with suppress(Exception):  # a handler of the engine's that fails costs a line, not the tiers
        logging.getLogger(name).log(line.level, "%s", line.text)
