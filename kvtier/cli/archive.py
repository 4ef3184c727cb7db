"""``kvtier export`` and ``kvtier import``: a cache of a root to and from one archive."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, c_char
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Final

import crc32c

from kvtier.cli.report import Bytes, progress, say
from kvtier.errors import TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import seal
from kvtier.tiers.base import Batch, Status, TierContext
from kvtier.tiers.fs import FsConfig, FsTier
from kvtier.tiers.fs.archive import (
    MOST_CHUNK_BYTES,
    Head,
    Reader,
    Writer,
    identity_of,
    is_packed,
)
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.proof import Buffer, read_whole
from kvtier.tiers.fs.root import ChunkFile, DataDir, Namespace, Root, SegmentFile, Stray, Tick
from kvtier.tiers.fs.segments.layout import Record
from kvtier.tiers.fs.segments.scan import NoSegmentError, Segment

STANDARD: Final = Path("-")
_BATCH_BYTES: Final = 32 << 20
_BATCH_CHUNKS: Final = 64
_BOUNDS: Final = {
    "max_bytes": "the root is full: --max-bytes sets how much it may hold",
    "min_free": "the file system is full: --min-free-bytes sets how much of it stays free",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        namespace: the name of the cache's directory.
        archive: where it went; ``-`` is standard output.
        epoch: the epoch that was exported: that which an engine joins which opens the cache now.
        chunks: how many chunks are in the archive.
        bytes: their bytes.
        ill: chunks, and segments without a head, that were left out because they could not be proven.
        unreadable: chunks that were left out because the file system refuses.
        gone: chunks that somebody removed meanwhile.
    """

    namespace: str
    archive: str
    epoch: int
    chunks: int
    bytes: int
    ill: int
    unreadable: int
    gone: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What was imported.

    Attributes:
        namespace: the name of the cache's directory.
        root: the directory that it went below.
        chunks: chunks that are there now and were not before.
        present: chunks that were there already, and were left as they are.
        refused: chunks that were not taken, by reason.
        ill: chunks that were left out because their bytes are not those that were sealed.
        is_whole: whether the archive was; else it breaks off, and chunks are missing.
    """

    namespace: str
    root: str
    chunks: int
    present: int
    refused: dict[str, int]
    ill: int
    is_whole: bool

    @property
    def is_well(self) -> bool:
        """Whether all that was exported is there now."""
        return self.is_whole and not self.ill and not self.refused


def export(path: Path, namespace: str, archive: Path) -> Exported:
    """Write the chunks of a cache into a new archive.

    Args:
        path: the root.
        namespace: the name of the cache's directory.
        archive: a file that is not there yet, or ``-``.

    Raises:
        TierError: there is no such cache, its chunks cannot be proven, or the archive cannot be written.
    """
    with Root(path) as root:
        one = root.namespace(namespace)
        place = _exportable(one)
        with progress("chunks") as tick, _written(archive) as stream:
            return _Export(root, one, place).run(stream, archive, tick)


def show_export(exported: Exported) -> None:
    """Say what was exported, on standard error where the archive is on standard output."""
    text = (
        f"{exported.namespace}: {exported.chunks:,} chunks, {Bytes(exported.bytes)}, of epoch "
        f"{exported.epoch} to {exported.archive}"
    )
    for word in ("ill", "unreadable", "gone"):
        if count := getattr(exported, word):
            text += f"; {count:,} {word}, left out"
    print(text, file=sys.stderr) if exported.archive == str(STANDARD) else say(text)


def _exportable(one: Namespace) -> DataDir:
    if one.manifest.layout == "vllm":
        raise TierError(
            f"{one.name} is in vLLM's layout: its files have nothing to be proven by, and are not exported"
        )
    if one.manifest.digest is None:
        raise TierError(f"{one.name} cannot be exported: {one.manifest.problem}")
    if one.current is None:
        raise TierError(f"{one.name} has no chunks that an engine would be given")
    return one.current


class _Export:
    """One export under way."""

    def __init__(self, root: Root, one: Namespace, place: DataDir) -> None:
        self._root = root
        self._one = one
        self._place = place
        self._identity = identity_of(one.manifest.fields)
        self._found: Counter[str] = Counter()
        self._buffer = Buffer()

    def run(self, stream: IO[bytes], archive: Path, tick: Tick) -> Exported:
        proven = self._proven(tick)
        first = next(proven, None)
        if first is None:
            raise TierError(f"{self._one.name} has no chunk that is sound: nothing is exported")
        length = len(first[1])
        writer = Writer(stream, Head(self._one.name, self._identity, length), is_packed(archive))
        for key, payload, trailer in _after(first, proven):
            if len(payload) != length:  # an engine's chunks have one length: this one is nobody's
                self._found["ill"] += 1
                continue
            writer.add(key, payload, trailer)
        writer.close()
        found = self._found
        return Exported(
            namespace=self._one.name,
            archive=str(archive),
            epoch=self._place.epoch,
            chunks=writer.chunks,
            bytes=writer.chunks * length,
            ill=found["ill"],
            unreadable=found["unreadable"],
            gone=found["gone"],
        )

    def _proven(self, tick: Tick) -> Iterator[tuple[OffloadKey, memoryview, bytes]]:
        digest = self._identity.short_digest
        for found in self._root.chunks(self._place.name):
            if isinstance(found, Stray):
                self._found["unreadable"] += bool(found.problem)
                continue
            some = self._of_file(found) if isinstance(found, ChunkFile) else self._of_segment(found)
            for key, payload, trailer in some:
                tick(1)
                if seal.check(trailer, key, payload, digest) == seal.Verdict.GOOD:
                    yield key, payload, trailer
                else:
                    self._found["ill"] += 1

    def _of_file(self, found: ChunkFile) -> Iterator[tuple[OffloadKey, memoryview, bytes]]:
        content = self._read(found)
        if content is not None:
            trailer = content[-BLOCK_BYTES : -BLOCK_BYTES + seal.TRAILER_BYTES]
            yield found.key, memoryview(content)[:-BLOCK_BYTES], trailer

    def _of_segment(self, found: SegmentFile) -> Iterator[tuple[OffloadKey, memoryview, bytes]]:
        """Yield the chunks of a segment. What its writer has not finished was never a chunk."""
        try:
            with Segment(self._root.fd, found.path) as segment:
                for record in segment.records():
                    if not isinstance(record, Record) or segment.is_mark_torn(record):
                        self._found["ill"] += 1
                        continue
                    payload, trailer = segment.payload(record), segment.trailer(record)
                    if segment.is_sealed or _is_whole(record, payload):
                        yield record.key, memoryview(payload), trailer
        except FileNotFoundError:
            self._found["gone"] += 1
        except NoSegmentError as error:  # where its writer has not finished the first block it never was one
            self._found["ill"] += error.is_torn
        except OSError:
            self._found["unreadable"] += 1

    def _read(self, found: ChunkFile) -> bytes | None:
        most_bytes = MOST_CHUNK_BYTES + BLOCK_BYTES
        try:
            content = read_whole(self._root.fd, found.path, most_bytes, self._buffer)
        except FileNotFoundError:
            self._found["gone"] += 1
            return None
        except OSError as error:
            self._found["ill" if error.errno == errno.EFBIG else "unreadable"] += 1
            return None
        if len(content) <= BLOCK_BYTES:
            self._found["ill"] += 1
            return None
        return content


def _is_whole(record: Record, payload: bytes) -> bool:
    return crc32c.crc32c(payload) == record.checksum


def _after(
    first: tuple[OffloadKey, memoryview, bytes], others: Iterator[tuple[OffloadKey, memoryview, bytes]]
) -> Iterator[tuple[OffloadKey, memoryview, bytes]]:
    yield first
    yield from others


@contextmanager
def _written(archive: Path) -> Iterator[IO[bytes]]:
    """Open a new archive, which has its name only when it is whole."""
    is_packed(archive)
    if archive == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    draft = archive.with_name(f".{archive.name}.{os.getpid()}.part")
    try:
        if archive.exists():
            raise TierError(f"{archive} is there already: it is not overwritten")
        # For this user alone, as the files that it is made of: there are prompts in it.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, archive)  # unlike a rename it overwrites nothing
    except OSError as error:
        raise TierError(f"{archive} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------- import


def import_(
    archive: Path, path: Path, *, max_bytes: int | None = None, min_free_bytes: int | None = None
) -> Imported:
    """Put the chunks of an archive below a root, as an engine does: within its bounds, over nothing.

    Args:
        archive: the file, or ``-``.
        path: the root, which is made where it is missing.
        max_bytes: bytes that everything below the root may take; by default what the tier's is.
        min_free_bytes: bytes of the file system that stay free; by default what the tier's is.

    Raises:
        ArchiveError: it is no archive of kvtier's, or holds what kvtier has not put there. What came before
            that in it has been imported.
        TierError: the root cannot be written.
    """
    config = FsConfig(root_dir=path, max_bytes=max_bytes, min_free_bytes=min_free_bytes)
    try:
        with progress("chunks") as tick, _readable(archive) as stream:
            return asyncio.run(_import(Reader(stream, is_packed(archive)), config, tick))
    except OSError as error:
        raise TierError(f"{archive} cannot be read: {error.strerror or error}") from error


def show_import(imported: Imported) -> None:
    """Say what was imported."""
    text = (
        f"{imported.namespace}: {imported.chunks:,} chunks imported, {imported.present:,} were there already"
    )
    if imported.ill:
        text += f"; {imported.ill:,} ill, left out"
    for reason, count in sorted(imported.refused.items()):
        text += f"; {count:,} not taken ({_BOUNDS.get(reason, reason)})"
    if not imported.is_whole:
        text += "; the archive breaks off: chunks are missing"
    say(text)


@contextmanager
def _readable(archive: Path) -> Iterator[IO[bytes]]:
    if archive == STANDARD:
        yield sys.stdin.buffer
        return
    with archive.open("rb") as file:
        yield file


async def _import(reader: Reader, config: FsConfig, tick: Tick) -> Imported:
    assert reader.head is not None
    head = reader.head
    tier = FsTier(config)
    await tier.open(TierContext("import", head.identity, head.chunk_bytes))
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    try:
        memory = _Memory(max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // head.chunk_bytes)), head.chunk_bytes)
        chunks = reader.chunks()
        while some := list(islice(chunks, memory.slots)):
            await _put(tier, memory, dict(some), counts, refused)
            tick(len(some))
    finally:
        await tier.aclose()
    return Imported(
        namespace=head.namespace,
        root=str(config.root_dir),
        chunks=counts["new"],
        present=counts["present"],
        refused=dict(refused),
        ill=reader.ill,
        is_whole=reader.is_whole,
    )


async def _put(
    tier: FsTier,
    memory: _Memory,
    chunks: dict[OffloadKey, memoryview],
    counts: Counter[str],
    refused: Counter[str],
) -> None:
    there = dict(zip(chunks, await tier.contains(list(chunks)), strict=True))
    counts["present"] += sum(there.values())
    wanted = [key for key in chunks if not there[key]]
    for slot, key in enumerate(wanted):
        memory.view(slot)[:] = chunks[key]
    if not wanted:
        return
    outcome = await tier.put(Batch(wanted, range(len(wanted)), memory))
    counts["new"] += outcome.statuses.count(Status.OK)
    refused.update(outcome.reasons)


class _Memory:
    """Slots in memory of this process."""

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self._bytes = mmap.mmap(-1, slots * chunk_bytes)
        self.address = addressof(c_char.from_buffer(self._bytes))

    def view(self, slot: int) -> memoryview:
        """See ``SlotMemory.view``."""
        return memoryview(self._bytes)[slot * self.chunk_bytes : (slot + 1) * self.chunk_bytes]
