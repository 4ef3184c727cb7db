"""Plain files, what ``kvtier bench tier`` measures the file tier against."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier.tiers.drain import in_thread
from kvtier.tiers.fs import FsConfig
from kvtier_bench.bare import BareClient

_SHARE = 4  # a put or a get has its chunks moved in this many parts at once


class PlainFiles(BareClient[FsConfig]):
    """A file for each chunk, written or read whole by a thread, past the page cache where that is possible.

    In a directory of its own below ``root_dir``. Nothing is renamed, proven, counted or shared.
    """

    async def open(self) -> None:
        """Make the directory. See ``BareClient.open``."""
        self._direct = 0
        self._folder = ""
        self._threads = ThreadPoolExecutor(max(_SHARE, self.config.n_threads))
        await in_thread(self._make)

    async def put(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Write files. See ``BareClient.put``."""
        await self._move(self._write, names, chunks)

    async def get(self, names: Sequence[str], chunks: Sequence[memoryview]) -> None:
        """Read files. See ``BareClient.get``."""
        await self._move(self._read, names, chunks)

    async def discard(self, names: Sequence[str]) -> None:
        """Remove files. See ``BareClient.discard``."""
        await in_thread(self._remove, names)

    async def aclose(self) -> None:
        """Remove the directory. See ``BareClient.aclose``."""
        await in_thread(self._end)

    async def _move(
        self, move: Callable[[str, memoryview], int], names: Sequence[str], chunks: Sequence[memoryview]
    ) -> None:
        def some(part: int) -> None:
            for name, chunk in list(zip(names, chunks, strict=True))[part::_SHARE]:
                if move(name, chunk) != len(chunk):
                    raise OSError(f"{name} is not whole")

        await in_thread(lambda: list(self._threads.map(some, range(_SHARE))))

    def _make(self) -> None:
        self.config.root_dir.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="bench-bare-", dir=self.config.root_dir)
        try:
            os.close(os.open(f"{self._folder}/probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
            self._direct = os.O_DIRECT
        except (AttributeError, OSError):
            pass  # this platform or this file system has none

    def _end(self) -> None:
        self._threads.shutdown()
        if self._folder:
            shutil.rmtree(self._folder)

    def _write(self, name: str, chunk: memoryview) -> int:
        fd = os.open(f"{self._folder}/{name}", os.O_WRONLY | os.O_CREAT | self._direct)
        try:
            return os.pwritev(fd, [chunk], 0)
        finally:
            os.close(fd)

    def _read(self, name: str, chunk: memoryview) -> int:
        fd = os.open(f"{self._folder}/{name}", os.O_RDONLY | self._direct)
        try:
            return os.preadv(fd, [chunk], 0)
        finally:
            os.close(fd)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            os.unlink(f"{self._folder}/{name}")


__all__ = ["PlainFiles"]
