"""The root of a file tier on disk, read without an engine, for sweeps and the commands of ``kvtier-tools``.

Files that other processes add or remove meanwhile are not errors.

A cache is a directory ``<model>_<digest>`` that contains kvtier's manifest or an epoch, and directories
``<model>_<digest>_r0[.e<epoch>]``. Everything else below a root is foreign.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from kvtier.errors import TierError
from kvtier.tiers.fs import _layout as layout

NAMESPACE: Final = re.compile(r"[A-Za-z0-9.-]+_([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class DataDir:
    """The chunks of one epoch."""

    name: str
    epoch: int


class Namespace:
    """One cache below a root."""

    def __init__(self, root: Root, name: str, data_dirs: list[DataDir]) -> None:
        self._root = root
        self.name = name  # its directory's name
        self.data_dirs = sorted(data_dirs, key=lambda found: found.epoch)  # time when the root was listed

    @property
    def is_orphaned(self) -> bool:
        """Whether no engine can open its chunks. False unless it holds only directories of chunks.

        Other contents may belong to another program.
        """
        if not self.data_dirs or self._root.is_home(self.name):
            return False
        return all(
            layout.PART.fullmatch(name) for found in self.data_dirs for name in self._root.names(found.name)
        )

    @cached_property
    def is_kvtiers(self) -> bool:
        """Whether kvtier made the cache."""
        try:
            fields = json.loads(layout.read_small(self._root.fd, f"{self.name}/{layout.MANIFEST}"))
        except (OSError, ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict) and "kvtier_format" in fields:
            return True
        return any(self._root.is_there(f"{self.name}/{sign}") for sign in ("epoch", "epoch.lock"))

    @property
    def epoch(self) -> int | None:
        """The epoch that an engine would join now; None if unknown."""
        return layout.stored_epoch(self._root.fd, self.name)

    def quarantine(self) -> list[str]:
        return sorted(self._root.names(f"{self.name}/quarantine"))


class Root:
    """A root directory, open for reading. A context manager. TierError if the root cannot be read.

    ``root`` is its path, or an open descriptor, which stays the caller's. ``only`` has the names of the
    namespaces to show; None for all.
    """

    def __init__(self, root: Path | int, only: Container[str] | None = None) -> None:
        self.path = Path(".") if isinstance(root, int) else root
        self._only = only
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self.fd = os.dup(root) if isinstance(root, int) else os.open(root, flags)
        except OSError as error:
            what = "the root" if isinstance(root, int) else root
            whose = layout.owner_of(error, Path("."))
            raise TierError(f"{what} cannot be read: {error.strerror}{whose}") from error

    def __enter__(self) -> Root:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    def namespaces(self) -> Sequence[Namespace]:
        """Return the caches, sorted by name. TierError if the root cannot be read any more."""
        data_dirs: dict[str, list[DataDir]] = {}
        homes = []
        for name in self._directories():
            if found := layout.parse_data_dir(name):
                data_dirs.setdefault(found[0], []).append(DataDir(name, found[1]))
            elif NAMESPACE.fullmatch(name) and self.is_home(name):
                homes.append(name)
        wanted = sorted(name for name in {*homes, *data_dirs} if self._only is None or name in self._only)
        found_here = [Namespace(self, name, data_dirs.get(name, [])) for name in wanted]
        return [one for one in found_here if one.is_kvtiers or one.is_orphaned]

    def names(self, folder: str) -> list[str]:
        """Return the names in a directory; none if it is missing or unreadable."""
        try:
            return layout.names_in(self.fd, folder)
        except OSError:
            return []

    def _directories(self) -> list[str]:
        try:
            with os.scandir(self.fd) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise TierError(f"{self.path} cannot be read: {error.strerror}") from error

    def is_home(self, name: str) -> bool:
        return any(self.is_there(f"{name}/{sign}") for sign in (layout.MANIFEST, "epoch", "epoch.lock"))

    def is_there(self, path: str) -> bool:
        """Return whether a path exists. A path that cannot be examined counts as existing."""
        try:
            os.stat(path, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True
