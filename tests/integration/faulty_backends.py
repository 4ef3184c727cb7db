"""Tiers with faulty backends: slow, hanging, failing, corrupting, vanishing or full, and then well again.

Nothing in kvtier takes part in a fault. Those of the file tier happen in its system calls, by a library that
its process preloads (``trouble.c``); a third party's tier, which does nothing about faults, makes its own.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

from kvtier_testing.tiers._servers import absent

FAULTS = ("slow", "hang", "error", "corrupt", "vanish", "fill up")
DAMAGE = {"checksum", "torn", "foreign"}
ROOT_BYTES = 192 * 2**20
BALLAST_BYTES = 2**20


class Backend(ABC):
    """One tier and its backend. Faults come one at a time; a fault may be started again while it lasts.

    Args:
        directory: directory for its files.
        stack: exit stack that closes when the backend is no longer needed.

    Attributes:
        tier: the tier's name in metrics.
        counted: reasons; a fault counts at least one of them for the tier. Empty if a fault need not
            cost a chunk.
        more: extra settings of the engine.
        settings: settings of the tier.
        launch: extra arguments of ``Launcher.start``.
    """

    tier: ClassVar[str]
    counted: ClassVar[Mapping[str, set[str]]]
    more: ClassVar[Mapping[str, Any]] = {}
    settings: dict[str, Any]
    launch: dict[str, Any]

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory

    @abstractmethod
    def begin(self, fault: str) -> None:
        """Start a fault, or continue it."""

    @abstractmethod
    def come_back(self) -> None:
        """End the current fault, if any."""


class Files(Backend):
    """The file tier, in its own process; its files are on a bounded in-memory file system."""

    tier = "fs"
    counted = {
        "slow": set(),
        "hang": {"timeout", "unresponsive"},
        "error": {"eio"},
        "corrupt": DAMAGE,
        "vanish": {"enotconn"},
        "fill up": {"enospc", "min_free", "max_bytes", "full"},
    }
    # Words of the library's control file: the device, a delay in microseconds, whether calls hang, an errno,
    # whether reads return damaged bytes.
    _WORDS: ClassVar[Mapping[str, Mapping[int, int]]] = {
        "slow": {1: 10_000},
        "hang": {2: 1},
        "error": {3: errno.EIO},
        "corrupt": {4: 1},
        "vanish": {3: errno.ENOTCONN},
    }

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        super().__init__(directory, stack)
        self._root, self._mute = directory / "root", directory / "mute"
        self._words = self._trouble(directory / "words")
        self._hanging: subprocess.Popen[str] | None = None
        for point in (self._root, self._mute):
            point.mkdir()
        if os.geteuid() or not os.path.exists("/dev/fuse"):
            absent("no file system can be mounted here")
        self._mount()
        stack.callback(_unmount, self._root)
        stack.callback(self.come_back)
        self.settings = {"type": "fs", "root_dir": str(self._root)}
        library = {"LD_PRELOAD": _built(directory), "KVTIER_TEST_TROUBLE": str(directory / "words")}
        self.launch = {"environment": {**library, "KVTIER_TEST_MUTE": f"{self._mute}/file"}}

    def _mount(self) -> None:
        memory = ["mount", "-t", "tmpfs", "-o", f"size={ROOT_BYTES}", "kvtier-tests", str(self._root)]
        subprocess.run(memory, check=True)
        self._words[0] = self._root.stat().st_dev

    @staticmethod
    def _trouble(path: Path) -> memoryview:
        with path.open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            return memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")

    def begin(self, fault: str) -> None:
        if fault == "fill up":
            with (self._root / "ballast").open("ab", buffering=0) as file, suppress(OSError):
                while file.write(bytes(BALLAST_BYTES)):
                    pass
            return
        if fault == "hang" and self._hanging is None:
            command = [sys.executable, "-m", "tests.integration.mute_mount", str(self._mute)]
            self._hanging = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
            )
            assert self._hanging.stdout is not None
            assert self._hanging.stdout.readline() == "mounted\n"
        if fault == "vanish" and self._root.is_mount():
            _unmount(self._root)
        for place, value in self._WORDS[fault].items():
            self._words[place] = value

    def come_back(self) -> None:
        (self._root / "ballast").unlink(missing_ok=True)
        for place in range(1, 5):
            self._words[place] = 0
        if not self._root.is_mount():
            self._mount()
        if self._hanging is not None:
            with self._hanging as mute:  # closing it ends all its waiting callers
                mute.kill()
            self._hanging = None
            _unmount(self._mute)


class InEngine(Files):
    """The file tier in a thread of the engine's own process; in the other rows tiers have a process of their
    own."""

    more: ClassVar[Mapping[str, Any]] = {"isolation": "thread"}

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        super().__init__(directory, stack)
        # A process preloads libraries when it is started; a fork of the launcher would not.
        spawned = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        self.launch["environment"] |= spawned


def _built(directory: Path) -> str:
    """Build and return the preloaded library."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        absent("there is no C compiler")
    library = directory / "trouble.so"
    source = Path(__file__).with_name("trouble.c")
    options = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    command = [compiler, *options, "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return str(library)


def _unmount(point: Path) -> None:
    subprocess.run(["umount", "-l", str(point)], check=True)


class Plain(Backend):
    """A third party's tier, which handles no faults itself."""

    tier = "plain"
    counted = {
        "slow": set(),
        "hang": {"timeout", "unresponsive"},
        "error": {"error"},
        "corrupt": DAMAGE,
        "vanish": {"connection"},
        "fill up": {"error"},
    }

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        super().__init__(directory, stack)
        self._fault = directory / "fault.json"
        finds = directory / "installed"
        information = finds / "kvtier_plain-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-plain\nVersion: 1.0\n")
        entry = "plain = tests.integration.plain_tier:PlainTier"
        (information / "entry_points.txt").write_text(f"[kvtier.tiers]\n{entry}\n")
        self.settings = {"type": "plain", "fault": str(self._fault)}
        self.launch = {"prepare": {"function": "find", "directory": str(finds)}}

    def begin(self, fault: str) -> None:
        new = self._fault.with_suffix(".new")
        new.write_text(json.dumps(fault))
        new.rename(self._fault)

    def come_back(self) -> None:
        self._fault.unlink(missing_ok=True)
