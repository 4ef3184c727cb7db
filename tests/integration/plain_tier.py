"""A tier as a third party may write it, without deadlines, fault handling or checksums. A file names the
fault to inject, so a test can change it while an engine runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import anyio

from kvtier.keys import OffloadKey
from kvtier.tiers import Batch, Outcome, SecondaryTier, Status, TierConfig

_LOOK_AGAIN_S = 0.02
_DELAY_S = 0.1


class PlainConfig(TierConfig):
    """Settings: the file that names the fault; without the file there is no fault."""

    fault: Path


class PlainTier(SecondaryTier[PlainConfig]):
    """Keeps chunks in a dict that stands for a server."""

    Config = PlainConfig

    def __init__(self, config: PlainConfig) -> None:
        super().__init__(config)
        self._chunks: dict[OffloadKey, tuple[bytes, bytes]] = {}

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Look into the dict."""
        await self._suffer()
        return [key in self._chunks for key in keys]

    async def put(self, batch: Batch) -> Outcome:
        """Copy the chunks into the dict."""
        if await self._suffer() == "fill up":
            raise OSError(28, "no space left on the server")
        for key, view, trailer in zip(batch.keys, batch.views, batch.trailers, strict=True):
            self._chunks[key] = bytes(view), trailer
        return Outcome.all(Status.OK, len(batch))

    async def get(self, batch: Batch) -> Outcome:
        """Copy the chunks out of the dict."""
        fault = await self._suffer()
        statuses = []
        for index, (key, view) in enumerate(zip(batch.keys, batch.views, strict=True)):
            found = self._chunks.get(key)
            statuses.append(Status.OK if found else Status.ABSENT)
            if found:
                view[:], batch.trailers[index] = found
                if fault == "corrupt":
                    half = len(view) // 2
                    view[:] = found[0][half:] + found[0][:half]
        return Outcome(statuses)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove them from the dict."""
        for key in keys:
            self._chunks.pop(key, None)

    async def reset(self) -> None:
        """Remove everything."""
        self._chunks.clear()

    async def _suffer(self) -> str:
        """Inject the current fault into a call; return it for call-specific effects."""
        fault = self._fault()
        if fault == "slow":
            await anyio.sleep(_DELAY_S)
        with anyio.CancelScope(shield=True):  # as a client that ignores cancellation does
            while self._fault() == "hang":  # noqa: ASYNC110 - no event tells when it is over
                await anyio.sleep(_LOOK_AGAIN_S)
        if fault == "vanish":
            self._chunks.clear()
            raise ConnectionRefusedError(111, "nobody listens")
        if fault == "error":
            raise RuntimeError("an error of the client library")
        return fault

    def _fault(self) -> str:
        try:
            return str(json.loads(self.config.fault.read_text()))
        except FileNotFoundError:
            return ""
