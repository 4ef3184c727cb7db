"""Tiers whose backends can be made slow, hang, fail, be damaged, go away and fill up, and be well again.

A ``Backend`` is one tier over a real backend. Nothing in kvtier takes part in a fault: it happens where the
backend is, in another process, in the file system or in what is kept, but for the tier that represents a
third party's.
"""

from __future__ import annotations

import errno
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.integration import fuse_mount
from tests.integration.fuse_mount import FuseMount, Trouble

FAULTS = ("slow", "hang", "error", "corrupt", "vanish", "fill up")
DAMAGE = {"checksum", "torn", "foreign"}
ROOT_BYTES = 192 * 2**20
BALLAST_BYTES = 2**20


class Backend(ABC):
    """One tier and its backend. Each fault may be begun again while it lasts; one at a time.

    Args:
        directory: for all that it needs.

    Attributes:
        tier: what it is called in metrics.
        counted: reasons, one of which at least is counted for the tier while a fault lasts; none where it
            need not cost a chunk.
        more: settings of the engine.
    """

    tier: ClassVar[str]
    counted: ClassVar[Mapping[str, set[str]]]
    more: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.finds: Path | None = None

    @abstractmethod
    def start(self, stack: ExitStack) -> dict[str, Any]:
        """Start the backend; return the tier's settings. ``stack`` is left when nobody needs it any more."""

    @abstractmethod
    def begin(self, fault: str) -> None:
        """Begin a fault, or go on with it."""

    def shows(self, fault: str, reasons: Collection[str]) -> bool:
        """Return whether the reasons that were counted tell of this fault."""
        wanted = self.counted[fault]
        return not wanted or not wanted.isdisjoint(reasons)

    @abstractmethod
    def come_back(self) -> None:
        """End whatever fault there is."""


class FileBackend(Backend):
    """The file tier, on a file system that obeys; its files are on another one, in memory and bounded."""

    tier = "fs"
    counted = {
        "slow": set(),
        "hang": {"timeout", "unresponsive"},
        "error": {"eio"},
        "corrupt": DAMAGE,
        "vanish": {"enotconn", "econnaborted"},
        "fill up": {"enospc", "min_free", "max_bytes", "full"},
    }

    def start(self, stack: ExitStack) -> dict[str, Any]:
        if why := fuse_mount.why_not():
            absent(f"no file system can be mounted: {why}")
        fuse_mount.sweep()
        self._files = fuse_mount.memory(self.directory / "files", ROOT_BYTES, stack)
        self._mount = stack.enter_context(FuseMount(self._files, self.directory / "root"))
        self._is_gone = False
        return {"type": "fs", "root_dir": str(self.directory / "root")}

    def begin(self, fault: str) -> None:
        if fault == "slow":
            self._mount.be(Trouble(delay_s=0.01))
        elif fault == "hang":
            self._mount.be(Trouble(hangs=True))
        elif fault == "error":
            self._mount.be(Trouble(error=errno.EIO))
        elif fault == "corrupt":
            self._mount.be(Trouble(damages=True))
        elif fault == "vanish":
            self._mount.die()
            self._is_gone = True
        else:
            self._fill()

    def come_back(self) -> None:
        (self._files / "ballast").unlink(missing_ok=True)
        if self._is_gone:
            self._mount.mount()
            self._is_gone = False
        self._mount.be(Trouble())

    def _fill(self) -> None:
        with (self._files / "ballast").open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(BALLAST_BYTES)):
                pass


class Files(FileBackend):
    """The tiers in a process of their own."""


class InEngine(FileBackend):
    """The tiers in a thread of the engine; those of the other rows are in a process of their own."""

    more: ClassVar[Mapping[str, Any]] = {"isolation": "thread"}


class Plain(Backend):
    """A third party's tier, which does nothing about faults."""

    tier = "plain"
    counted = {
        "slow": set(),
        "hang": {"timeout", "unresponsive"},
        "error": {"error"},
        "corrupt": DAMAGE,
        "vanish": {"connection"},
        "fill up": {"error"},
    }
    _TROUBLE = {
        "slow": {"delay_s": 0.1},
        "hang": {"hangs": True},
        "error": {"fails": True},
        "corrupt": {"damages": True},
        "vanish": {"is_gone": True},
        "fill up": {"is_full": True},
    }

    def start(self, stack: ExitStack) -> dict[str, Any]:
        self.finds = self.directory / "installed"
        information = self.finds / "kvtier_plain-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-plain\nVersion: 1.0\n")
        entry = "plain = tests.integration.plain_tier:PlainTier"
        (information / "entry_points.txt").write_text(f"[kvtier.tiers]\n{entry}\n")
        return {"type": "plain", "trouble": str(self._file)}

    @property
    def _file(self) -> Path:
        return self.directory / "trouble.json"

    def begin(self, fault: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._TROUBLE[fault]))
        new.rename(self._file)

    def come_back(self) -> None:
        self._file.unlink(missing_ok=True)


BACKENDS: Sequence[type[Backend]] = (Files, InEngine, Plain)


def absent(what: str) -> None:
    """Skip where something is not installed; on CI it has to be."""
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(what)
    pytest.skip(what)
