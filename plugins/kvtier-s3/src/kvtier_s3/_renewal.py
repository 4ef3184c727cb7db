"""Replacement of a client whose credentials have expired or whose connections are dead."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from kvtier.errors import TierError
from kvtier.tiers import GuardedLogger, in_thread
from kvtier_s3._cache import Cache
from kvtier_s3._store import make_store
from kvtier_s3.config import S3Config

_EVERY_S: Final = 5.0
_log = GuardedLogger("kvtier.tiers.s3")


class Renewal:
    """Replaces the client of an open cache in the background, at most once every few seconds."""

    def __init__(self, cache: Cache, config: S3Config, name: str) -> None:
        self._cache = cache
        self._config = config
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._begun_s = 0.0

    def start(self) -> None:
        """Make a new client, unless that was started a moment ago. Requests in flight keep the old client."""
        now_s = time.monotonic()
        if now_s >= self._begun_s + _EVERY_S and (self._task is None or self._task.done()):
            self._begun_s = now_s
            self._task = asyncio.create_task(self._renew())

    async def aclose(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _renew(self) -> None:
        try:
            self._cache.store = await in_thread(make_store, self._config)
        except TierError as error:  # for example because a file is being replaced
            _log.warning("tier %s: the client keeps its old credentials: %s", self._name, error)
