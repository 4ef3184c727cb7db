"""Checks messages of the tier process, and turns them into events for the core."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier import _reasons as reasons
from kvtier._core.kv_events import EventQueue
from kvtier._core.messages import Answer, Get, GetEnded, Put, PutEnded, Removed, TierDown, TierUp
from kvtier._execution.executor import NamedTier, TierActivity
from kvtier._isolation import wire
from kvtier._isolation.link import Link
from kvtier._isolation.wire import WireError
from kvtier._log import GuardedLogger
from kvtier.tiers._base import Usage

_OURS = "kvtier"


class MessageDecoder:
    """Decodes and checks the messages of successive tier processes.

    The core trusts its events and runs in the engine's thread, but a bug in a tier can corrupt the memory of
    the tier process. So its messages are checked like messages from a network.
    """

    def __init__(self, tiers: Sequence[NamedTier]) -> None:
        self.events = EventQueue()
        # last known state of each tier, in the core's order
        self.activity = tuple(TierActivity(named.tier.config.max_concurrency) for named in tiers)
        self._up: set[int] = set()
        self._reasons = [frozenset(reasons.TRANSFER).union(named.tier.reasons) for named in tiers]

    @property
    def are_all_up(self) -> bool:
        """Whether each tier is up, as last reported by the process."""
        return len(self._up) == len(self.activity)

    def decode(self, frame: bytes, link: Link, *, is_last: bool = False) -> bool:
        """Decode a frame; return whether it shows that the event loop runs.

        ``is_last``: the process has ended since, so the state of its tiers does not matter. WireError if a
        message is malformed or impossible.
        """
        is_alive = False
        for report in wire.unpack(wire.REPORTS, frame):
            if isinstance(report, PutEnded | GetEnded):
                self._complete(report, link)
            elif isinstance(report, wire.Pong):
                is_alive = True
            elif isinstance(report, wire.LogLine):
                _log(report)
            else:
                # Otherwise a long silence that ends with this message would be judged by the new, shorter
                # limit.
                is_alive = is_alive or isinstance(report, TierUp)
                self._update_tier(report, is_last=is_last)
        return is_alive

    def clear_activity(self) -> None:
        """Record the end of the process: no tier is up, and nothing is in flight any more."""
        self._up.clear()
        for activity in self.activity:
            activity.usage = None
            for turns in (activity.puts, activity.gets):
                turns.submitted = turns.running = 0

    def _complete(self, event: PutEnded | GetEnded, link: Link) -> None:
        command = link.in_flight.get(event.id)
        if command is None:
            raise WireError(f"transfer {event.id} is not in flight")
        _require_answer(event, command, self._reasons[command.tier])
        del link.in_flight[event.id]
        self.events.append(event)

    def _update_tier(self, report: TierDown | TierUp | Removed | wire.Activity, *, is_last: bool) -> None:
        if report.tier >= len(self.activity):
            raise WireError(f"there is no tier {report.tier}")
        if isinstance(report, wire.Activity):
            _update_activity(report, self.activity[report.tier])
            return
        if isinstance(report, TierUp):
            self._up.add(report.tier)
        elif isinstance(report, TierDown):
            self._up.discard(report.tier)
        if isinstance(report, Removed) or not is_last:
            self.events.append(report)


def _require_answer(event: PutEnded | GetEnded, command: Put | Get, known: frozenset[str]) -> None:
    """Raise WireError if an event cannot be the end of the command with its id."""
    if isinstance(event, PutEnded):
        answers = isinstance(command, Put) and len(event.kept) == len(command.keys)
    else:
        landed = [index for index, answer in enumerate(event.answers) if answer is Answer.COPIED]
        answers = isinstance(command, Get) and len(event.answers) == len(command.keys)
        answers = answers and (not landed or landed[-1] < len(command.slots))
    if not answers:
        raise WireError(f"the answer to transfer {command.id} does not fit {type(command).__name__}")
    if not known.issuperset(event.reasons) or sum(event.reasons.values()) > len(command.keys):
        raise WireError(f"transfer {event.id} failed for unknown reasons, or too many")
    if event.retry and event.retry not in reasons.RETRY:
        raise WireError(f"transfer {event.id} has an unknown retry outcome")


def _update_activity(report: wire.Activity, activity: TierActivity) -> None:
    activity.puts.submitted, activity.puts.running = report.puts_submitted, report.puts_running
    activity.gets.submitted, activity.gets.running = report.gets_submitted, report.gets_running
    activity.usage = Usage(*report.usage) if report.usage else None


def _log(line: wire.LogLine) -> None:
    name = line.logger if line.logger.startswith(_OURS) else _OURS
    GuardedLogger(name).log(line.level, "%s", line.text)
