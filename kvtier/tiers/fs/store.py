"""What a format of the file tier is: how the chunks of an epoch lie on disk, and the work on them.

The tier picks one by ``format`` and owns everything around it: bounds, epochs, liveness, eviction,
quarantine. A format moves bytes and knows where they are. Two things make it fit in:

**Units.** Every file below an epoch's ``data_dir`` is one unit of eviction, whatever is in it: one
chunk, or a segment of many. Any process may unlink a unit at any time, and asks nobody: what is
being read through an open descriptor is read to its end, everything else in it is ABSENT from then
on. A unit's mtime says when it was written, its atime when it was last used: ``touch`` sets it,
because file systems may be mounted without. An atime later than the mtime is the mark of a unit that
was used again. What is not whole yet is in the writer's ``tmp_dir``, where nobody evicts; it is
swept when its writer is dead.

**Bytes.** What a put may take is reserved before (``most_bytes`` for each chunk), and what it really
took is returned by it, directories included. What a removal freed is returned as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, Protocol

from kvtier.keys import OffloadKey
from kvtier.tiers.fs.call import FileCall, FileWork, Place, StopFlag

PARTS: Final = 4096
"""The parts that an epoch is listed in. Of the format ``files``, one is a directory of the first level."""


class Store(FileWork, Protocol):
    """The work of one format. All calls block, and may be made from any thread, several at once.

    The calls of ``FileWork`` do the tier's jobs: ``put`` leaves what is there already without writing
    a byte (EXISTS), publishes a chunk whole or not at all, and returns the bytes that the file system
    has got more; ``get`` proves what it reads; errors are results, never exceptions.
    """

    @property
    def format(self) -> str:
        """The format's name in ``FsConfig.format``."""

    @property
    def is_native(self) -> bool:
        """Whether the native helper does the work."""

    def set_aside(self, call: FileCall, i: int, target: str) -> bool:
        """Move a chunk that failed its check out of the way.

        Args:
            call: the get that found it, or the put that found something else in its place.
            i: which chunk; ``call.inodes`` says which file, or which place in a segment.
            target: where to, relative to the root; the directory is there.

        Returns:
            Whether it was there yet: another reader may have been faster. OSError where it cannot be moved.
        """

    def close(self) -> None:
        """Give back what is open. Nothing is under way, and no other call follows. Blocks."""

    def most_bytes(self, chunk_bytes: int) -> int:
        """Return the most bytes that putting one chunk can take on disk, new directories included."""

    def touch(self, call: FileCall, first: int, end: int) -> None:
        """Set the time of the last use of the chunks' units to now: OK or ABSENT.

        The tier calls it in the background, and for one chunk at most once in some minutes.
        """

    def forget(self, place: Place, units: Sequence[str]) -> Sequence[OffloadKey]:
        """Learn that files below ``data_dir`` were evicted by this process.

        Args:
            place: where they were.
            units: their paths, relative to ``data_dir``.

        Returns:
            The keys of the chunks that were in them, as far as known: listeners are told.
        """

    def fingerprints(self, place: Place, part: int, stop: StopFlag) -> array[int]:
        """List a part of an epoch's chunks, for the tier's index. OSError where it cannot be read.

        Args:
            place: the epoch.
            part: 0 to ``PARTS`` - 1. A format may give all of them in part 0.
            stop: set where the caller does not want to know any more.

        Returns:
            ``index.fingerprint`` of each chunk's key, type code ``Q``.
        """

    def tend(self, place: Place, stop: StopFlag) -> int:
        """Do what the format needs from time to time, such as compaction. In the upkeep thread.

        Returns:
            The bytes that the file system has got more; negative where it has got less.
        """
