"""One cache in a bucket: its identity and its current epoch.

**Epochs.** The chunks of an epoch have their own prefix, and an empty marker object records the epoch. A tier
that opens joins the epoch of the greatest marker. A reset writes a greater marker, for tiers that open later,
and continues in an epoch without a marker, which no other tier finds. Tiers already open keep their epoch.

Each marker has a random part. So two markers are never equal, with or without conditional puts, and an epoch
whose marker was deleted by hand never returns. The greatest marker wins, so the order of events does not
matter. A reset that finds a greater marker than its own tries again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError

from kvtier.errors import IdentityError, TierError
from kvtier.tiers import GuardedLogger, TierContext
from kvtier_s3._errors import classify
from kvtier_s3._layout import EpochName, Layout
from kvtier_s3._store import Store, describe, remedy
from kvtier_s3.config import S3Config

_ATTEMPTS: Final = 10
_log = GuardedLogger("kvtier.tiers.s3")


class JoinedCache(NamedTuple):
    """The result of ``Cache.join``.

    Attributes:
        chunks: prefix of the epoch's chunks.
        conditional_puts: whether the store supports puts that do not replace an object.
        read_only: whether the credentials allow reading only.
    """

    chunks: str
    conditional_puts: bool
    read_only: bool


class Cache:
    """The cache of one identity."""

    def __init__(self, store: Store, config: S3Config, context: TierContext) -> None:
        self.store = store
        self.layout = Layout(config.prefix, context.identity.namespace)
        self._config = config
        self._context = context

    async def join(self) -> JoinedCache:
        """Join the current epoch; create the cache if it does not exist.

        Raises:
            TierError: the store is unusable, or the prefix belongs to another cache.
        """
        try:
            epochs = await self._epochs()
            await self._check_manifest()
            conditional, read_only = await self._probe_puts()
            if not epochs:
                await self._put_marker(EpochName.make(0))
                epochs = await self._epochs()  # Another tier may have written its marker first.
        except TierError:
            raise
        except Exception as error:
            raise self._error("cannot be used", error) from None  # obstore's message may contain secrets
        return JoinedCache(self.layout.chunks(max(epochs)), conditional, read_only)

    async def advance(self) -> str:
        """Start a new epoch for tiers that open later, and a private one for this tier.

        Returns:
            The prefix of this tier's chunks from now on.

        Raises:
            TierError: the marker could not be written.
        """
        try:
            epochs = await self._epochs()
            for _ in range(_ATTEMPTS):
                mine = EpochName.make(max(epochs).number + 1 if epochs else 0)
                await self._put_marker(mine)
                epochs = await self._epochs()
                if max(epochs) == mine:
                    await self._delete_markers([epoch for epoch in epochs if epoch < mine])
                    return self.layout.chunks(EpochName.make(mine.number))
        except Exception as error:
            raise self._error("could not be reset", error) from None
        raise TierError(f"{self._title} could not be reset: {_ATTEMPTS} concurrent resets came first")

    def _error(self, what: str, error: Exception) -> TierError:
        failure = classify(error)
        return TierError(f"{self._title} {what}: {failure}; {remedy(self._config, failure)}")

    @property
    def _title(self) -> str:
        return f"tier {self._context.name}: {describe(self._config)}"

    async def _epochs(self) -> list[EpochName]:
        objects = await obstore.list(self.store, self.layout.markers).collect_async()
        return [epoch for found in objects if (epoch := EpochName.parse(found["path"])) is not None]

    async def _put_marker(self, epoch: EpochName) -> None:
        await obstore.put_async(self.store, f"{self.layout.markers}/{epoch}", b"", use_multipart=False)

    async def _delete_markers(self, epochs: list[EpochName]) -> None:
        """Delete obsolete markers. A marker that cannot be deleted does no harm."""
        for epoch in epochs:
            try:
                await obstore.delete_async(self.store, [f"{self.layout.markers}/{epoch}"])
            except Exception as error:
                _log.info("%s: obsolete marker not deleted: %s", self._title, classify(error))

    async def _check_manifest(self) -> None:
        """Compare the manifest with the identity; write it if it does not exist."""
        manifest = self._context.identity.manifest
        found = await self._read_manifest()
        if found is None:
            await obstore.put_async(self.store, self.layout.manifest, manifest.encode(), use_multipart=False)
            found = await self._read_manifest() or manifest
        try:
            self._context.identity.require(found, f"{describe(self._config)}, {self.layout.manifest}")
        except IdentityError as error:
            raise TierError(f"tier {self._context.name}: {error}") from error

    async def _read_manifest(self) -> str | None:
        try:
            result = await obstore.get_async(self.store, self.layout.manifest)
        except FileNotFoundError:
            return None
        return bytes(await result.bytes_async()).decode(errors="replace")

    async def _probe_puts(self) -> tuple[bool, bool]:
        """Return whether the store supports conditional puts, and whether it can only be read.

        Puts the existing manifest again: a store with conditional puts refuses this; another store replaces
        it by an equal one.
        """
        if self._config.conditional_puts != "auto":
            return self._config.conditional_puts, False
        manifest = self._context.identity.manifest.encode()
        try:
            await obstore.put_async(
                self.store, self.layout.manifest, manifest, mode="create", use_multipart=False
            )
        except AlreadyExistsError:
            return True, False
        except Exception as error:
            failure = classify(error)
            if failure.reason == "forbidden":
                _log.warning("%s is read-only (%s): nothing will be put", self._title, failure)
                return False, True
            if failure.reason not in ("request", "server"):  # unsupported is 501 or 400
                raise
        _log.info("%s does not support conditional puts: a chunk put twice is replaced", self._title)
        return False, False
