"""The manifest beside the chunks: whose they are, spelled out, and compared on each opening."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import aiofiles
import aiofiles.os

from kvtier.errors import IdentityError, TierError
from kvtier.identity import Identity
from kvtier.tiers.fs import layout
from kvtier.tiers.fs.lanes import Lane

_MOST_CHARACTERS: Final = 1 << 20
P = ParamSpec("P")
T = TypeVar("T")


class LaneExecutor(Executor):
    """A lane as an executor: file calls of asyncio then hang in the tier's threads, if they hang."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See ``concurrent.futures.Executor``."""
        future: Future[T] = Future()
        self._lane.submit(partial(_settle, future, partial(fn, *args, **kwargs)))
        return future


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


async def agree(path: Path, draft: Path | None, identity: Identity, tier: str, executor: Executor) -> None:
    """Compare the manifest with ``identity``; write it where there is none.

    Args:
        path: the manifest.
        draft: where to write it before it gets its name; None where nothing can be written.
        identity: what the opener's chunks belong to.
        tier: the tier's name, for messages.
        executor: where the file calls block.

    Raises:
        TierError: it belongs to another identity or cannot be read; the message lists what differs.
        OSError: it cannot be written.
    """
    try:
        async with aiofiles.open(
            path, encoding="utf-8", errors="replace", opener=_regular, executor=executor
        ) as file:
            found = await file.read(_MOST_CHARACTERS)
    except FileNotFoundError:
        if draft is None:
            raise
        await _write(path, draft, identity.manifest, executor)
        return
    try:
        identity.require(found, str(path))
    except IdentityError as error:
        raise TierError(f"tier {tier}: {error}") from error


def _regular(path: str, _flags: int) -> int:
    return layout.open_regular(path)


async def _write(path: Path, draft: Path, text: str, executor: Executor) -> None:
    """Write a file that is there whole or not at all, after a power cut too."""
    opener = partial(os.open, mode=layout.FILE_MODE)
    async with aiofiles.open(draft, "w", encoding="utf-8", opener=opener, executor=executor) as file:
        await file.write(text)
        await file.flush()
        await asyncio.get_running_loop().run_in_executor(executor, os.fsync, file.fileno())
    await aiofiles.os.replace(draft, path, executor=executor)
