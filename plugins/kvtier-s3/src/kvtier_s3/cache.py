"""One cache in a bucket: whose it is, and which epoch is the current one.

**Epochs.** The chunks of an epoch have a name of their own in common, and a marker says that it has begun.
Whoever opens joins the greatest marker. A reset puts a greater one, for those who open later, and takes for
itself an epoch that has no marker: nobody else finds what is put there. Who opened before stays where it is.

Each marker has a random part, so two of them are never one, with or without conditional puts, and an epoch
whose marker was deleted by hand never comes back. The greatest wins, so that the order of events does not
matter; a reset that finds one greater than its own tries again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import obstore
from obstore.exceptions import AlreadyExistsError

from kvtier.errors import IdentityError, TierError
from kvtier.tiers.base import TierContext
from kvtier_s3.config import S3Config
from kvtier_s3.faults import fault_of
from kvtier_s3.layout import Epoch, Layout
from kvtier_s3.stores import Store, remedy, where

_ATTEMPTS: Final = 10
_log = logging.getLogger("kvtier.tiers.s3")


@dataclass(frozen=True, slots=True)
class Joined:
    """What there is to know of a cache that was joined.

    Attributes:
        place: what the names of the chunks begin with.
        conditional_puts: whether a put can say that it must not replace an object.
        read_only: whether the credentials may read, but not write.
    """

    place: str
    conditional_puts: bool
    read_only: bool


class Cache:
    """The cache of one identity.

    Args:
        store: the client's store.
        config: the tier's settings.
        context: what the tier was opened with.

    Attributes:
        store: see there.
        layout: the names of its objects.
    """

    def __init__(self, store: Store, config: S3Config, context: TierContext) -> None:
        self.store = store
        self.layout = Layout(config.prefix, context.identity.namespace)
        self._config = config
        self._context = context

    async def join(self) -> Joined:
        """Find the cache, or make it.

        Raises:
            TierError: the store cannot be used, or the place belongs to another cache.
        """
        try:
            epochs = await self._epochs()
            await self._agree()
            conditional, read_only = await self._try_conditional_puts()
            if not epochs:
                await self._mark(Epoch.make(0))
                epochs = await self._epochs()  # somebody else may have come first
        except TierError:
            raise
        except Exception as error:
            raise self.error("cannot be used", error) from None  # what the client says may hold secrets
        return Joined(self.layout.place(max(epochs)), conditional, read_only)

    async def advance(self) -> str:
        """Begin a new epoch: one for those who open later, and another for this opener alone.

        Returns:
            What the names of this opener's chunks begin with from now on.

        Raises:
            TierError: it could not be written down.
        """
        try:
            epochs = await self._epochs()
            for _ in range(_ATTEMPTS):
                mine = Epoch.make(max(epochs).number + 1 if epochs else 0)
                await self._mark(mine)
                epochs = await self._epochs()
                if max(epochs) == mine:
                    await self._remove_markers([epoch for epoch in epochs if epoch < mine])
                    return self.layout.place(Epoch.make(mine.number))
        except Exception as error:
            raise self.error("could not be reset", error) from None
        raise TierError(f"{self._title} could not be reset: others reset it {_ATTEMPTS} times meanwhile")

    def error(self, what: str, error: Exception) -> TierError:
        """Make an error that names the place, what went wrong, and the setting to look at."""
        fault = fault_of(error)
        return TierError(f"{self._title} {what}: {fault}; {remedy(self._config, fault)}")

    @property
    def _title(self) -> str:
        return f"tier {self._context.name}: {where(self._config)}"

    async def _epochs(self) -> list[Epoch]:
        objects = await obstore.list(self.store, self.layout.markers).collect_async()
        return [epoch for found in objects if (epoch := Epoch.of_marker(found["path"])) is not None]

    async def _mark(self, epoch: Epoch) -> None:
        await obstore.put_async(self.store, f"{self.layout.markers}/{epoch}", b"", use_multipart=False)

    async def _remove_markers(self, epochs: list[Epoch]) -> None:
        """Remove markers that no longer count. Where that fails they stay, and harm nothing."""
        for epoch in epochs:
            try:
                await obstore.delete_async(self.store, [f"{self.layout.markers}/{epoch}"])
            except Exception as error:
                _log.info("%s: an old marker stays: %s", self._title, fault_of(error))

    async def _agree(self) -> None:
        """Compare the manifest with the identity; write it where there is none."""
        manifest = self._context.identity.manifest
        found = await self._read_manifest()
        if found is None:
            await obstore.put_async(self.store, self.layout.manifest, manifest.encode(), use_multipart=False)
            found = await self._read_manifest() or manifest
        try:
            self._context.identity.require(found, f"{where(self._config)}, {self.layout.manifest}")
        except IdentityError as error:
            raise TierError(f"tier {self._context.name}: {error}") from error

    async def _read_manifest(self) -> str | None:
        try:
            result = await obstore.get_async(self.store, self.layout.manifest)
        except FileNotFoundError:
            return None
        return bytes(await result.bytes_async()).decode(errors="replace")

    async def _try_conditional_puts(self) -> tuple[bool, bool]:
        """Find out whether the store knows conditional puts, and whether anything may be put at all.

        The manifest is there: a store that knows them refuses to put it, another puts it again.
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
            fault = fault_of(error)
            if fault.word == "forbidden":
                _log.warning("%s cannot be written: it is only read", self._title)
                return False, True
            if fault.word not in ("request", "server"):  # 501 and 400 are how stores say that they do not
                raise
        _log.info("%s does not know conditional puts: what is put twice is replaced", self._title)
        return False, False
