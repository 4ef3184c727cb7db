"""File systems in images, each mounted for one test. The test is skipped if none can be made or mounted."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from pathlib import Path

import pytest

GOING_DOWN = 0x8004587D  # for xfs and ext4
WITHOUT_FLUSHING = 2
IMAGE_BYTES = 320 * 2**20  # the minimum of mkfs.xfs; a sparse file
_QUIET = {"ext4": ["-q", "-E", "lazy_itable_init=1,nodiscard"], "xfs": ["-q", "-K"], "btrfs": ["-q", "-K"]}


class Disk:
    """A file system in an image, mounted at ``point``."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.point = folder / "mounted"
        self.point.mkdir()
        self._image = folder / "image"
        self._kind = kind
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        self._run(f"mkfs.{kind}", *_QUIET[kind], str(self._image))
        self.mount()

    def mount(self) -> None:
        self._run("mount", "-o", "loop", str(self._image), str(self.point))

    def unmount(self) -> None:
        self._run("umount", str(self.point))

    def lose_power(self) -> None:
        fd = os.open(self.point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, GOING_DOWN, struct.pack("I", WITHOUT_FLUSHING))
        finally:
            os.close(fd)

    def limited(self, limit_bytes: int) -> Path:
        """Return a new directory on a btrfs with a quota that statvfs does not show."""
        folder = self.point / "limited"
        self._run("btrfs", "quota", "enable", str(self.point))
        self._run("btrfs", "subvolume", "create", str(folder))
        self._run("btrfs", "qgroup", "limit", str(limit_bytes), str(folder))
        return folder

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.point)], check=False, capture_output=True)

    def _run(self, *command: str) -> None:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be made and mounted here: {error}")
