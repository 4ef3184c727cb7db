"""Runs the commands of one tier, with concurrency limits, deadlines and retries."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio

from kvtier import _reasons as reasons
from kvtier._core.kv_events import MOST_REMOVED
from kvtier._core.messages import (
    Answer,
    Event,
    Get,
    GetEnded,
    Put,
    PutEnded,
    Removed,
    TierDown,
    TierUp,
    TransferHealth,
)
from kvtier._core.tiers.backoff import RandomSource
from kvtier._identity import Identity
from kvtier._log import GuardedLogger, LogLimit
from kvtier.errors import TierError
from kvtier.keys import MAX_KEY_BYTES, OffloadKey
from kvtier.tiers._activity import ConcurrencyLimit, TierActivity, usage_of
from kvtier.tiers._base import (
    Batch,
    Knowledge,
    Outcome,
    SecondaryTier,
    SlotAuditor,
    SlotMemory,
    Status,
    TierContext,
    Usage,
)
from kvtier.tiers._faults import reason_of, require_fault, words_of
from kvtier.tiers._integrity import Defect, IntegrityChecks, Suspects
from kvtier.tiers._loop_clock import LoopClock
from kvtier.tiers._retry import Progress, Retries
from kvtier.tiers._supervisor import AnyTier, Epoch, NamedTier, TierSupervisor
from kvtier.tiers._waiting import call_soon

logger = GuardedLogger("kvtier.executor")

Post = Callable[[Event], None]

_USAGE_EVERY_S = 1.0
_MOST_TOUCHED = 16_384
_LOG_EVERY_S = 60.0
_REREAD_SHARE = 0.25  # Share of the deadline, because all chunks of the get wait for it.


class TierRunner:
    """Runs the commands of one tier. Each ends with one event, when the tier no longer touches its slots.

    At its deadline a command is cancelled, queued or running; its event still waits for the tier.
    """

    def __init__(
        self,
        index: int,
        named: NamedTier,
        identity: Identity,
        memory: SlotMemory,
        post: Post,
        threads: anyio.CapacityLimiter,
        chance: RandomSource,
        clock: LoopClock,
        slot_checksums: SlotAuditor | None = None,
    ) -> None:
        config = named.tier.config
        self._now_s = clock.now
        self._clock = clock
        self.index = index
        self.name = named.name
        self.activity = TierActivity(config.max_concurrency)
        self.supervisor = TierSupervisor(named, self._post_condition, chance, clock, self._is_idle)
        self._deadline_s = config.deadline_s
        self._retries = Retries(config.retry_share, named.tier.transient, chance, clock)
        self._memory = memory
        self._post = post
        self._context = TierContext(
            named.name, identity, memory.chunk_bytes, self._note_removed, self._note_lost
        )
        self._integrity = IntegrityChecks(identity.short_digest, slot_checksums, threads, chance)
        self._suspects = Suspects()
        self._reasons = reasons.TRANSFER.keys() | named.tier.reasons.keys()
        self._log_limit = LogLimit(_LOG_EVERY_S)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._removed: deque[OffloadKey] = deque()
        self._is_removing = False
        self._touched: dict[OffloadKey, None] = {}
        self._is_sending_touches = False

    async def supervise(self) -> None:
        """Open the tier and keep it usable. The engine runs without it while it cannot be opened."""
        self._loop = asyncio.get_running_loop()
        await self.supervisor.run(self._context)

    async def watch_usage(self) -> None:
        """Ask the tier regularly how full it is, until this task is cancelled."""
        await self.supervisor.epoch.settled.wait()
        while True:
            self.activity.usage = self._usage() if self.supervisor.is_open else None
            await anyio.sleep(_USAGE_EVERY_S)

    def _usage(self) -> Usage | None:
        try:
            return usage_of(self._tier)
        except BaseException as error:
            require_fault(error)
            self._warn("usage", f"usage() failed, so its used bytes are unknown: {self._words(error)}")
            return None

    @property
    def _tier(self) -> AnyTier:
        return self.supervisor.tier

    def _post_condition(self, down: str | None) -> None:
        up = TierUp(self.index, self.supervisor.epoch.number)
        self._post(up if down is None else TierDown(self.index, down))

    def _require_usable(self, epoch: Epoch) -> None:
        if self.supervisor.down is not None:
            raise _NotBegunError("down")
        if epoch is not self.supervisor.epoch:
            raise _NotBegunError("reset")

    def _note_lost(self, why: str) -> None:
        """Request a restart of the tier. Any thread may call it."""
        if self._loop is not None:
            text = self._words(TierError(why))
            call_soon(self._loop, partial(self.supervisor.request_restart, text))

    def _is_idle(self) -> bool:
        """Return whether no command of the tier runs. While it is down, none starts."""
        return not (self.activity.puts.running or self.activity.gets.running or self._is_sending_touches)

    def _note_removed(self, keys: Sequence[OffloadKey]) -> None:
        """Queue an event for chunks that left the tier; many calls share one. Any thread may call it."""
        self._removed.extend(keys)
        if self._removed and not self._is_removing and self._loop is not None:
            self._is_removing = True
            call_soon(self._loop, self._post_removed)

    def _post_removed(self) -> None:
        self._is_removing = False
        removed = self._removed
        keys = [removed.popleft() for _ in range(len(removed))]
        known = [key for key in keys if type(key) is bytes and 0 < len(key) <= MAX_KEY_BYTES]
        if len(known) < len(keys):
            self._warn("removed", f"{len(keys) - len(known)} values given to removed() are no offload keys")
        if known:
            self._post(Removed(self.index, known if len(known) <= MOST_REMOVED else ()))

    def note_touched(self, keys: Sequence[OffloadKey]) -> bool:
        """Note that chunks were used; return whether the caller must start ``send_touched``."""
        if type(self._tier).touch is SecondaryTier.touch:
            return False  # the tier does not track recency
        if len(self._touched) < _MOST_TOUCHED:  # otherwise the tier is too slow for all keys
            self._touched.update(dict.fromkeys(keys))
        start, self._is_sending_touches = not self._is_sending_touches, True
        return start

    async def send_touched(self) -> None:
        """Send the tier all noted chunks, until none are left."""
        try:
            await self.supervisor.epoch.settled.wait()
            # A reset ends the wait even before the tier is open; a later touch sends the rest.
            while self._touched and self.supervisor.is_open and self.supervisor.down is None:
                keys, self._touched = list(self._touched), {}
                async with self._clock.timeout_at(self._now_s() + self._deadline_s):
                    await self._tier.touch(keys)
        except BaseException as error:
            require_fault(error)
            self._warn("touch", f"touch failed: {self._words(error)}")
        finally:
            self._is_sending_touches = False

    # --- puts and gets ---------------------------------------------------------------------------

    async def run(self, command: Put | Get, turns: ConcurrencyLimit, epoch: Epoch) -> None:
        """Run a command that was submitted in ``epoch`` when its turn comes, and post its end."""
        is_put, count, begun_s = isinstance(command, Put), len(command.keys), self._now_s()
        progress = self._retries.note_submitted("put" if is_put else "get", begun_s + self._deadline_s)
        results: list[Any] = [False if is_put else Answer.MISSING] * count
        outcome = Outcome((), {"cancelled": count})
        try:
            async with self._clock.timeout_at(progress.deadline_s) as progress.limit:
                await epoch.settled.wait()
                async with turns:
                    progress.has_begun = True
                    if isinstance(command, Put):
                        results, outcome = await self._put(command, epoch, progress)
                    else:
                        results, outcome = await self._get(command, epoch, progress)
        except BaseException as error:
            outcome = self._failed_outcome(command.keys, error, progress)
        finally:
            turns.submitted -= 1
            about = (command.id, results, outcome.reasons, progress.seconds, progress.health, progress.retry)
            times = (self._now_s() - begun_s, progress.lookup_s)
            self._post(PutEnded(*about) if is_put else GetEnded(*about, *times))

    async def _put(self, command: Put, epoch: Epoch, progress: Progress) -> tuple[list[bool], Outcome]:
        self._require_usable(epoch)
        if not await self._integrity.are_slots_intact(command):
            raise _NotBegunError("audit")
        self._require_usable(epoch)  # the epoch may have changed meanwhile
        batch = Batch(command.keys, command.slots, self._memory, is_put=True)
        if not self._tier.verifies:
            await self._integrity.seal(batch)
            self._require_usable(epoch)  # Otherwise the tier would put it into the new epoch.
        outcome = await self._attempts(self._put_once, batch, epoch, progress)
        return [status == Status.OK for status in outcome.statuses], outcome

    async def _get(self, command: Get, epoch: Epoch, progress: Progress) -> tuple[list[Answer], Outcome]:
        self._require_usable(epoch)
        count = len(command.keys)
        found = [True] * count if command.located else await self._find(command, epoch, progress)
        for index, key in enumerate(command.keys):
            found[index] = found[index] and not self._suspects.is_skipped(key, self._now_s())
        answers = [Answer.LOCATED if there else Answer.MISSING for there in found]
        run = min(found.index(False) if False in found else count, len(command.slots))
        if not run:
            return answers, Outcome(())
        self._require_usable(epoch)
        batch = Batch(command.keys[:run], command.slots[:run], self._memory)
        outcome = await self._attempts(self._get_once, batch, epoch, progress)
        answers[:run] = [
            Answer.COPIED if status == Status.OK else Answer.MISSING for status in outcome.statuses
        ]
        await self._integrity.record_slots(batch, outcome.statuses)
        return answers, outcome

    async def _put_once(self, batch: Batch) -> Outcome:
        outcome = await self._tier.put(batch)
        if Status.ABSENT in outcome.statuses:  # the chunk would be neither put nor failed
            raise TierError("put() answered ABSENT")
        return self._warn_of("put", self._complete(outcome, len(batch)))

    async def _get_once(self, batch: Batch) -> Outcome:
        outcome = self._warn_of("get", self._complete(await self._tier.get(batch), len(batch)))
        if self._tier.verifies:
            return outcome
        damaged = await self._integrity.damaged(batch, outcome.statuses)
        return await self._resolve_damage(batch, outcome, damaged) if damaged else outcome

    async def _resolve_damage(self, batch: Batch, outcome: Outcome, damaged: dict[int, Defect]) -> Outcome:
        """Read damaged chunks again; discard those that are damaged in the tier, and skip the rest here."""
        statuses, counts, discarded = list(outcome.statuses), Counter(outcome.reasons), []
        again = batch.part(list(damaged))
        for index, key, second in zip(damaged, again.keys, await self._reread(again), strict=True):
            first, found, why = damaged[index], damaged[index][0], "sound when read again"
            statuses[index] = Status.OK if second is Status.OK else Status.CORRUPT
            if second is not Status.OK:
                counts[found] += outcome.statuses[index] == Status.OK  # otherwise the tier counted it
            if second not in (Status.OK, Status.ABSENT):
                why = self._suspects.discard_or_skip(key, is_confirmed=first == second, now_s=self._now_s())
                discarded += [] if why else [key]
            text = f"{why}, so others keep it; check this host's memory and network" if why else "discarded"
            text = text if second is not Status.ABSENT else "discarded meanwhile by another engine"
            text = f"chunk {key.hex()} failed its integrity check here ({found}): {text}"
            self._log(logging.WARNING if why else logging.ERROR, found, text)
        if discarded:
            await self._discard(discarded)
        return self._complete(Outcome(statuses, counts), len(batch))

    async def _reread(self, batch: Batch) -> Sequence[Status | Defect]:
        try:
            async with self._clock.timeout_at(self._now_s() + self._deadline_s * _REREAD_SHARE):
                outcome = self._complete(await self._tier.reread(batch), len(batch))
            damaged = await self._integrity.damaged(batch, outcome.statuses)
        except BaseException as error:
            require_fault(error)
            return (Status.FAILED,) * len(batch)
        return [damaged.get(index, status) for index, status in enumerate(outcome.statuses)]

    async def _find(self, command: Get, epoch: Epoch, progress: Progress) -> list[bool]:
        keys, addresses = tuple(command.keys), command.addresses  # copies, which a tier cannot change
        known = self._tier.known(keys)
        found = [knowledge == Knowledge.PRESENT for knowledge in known]
        unknown = [index for index, knowledge in enumerate(known) if knowledge == Knowledge.UNKNOWN]
        if len(found) != len(keys):
            raise TierError(f"known() answered {len(found)} of {len(keys)} keys")
        if unknown:
            asked = tuple(keys[index] for index in unknown)
            answers = await self._contains(asked, addresses, epoch, progress)
            for index, there in zip(unknown, answers, strict=True):
                found[index] = bool(there)
        return found

    async def _contains(
        self, keys: Sequence[OffloadKey], addresses: Sequence[str], epoch: Epoch, progress: Progress
    ) -> Sequence[bool]:
        try:
            answers = await self._contains_once(keys, addresses, progress)
        except BaseException as error:
            require_fault(error)
            is_transient = self._retries.is_transient(error)
            if not is_transient or not await self._retries.pause(progress, progress.lookup_s):
                raise
            self._require_usable(epoch)
            progress.retry = "failed"
            answers = await self._contains_once(keys, addresses, progress)
            progress.retry = "helped"
        if len(answers) != len(keys):
            raise TierError(f"contains() answered {len(answers)} of {len(keys)} keys")
        progress.answered = TransferHealth.GOOD
        return answers

    async def _contains_once(
        self, keys: Sequence[OffloadKey], addresses: Sequence[str], progress: Progress
    ) -> Sequence[bool]:
        begun_s = self._now_s()
        try:
            return await self._tier.contains_at(keys, addresses)
        finally:
            progress.lookup_s += self._now_s() - begun_s

    async def _attempts(
        self, act: Callable[[Batch], Awaitable[Outcome]], batch: Batch, epoch: Epoch, progress: Progress
    ) -> Outcome:
        """Call ``act``, and retry it for chunks that failed for a transient reason."""
        outcome = await self._attempt(act, batch, progress)
        failed = self._retries.failed(outcome)
        if failed and await self._retries.pause(progress, progress.seconds):
            self._require_usable(epoch)  # Otherwise it would put an old chunk after a reset.
            second = await self._attempt(act, batch.part(failed), progress)
            progress.retry = "helped" if progress.health_of(second) is TransferHealth.GOOD else "failed"
            outcome = self._complete(self._retries.joined(outcome, failed, second), len(batch))
        progress.answered = progress.health_of(outcome)
        return outcome

    async def _attempt(
        self, act: Callable[[Batch], Awaitable[Outcome]], batch: Batch, progress: Progress
    ) -> Outcome:
        begun_s = self._now_s()
        try:
            return await act(batch)
        except BaseException as error:
            return self._failure(batch.keys, error, progress)
        finally:
            progress.seconds += self._now_s() - begun_s

    def _complete(self, outcome: Outcome, count: int) -> Outcome:
        """Check and bound an outcome of the tier: the core relies on it, in the engine's thread."""
        statuses = tuple(outcome.statuses)
        if len(statuses) != count:
            raise TierError(f"the outcome has {len(statuses)} statuses for {count} chunks")
        if any(type(status) is not Status for status in statuses):  # False would compare equal to OK
            raise TierError(f"the statuses {statuses!r:.200} are not all of kvtier.tiers.Status")
        failed = sum(status not in (Status.OK, Status.ABSENT) for status in statuses)
        return Outcome(statuses, reasons.bounded(outcome.reasons, self._reasons, failed))

    def _warn_of(self, verb: str, outcome: Outcome) -> Outcome:
        """Log the tier's own reasons in an outcome, such as a full disk; return the outcome."""
        for word, count in outcome.reasons.items():
            if meaning := self._tier.reasons.get(word):
                self._warn(f"{verb} {word}", f"{verb} of {count} chunks failed: {meaning} ({word})")
        return outcome

    async def _discard(self, keys: Sequence[OffloadKey]) -> None:
        """Discard corrupt chunks. If this fails, the next get finds them corrupt again."""
        try:
            await self._tier.discard(keys)
        except Exception as error:
            self._warn("discard", f"discard of {len(keys)} chunks failed: {self._words(error)}")

    def _failed_outcome(
        self, keys: Sequence[OffloadKey], error: BaseException, progress: Progress
    ) -> Outcome:
        """Return the outcome of a command that did not start, ran out of time or raised."""
        require_fault(error)
        if isinstance(error, _NotBegunError):
            return Outcome.all(Status.FAILED, len(keys), str(error))
        if not progress.has_begun:
            return Outcome.all(Status.FAILED, len(keys), "late")
        outcome = self._failure(keys, error, progress)
        progress.answered = progress.health_of(outcome)
        return outcome

    def _failure(self, keys: Sequence[OffloadKey], error: BaseException, progress: Progress) -> Outcome:
        require_fault(error)
        verb, word = progress.verb, reason_of(error)
        self._warn(f"{verb} {word}", f"{verb} of {len(keys)} chunks failed: {self._words(error)}")
        outcome = Outcome.all(Status.FAILED, len(keys), word)
        return self._complete(outcome, len(keys))  # a failed lookup may have any reason

    def _words(self, error: BaseException) -> str:
        return words_of(error, self._tier.config)

    def _warn(self, subject: str, text: str) -> None:
        self._log(logging.WARNING, subject, text)

    def _log(self, level: int, subject: str, text: str) -> None:
        added = self._log_limit.allow(subject, self._now_s())
        if added is not None:
            logger.log(level, "tier %s: %s%s", self.name, text, added)


class _NotBegunError(Exception):
    """A command did not start. The text is the reason to count."""
