"""Several roots as one tier: each chunk has one of them, told by its key.

Each root is a file tier of its own, with its own threads, bounds, epochs and upkeep, so that a disk that
fails takes the chunks on it and no others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeVar

import anyio
import crc32c

from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.tiers.base import Batch, Knowledge, Outcome, SecondaryTier, Status, TierConfig, TierContext, Usage
from kvtier.tiers.fs.config import FsConfig
from kvtier.tiers.fs.lanes import until_done

LOOK_AGAIN_S: Final = 30.0
"""Seconds from one try to open a root that could not be opened to the next."""

_WORD: Final = (1 << 64) - 1
_log = logging.getLogger("kvtier.tiers.fs")
T = TypeVar("T")


class OneRoot(SecondaryTier[FsConfig]):
    """A file tier of one root."""

    @property
    @abstractmethod
    def epoch(self) -> int | None:
        """Number of the epoch that it reads and writes; None after a reset that failed."""

    @abstractmethod
    async def catch_up(self, number: int) -> None:
        """Leave the epoch for the one that openers join, which is not behind ``number`` from now on.

        Raises:
            TierError: it could not be written down. The tier then has nothing and takes nothing.
        """


class MakeRoot(Protocol):
    """Makes the tier of one root."""

    def __call__(self, config: FsConfig) -> OneRoot:
        """Make it from settings that name this root alone."""


class StripedFs(SecondaryTier[FsConfig]):
    """Spreads chunks over the roots of ``config``.

    A chunk's root is the one whose path and the key have the highest mark together: where a root is added
    or left away, the chunks of the others stay where they are. A root that cannot be opened is
    said so; its share is not there, and puts of it are refused. It is tried again now and then, and when it
    can be opened all are opened anew.

    A reset is told by the epochs of the roots: one that is behind was away when the others were reset, and
    has nothing for who opens them together.

    Args:
        config: the settings; all but the roots holds for each of them.
        make_root: makes the tier of one root.
    """

    Config: ClassVar[type[TierConfig]] = FsConfig
    verifies: ClassVar[bool] = True
    medium = "disk"

    def __init__(self, config: FsConfig, make_root: MakeRoot) -> None:
        super().__init__(config)
        self._factors = [_factor_of(root) for root in config.root_dirs]
        self._make_root = make_root
        self._looking: asyncio.Future[None] | None = None
        self._roots = [make_root(config.of_root(root)) for root in config.root_dirs]
        self._is_open = [False] * len(self._roots)
        self.reasons = self._roots[0].reasons  # type: ignore[misc]  # every root has the same

    # ------------------------------------------------------------------- opening and closing

    async def open(self, context: TierContext) -> None:
        """Open all roots that can be opened. TierError where there is none. See ``SecondaryTier.open``."""
        try:
            results = await _all_of(root.open(context) for root in self._roots)
        except BaseException:  # some may be open already
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise
        for i, (path, error) in enumerate(zip(self.config.root_dirs, results, strict=True)):
            self._is_open[i] = not isinstance(error, Exception)
            if isinstance(error, Exception):
                _log.error("tier %s goes on without the root %s: %s", context.name, path, error)
        if not any(self._is_open):
            paths = ", ".join(map(str, self.config.root_dirs))
            raise TierError(f"tier {context.name}: none of its roots can be opened: {paths}: {results[0]}")
        missing = [
            path for path, is_open in zip(self.config.root_dirs, self._is_open, strict=True) if not is_open
        ]
        await self._catch_up(context.name)
        if missing:
            self._looking = asyncio.ensure_future(self._look_for(missing, context))

    async def _look_for(self, missing: Sequence[Path], context: TierContext) -> None:
        """Have the tier opened anew when one of these roots can be: together, for their epochs' sake."""
        while True:
            await anyio.sleep(LOOK_AGAIN_S)
            for path in missing:
                if await self._can_be_opened(path, context):
                    context.lost(f"its root {path} can be opened now")
                    return

    async def _can_be_opened(self, path: Path, context: TierContext) -> bool:
        root = self._make_root(self.config.of_root(path))
        try:
            await root.open(TierContext(context.name, context.identity, context.chunk_bytes))
        except Exception as error:
            _log.debug("tier %s: %s: %s", context.name, path, error)
            return False
        await root.aclose()
        return True

    async def _catch_up(self, name: str) -> None:
        """Have all roots go on from the highest epoch."""
        opened = [i for i, is_open in enumerate(self._is_open) if is_open]
        epochs = {i: self._roots[i].epoch or 0 for i in opened}
        highest = max(epochs.values())
        behind = [i for i, number in epochs.items() if number < highest]
        results = await _all_of(self._roots[i].catch_up(highest) for i in behind)
        for i, error in zip(behind, results, strict=True):
            path = self.config.root_dirs[i]
            if error is None:
                _log.warning("tier %s: %s missed a reset: what it held is not used any more", name, path)
            elif isinstance(error, Exception):
                self._is_open[i] = False  # it has nothing, and takes nothing
                _log.error("tier %s goes on without the root %s: %s", name, path, error)

    async def aclose(self) -> None:
        """Close all roots. See ``SecondaryTier.aclose``."""
        self._is_open = [False] * len(self._roots)
        ends: list[Awaitable[object]] = [root.aclose() for root in self._roots]
        if self._looking is not None:
            self._looking.cancel()
            ends.append(asyncio.wait([self._looking]))
        closing = asyncio.ensure_future(_all_of(ends))
        cancelled = await until_done(closing)  # a task that is cancelled before its first step does nothing
        _raise_first([cancelled, *closing.result()])

    # ---------------------------------------------------------------------------- the verbs

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """See ``SecondaryTier.known``."""
        answers = [Knowledge.ABSENT] * len(keys)
        for i, indices in self._shares(keys).items():
            if self._is_open[i]:
                found = self._roots[i].known([keys[index] for index in indices])
                for index, answer in zip(indices, found, strict=True):
                    answers[index] = answer
        return answers

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """See ``SecondaryTier.contains``."""
        answers = [False] * len(keys)

        async def ask(i: int, indices: Sequence[int]) -> None:
            found = await self._roots[i].contains([keys[index] for index in indices])
            for index, answer in zip(indices, found, strict=True):
                answers[index] = answer

        await self._share_out(keys, ask)
        return answers

    async def put(self, batch: Batch) -> Outcome:
        """See ``SecondaryTier.put``."""
        return await self._move(batch, lambda root, mine: root.put(mine), Status.REFUSED)

    async def get(self, batch: Batch) -> Outcome:
        """See ``SecondaryTier.get``."""
        return await self._move(batch, lambda root, mine: root.get(mine), Status.ABSENT)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """See ``SecondaryTier.touch``."""
        await self._share_out(keys, lambda i, mine: self._roots[i].touch([keys[index] for index in mine]))

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """See ``SecondaryTier.discard``."""
        await self._share_out(keys, lambda i, mine: self._roots[i].discard([keys[index] for index in mine]))

    async def reset(self) -> None:
        """Reset all roots. See ``SecondaryTier.reset``: one that could not be reset has nothing any more."""
        opened = [root for root, is_open in zip(self._roots, self._is_open, strict=True) if is_open]
        _raise_first(await _all_of(root.reset() for root in opened))

    def usage(self) -> Usage | None:
        """Add up the roots' usage; what one of them does not know, nobody knows."""
        found = [usage for root in self._roots if (usage := root.usage()) is not None]
        if not found:
            return None
        return Usage(
            _sum_or_none([usage.used_bytes for usage in found]),
            _sum_or_none([usage.capacity_bytes for usage in found]),
        )

    @property
    def roots(self) -> Mapping[Path, SecondaryTier[FsConfig]]:
        """The roots' own tiers."""
        return dict(zip(self.config.root_dirs, self._roots, strict=True))

    # ------------------------------------------------------------------------------- shares

    def _shares(self, keys: Sequence[OffloadKey]) -> dict[int, list[int]]:
        """Return the indices of each root's keys."""
        shares: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            checksum = crc32c.crc32c(key)
            marks = [checksum * factor & _WORD for factor in self._factors]
            shares.setdefault(marks.index(max(marks)), []).append(index)
        return shares

    async def _share_out(
        self, keys: Sequence[OffloadKey], work: Callable[[int, Sequence[int]], Awaitable[object]]
    ) -> None:
        shares = {i: mine for i, mine in self._shares(keys).items() if self._is_open[i]}
        _raise_first(await _all_of(work(i, mine) for i, mine in shares.items()))

    async def _move(
        self,
        batch: Batch,
        move: Callable[[SecondaryTier[FsConfig], Batch], Awaitable[Outcome]],
        without: Status,
    ) -> Outcome:
        statuses = [without] * len(batch)
        reasons: Counter[str] = Counter()
        shares = self._shares(batch.keys)
        opened = {i: indices for i, indices in shares.items() if self._is_open[i]}
        closed = sum(len(indices) for i, indices in shares.items() if i not in opened)
        if closed and without is not Status.ABSENT:
            reasons["root_down"] += closed
        outcomes = await _all_of(move(self._roots[i], _part(batch, mine)) for i, mine in opened.items())
        for indices, outcome in zip(opened.values(), outcomes, strict=True):
            if isinstance(outcome, Exception):
                _log.error("a root has failed: %r", outcome)
                outcome = Outcome.all(Status.FAILED, len(indices), "error")
            reasons.update(outcome.reasons)
            for index, status in zip(indices, outcome.statuses, strict=True):
                statuses[index] = status
        return Outcome(tuple(statuses), reasons)


def _factor_of(root: Path) -> int:
    """Return an odd number by which a key's checksum becomes its mark for a root.

    Checksums that begin with the root's in place of it would differ by the same bits for every key, and so
    give one of three roots half of all chunks.
    """
    return int.from_bytes(hashlib.sha256(str(root).encode()).digest()[:8], "big") | 1


def _part(batch: Batch, indices: Sequence[int]) -> Batch:
    if len(indices) == len(batch):
        return batch
    return Batch([batch.keys[i] for i in indices], [batch.slots[i] for i in indices], batch.memory)


async def _all_of(calls: Any) -> list[Any]:
    """Await calls at once, to the end of each of them: results and exceptions, in their order.

    A cancellation goes on to all, and is raised when none of them runs any more.
    """
    return await asyncio.gather(*calls, return_exceptions=True)


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _sum_or_none(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
