"""The hooks and attributes that a tier's author supplies to its conformance tests."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import pytest

from kvtier import Identity
from kvtier._settings import validation
from kvtier.keys import OffloadKey
from kvtier.tiers import SecondaryTier
from kvtier_testing.limits import LimitedSuite
from kvtier_testing.tiers.driver import TierDriver
from kvtier_testing.tiers.rig import TierRig

FOREVER = math.inf
VERBS = ("open", "put", "get", "contains", "touch", "discard", "reset", "aclose", "known", "usage")


class Damage(Enum):
    """Ways to damage a stored chunk."""

    FLIPPED = "one bit of its bytes is another"
    CUT = "the second half of it is missing"
    EMPTY = "nothing of it is left but its name"
    SWAPPED = "in its place is what was stored of another chunk"


class TierSetup(LimitedSuite):
    """The attributes and hooks of ``TierConformance``. A subclass sets ``tier`` and defines ``settings``.

    Attributes:
        tier: the class that is tested.
        is_persistent: whether chunks survive closing and reopening the tier.
        is_shared: whether several tiers may have one place open at once.
        is_lossy: whether chunks may leave although there is room for all. Such a tier may answer ABSENT at
            any time, but must never return a wrong byte.
        may_mix_versions: whether a get during a discard of its chunk may answer OK with bytes of other
            chunks, because freed memory is reused at once. They must not match the trailer.
        chunk_bytes: length of the chunks of most tests.
        sizes: further lengths of chunks to test.
        settle_s: seconds until leftovers of a call, such as a thread, become visible.
        pause_s: longest time that a call may block the event loop, in seconds.
        patience_s: time limit of a single call, in seconds.
        limit_s: time limit of a test, in seconds.
    """

    tier: ClassVar[type[SecondaryTier[Any]]]
    is_persistent: ClassVar[bool] = False
    is_shared: ClassVar[bool] = False
    is_lossy: ClassVar[bool] = False
    may_mix_versions: ClassVar[bool] = False
    chunk_bytes: ClassVar[int] = 64 * 1024
    sizes: ClassVar[tuple[int, ...]] = (4096, 3 * 4096, 2 * 2**20)
    settle_s: ClassVar[float] = 0.1
    pause_s: ClassVar[float] = 0.1

    def settings(self, place: Path) -> Mapping[str, object]:
        """Return a configuration as a user writes it, ``type`` included.

        Args:
            place: a path that does not exist yet. Tiers with the same place find each other's chunks; tiers
                with different places never do. A tier that keeps its chunks elsewhere uses ``place.name``,
                which is unique, for its bucket or prefix.

        There must be room for 256 MiB of chunks.
        """
        raise NotImplementedError(f"{type(self).__name__} needs settings(place)")

    def make_tier(self, place: Path) -> SecondaryTier[Any]:
        """Make a tier that is not open yet."""
        return self.make(self.settings(place))

    def bounded(self, place: Path, capacity_bytes: int) -> Mapping[str, object]:
        """Return the configuration of a tier that keeps no more than ``capacity_bytes``. Optional."""
        raise NotImplementedError

    def damage(self, tier: SecondaryTier[Any], place: Path, key: OffloadKey, damage: Damage) -> None:
        """Damage what is stored under ``key``. Called in a thread, so it may block. Optional."""
        raise NotImplementedError

    def restart(self, place: Path) -> None:
        """Restart the backend, which may lose all chunks. Called in a thread: it may block. Optional."""
        raise NotImplementedError

    def slowed(self, tier: SecondaryTier[Any], seconds: float) -> AbstractContextManager[None]:
        """Return a context that makes each put and get ``seconds`` slower at the backend. Optional.

        With ``math.inf`` they hang until the context is left. It may use any means, such as a proxy that
        waits, a command of the server, or a double of the client.
        """
        raise NotImplementedError

    def sequences(self) -> hypothesis.settings:
        """Return the number and length of call sequences that are compared with a dict. Optional."""
        return hypothesis.settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
        )

    def wipe(self, place: Path) -> None:
        """Remove the chunks stored at a place after a test. Optional: a directory is removed anyway."""

    # ------------------------------------------------------------------------- used by the tests

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Path]:
        """Return an unused place."""
        here = tmp_path / f"kvtier-{secrets.token_hex(6)}"
        yield here
        self.wipe(here)

    def around_test(self) -> AbstractContextManager[None]:
        """Refuse blocking calls of the tier on the event loop. See ``LimitedSuite.around_test``."""
        return self._refused_blocking_calls()

    @contextmanager
    def _refused_blocking_calls(self) -> Iterator[None]:
        """Make blocking calls of the tier's package on the event loop raise, if blockbuster is installed."""
        try:
            from blockbuster import blockbuster_ctx
        except ImportError:
            yield
            return
        package = self.tier.__module__.partition(".")[0]
        with blockbuster_ctx(package, excluded_modules=["kvtier_testing"]):
            yield

    def make(self, settings: Mapping[str, object]) -> SecondaryTier[Any]:
        """Make a tier that is not open yet, with these settings."""
        return self.tier(validation.build(self.tier.Config, settings))

    def opened(
        self, place: Path, *, identity: Identity | None = None, chunk_bytes: int | None = None
    ) -> AbstractAsyncContextManager[TierRig]:
        """Open a tier, and close it at the end."""
        return self.rig(self.make_tier(place), place, identity=identity, chunk_bytes=chunk_bytes).opened()

    def rig(
        self,
        tier: SecondaryTier[Any],
        place: Path,
        *,
        identity: Identity | None = None,
        chunk_bytes: int | None = None,
    ) -> TierRig:
        """Return the rig of a tier that the caller opens and closes, and watch its calls."""
        self.calls.watch(tier, VERBS, SecondaryTier)
        mine = identity or Identity.make("kvtier/conformance", {"place": place.name})
        return TierRig(tier, mine, chunk_bytes or self.chunk_bytes, is_lossy=self.is_lossy)

    @asynccontextmanager
    async def driven(
        self, place: Path, *, slots: int = 32, chunk_bytes: int | None = None
    ) -> AsyncIterator[TierDriver]:
        """Open a tier, call it and close it through kvtier's executor."""
        tier = self.make_tier(place)
        driver = TierDriver(self.rig(tier, place, chunk_bytes=chunk_bytes), slots)
        async with driver.executor:
            yield driver

    def defines(self, hook: str) -> bool:
        """Return whether the subclass defines a hook."""
        return getattr(type(self), hook) is not getattr(TierSetup, hook)

    def require(self, hook: str, why: str) -> None:
        """Skip the test unless the subclass defines a hook."""
        if not self.defines(hook):
            pytest.skip(f"{type(self).__name__} does not define {hook}(): {why}")
