"""``kvtier verify``: every chunk of a root read and proven, beside engines that use it."""

from __future__ import annotations

import errno
import os
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from kvtier.cli.gc import correct_ledger, mark_ledger, remove_leftovers
from kvtier.cli.report import progress, say, table
from kvtier.tiers.fs import layout
from kvtier.tiers.fs.call import FileCall, Flag, Place, Result
from kvtier.tiers.fs.layout import BLOCK_BYTES
from kvtier.tiers.fs.proof import Finding, Proof, Prover
from kvtier.tiers.fs.quarantine import Quarantine
from kvtier.tiers.fs.root import ChunkFile, DataDir, Namespace, Root, SegmentFile, Stray, Tick
from kvtier.tiers.fs.segments.layout import Record
from kvtier.tiers.fs.segments.scan import NoSegmentError, Segment
from kvtier.tiers.seal import Verdict

File = ChunkFile | SegmentFile
Proven = tuple[File, Record | None, Proof]

_FILES_A_JOB: Final = 64
_JOBS_AHEAD: Final = 2
MOST_TOLD: Final = 1000
"""Ill files that are named one by one; all are counted."""
_RESULTS: Final = {
    Finding.TORN: Result.TORN,
    Finding.FOREIGN: Result.FOREIGN,
    Finding.CHECKSUM: Result.CHECKSUM,
}


@dataclass(frozen=True, slots=True)
class Ill:
    """A file that is not what it should be.

    Attributes:
        path: relative to the root.
        finding: ``torn``, ``foreign``, ``checksum`` or ``unreadable``.
        errno: why it is unreadable, as a name; "" else.
        set_aside: whether it is in the quarantine now.
    """

    path: str
    finding: str
    errno: str
    set_aside: bool


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found in a cache of a root.

    Attributes:
        namespace: the name of its directory.
        layout: ``kvtier``, ``vllm`` or ``unknown``.
        chunks: files that were looked at.
        sound: whose bytes and identity are proven.
        unproven: that have nothing to be proven by: those of the layout ``vllm``, or of an unknown identity.
        torn: cut off, or without a whole trailer; segments without a head, and chunks of a segment whose map
            does not say whether they are there.
        foreign: with another chunk's or another cache's bytes.
        checksum: whose bytes are not those that were put.
        unreadable: files and directories that the file system refuses.
        gone: removed by somebody while they were being looked at.
        strays: files among the chunks that are no chunks; they are left alone.
        quarantined: files in the quarantine, those set aside just now included.
        dead_writers: writers that have left unfinished files behind.
        set_aside: ill files that were moved to the quarantine just now.
        removed_bytes: what was left over by dead writers and old epochs, and was removed just now.
        problem: what else is wrong, in words; "" where nothing is.
        ill: the first thousand ill files.
    """

    namespace: str
    layout: str
    chunks: int
    sound: int
    unproven: int
    torn: int
    foreign: int
    checksum: int
    unreadable: int
    gone: int
    strays: int
    quarantined: int
    dead_writers: int
    set_aside: int
    removed_bytes: int
    problem: str
    ill: list[Ill]

    @property
    def is_well(self) -> bool:
        """Whether an engine can have everything that is here."""
        left = self.torn + self.foreign + self.checksum - self.set_aside
        return not (left or self.unreadable or self.problem)


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found in a root.

    Attributes:
        root: the directory.
        seconds: how long it took.
        namespaces: its caches.
    """

    root: str
    seconds: float
    namespaces: list[Verified]

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong any more."""
        return all(one.is_well for one in self.namespaces)


def verify(path: Path, *, repair: bool, threads: int, namespace: str | None = None) -> Verification:
    """Read and prove every chunk.

    Args:
        path: the root.
        repair: move ill files to the quarantine, and remove what dead writers and old epochs left.
        threads: how many files are read at once.
        namespace: look at this one alone.

    Raises:
        TierError: the root cannot be read, or has no such namespace.
    """
    began = time.monotonic()
    with Root(path) as root, progress("chunks") as tick:
        wanted = root.namespaces() if namespace is None else [root.namespace(namespace)]
        verified = [_Check(root, one, repair, threads).run(tick) for one in wanted]
        return Verification(str(path), round(time.monotonic() - began, 3), verified)


def show(verification: Verification) -> None:
    """Print what was found for people."""
    columns = ["chunks", "sound"]
    for column in ("unproven", "torn", "foreign", "checksum", "unreadable", "gone", "strays", "set_aside"):
        if any(getattr(one, column) for one in verification.namespaces):
            columns.append(column)
    rows = [(one.namespace, *(getattr(one, column) for column in columns)) for one in verification.namespaces]
    table(verification.root, ("namespace", *(column.replace("_", " ") for column in columns)), rows)
    for one in verification.namespaces:
        for line in _remarks(one):
            say(f"{one.namespace}: {line}")


def _remarks(one: Verified) -> Iterator[str]:
    if one.problem:
        yield one.problem
    for ill in one.ill:
        why = ill.errno or ill.finding
        yield f"{ill.path} {why}{', set aside' if ill.set_aside else ''}"
    if (more := one.torn + one.foreign + one.checksum + one.unreadable - len(one.ill)) > 0:
        yield f"and {more} more"
    if one.dead_writers and not one.removed_bytes:
        yield f"{one.dead_writers} dead writers left files: verify --repair or the next engine removes them"
    if one.removed_bytes:
        yield f"{one.removed_bytes} bytes of dead writers and old epochs were removed"


class _Check:
    """The check of one namespace."""

    def __init__(self, root: Root, one: Namespace, repair: bool, threads: int) -> None:
        self._root = root
        self._one = one
        self._repair = repair and one.is_kvtiers  # what is not kvtier's is only looked at
        self._threads = threads
        self._found: Counter[str] = Counter()
        self._ill: list[Ill] = []
        self._quarantine = Quarantine(root.fd, one.name)
        self._problems = [one.manifest.problem] if one.manifest.problem else []

    def run(self, tick: Tick) -> Verified:
        dead = [name for name, lives in self._one.writers().items() if lives is False]
        for place in self._one.data_dirs:
            if place.rank == 0:  # of another rank's only its maker can know what they should be
                self._look_through(place, tick)
        removed = 0
        if self._repair:
            since = mark_ledger(self._root)
            removed = remove_leftovers(self._root, self._one)
            correct_ledger(self._root, removed, since)
            self._set_manifest_aside()
        found = self._found
        return Verified(
            namespace=self._one.name,
            layout=self._one.manifest.layout,
            chunks=sum(found[finding] for finding in Finding),
            **{finding.value: found[finding] for finding in Finding if finding is not Finding.UNREADABLE},
            unreadable=found[Finding.UNREADABLE] + found["unreadable directory"],
            strays=found["stray"],
            quarantined=len(self._one.quarantine()),
            dead_writers=len(dead),
            set_aside=found["set aside"],
            removed_bytes=removed,
            problem="; ".join(self._problems),
            ill=self._ill,
        )

    def _look_through(self, place: DataDir, tick: Tick) -> None:
        for file, record, proof in self._proofs(self._files(place), tick):
            self._found[proof.finding] += 1
            if proof.finding.is_ill or proof.finding is Finding.UNREADABLE:
                self._note(place, file, record, proof)

    def _files(self, place: DataDir) -> Iterator[File]:
        for found in self._root.chunks(place.name):
            if not isinstance(found, Stray):
                yield found
            elif found.problem:
                self._found["unreadable directory"] += 1
                self._tell(Ill(found.path, Finding.UNREADABLE, _errno_name(found.problem), False))
            else:
                self._found["stray"] += 1

    def _note(self, place: DataDir, file: File, record: Record | None, proof: Proof) -> None:
        path, aside = file.path, False
        if self._repair and proof.finding.is_ill:
            if isinstance(file, ChunkFile):
                aside = self._set_aside(place, file, proof)
            elif record is not None:
                aside = self._set_record_aside(file, record, proof)
            else:
                aside = self._set_segment_aside(file, proof)
        if record is not None:
            path = f"{path} block {record.block}"
        self._found["set aside"] += aside
        self._tell(Ill(path, proof.finding, _errno_name(proof.errno), aside))

    def _tell(self, ill: Ill) -> None:
        if len(self._ill) < MOST_TOLD:
            self._ill.append(ill)

    def _set_aside(self, place: DataDir, chunk: ChunkFile, proof: Proof) -> bool:
        """Move a file away as an engine does that finds it ill. Another one in its place is left there."""
        call = FileCall(Place(self._root.fd, place.name, "", bytes(16), BLOCK_BYTES, Flag.NONE), [chunk.key])
        call.results = array("i", [_RESULTS[proof.finding]])
        call.inodes = array("Q", [proof.inode])
        before = sum(self._quarantine.counts().values())
        self._quarantine.set_aside(call, 0)
        return sum(self._quarantine.counts().values()) > before and not self._is_there(
            chunk.path, proof.inode
        )

    def _set_record_aside(self, file: SegmentFile, record: Record, proof: Proof) -> bool:
        """Discard an ill chunk of a segment, and keep its bytes in the quarantine."""
        try:
            self._make_quarantine()
            with Segment(self._root.fd, file.path) as segment:
                segment.set_aside(record, self._quarantine.target(record.key, proof.finding))
        except (OSError, NoSegmentError):
            return False
        return True

    def _set_segment_aside(self, file: SegmentFile, proof: Proof) -> bool:
        """Move a segment without a head to the quarantine: no engine finds a chunk in it."""
        try:
            with Segment(self._root.fd, file.path):
                return False
        except NoSegmentError as error:
            return error.is_torn and self._move_aside(file.path, proof.finding)
        except OSError:
            return False

    def _move_aside(self, path: str, reason: str) -> bool:
        name = f"{os.path.basename(path)}.{reason}.{time.time_ns()}-{os.getpid()}"
        fd = self._root.fd
        try:
            self._make_quarantine()
            os.rename(path, f"{self._one.name}/quarantine/{name}", src_dir_fd=fd, dst_dir_fd=fd)
        except OSError:
            return False
        return True

    def _make_quarantine(self) -> None:
        with suppress(FileExistsError):
            os.mkdir(f"{self._one.name}/quarantine", layout.DIRECTORY_MODE, dir_fd=self._root.fd)

    def _is_there(self, path: str, inode: int) -> bool:
        with suppress(OSError):
            return os.stat(path, dir_fd=self._root.fd, follow_symlinks=False).st_ino == inode
        return False

    def _set_manifest_aside(self) -> None:
        """Move a damaged manifest away: no engine opens the place with it; the next one writes it anew."""
        manifest = self._one.manifest
        if not manifest.problem or manifest.layout == "vllm":
            return
        if not self._root.is_file(f"{self._one.name}/{layout.MANIFEST}"):
            return
        try:
            self._make_quarantine()
            target = f"{self._one.name}/quarantine/{layout.MANIFEST}.manifest.{time.time_ns()}-{os.getpid()}"
            fd = self._root.fd
            os.rename(f"{self._one.name}/{layout.MANIFEST}", target, src_dir_fd=fd, dst_dir_fd=fd)
        except OSError as error:
            self._problems.append(f"{layout.MANIFEST} cannot be set aside: {error.strerror}")
            return
        self._problems.remove(manifest.problem)

    # ----------------------------------------------------------------------------- reading

    def _proofs(self, files: Iterator[File], tick: Tick) -> Iterator[Proven]:
        """Prove chunks in several threads, a bounded number of them ahead of whoever takes the proofs."""
        provers: SimpleQueue[Prover] = SimpleQueue()
        made = [Prover(self._root.fd, self._belongs()) for _ in range(self._threads)]
        for prover in made:
            provers.put(prover)
        job = _bare if self._one.manifest.layout == "vllm" else self._prove
        try:
            with ThreadPoolExecutor(self._threads, "verify") as pool:
                waiting: deque[Future[list[Proven]]] = deque()
                for batch in _batches(files):
                    waiting.append(pool.submit(job, provers, batch))
                    if len(waiting) >= self._threads * _JOBS_AHEAD:
                        yield from _told(waiting.popleft().result(), tick)
                while waiting:
                    yield from _told(waiting.popleft().result(), tick)
        finally:
            for prover in made:
                prover.close()

    def _prove(self, provers: SimpleQueue[Prover], files: list[File]) -> list[Proven]:
        prover = provers.get()
        try:
            proven: list[Proven] = []
            for file in files:
                if isinstance(file, ChunkFile):
                    proven.append((file, None, prover.prove(file.path, file.key)))
                else:
                    proven += self._prove_segment(file, prover)
            return proven
        finally:
            provers.put(prover)

    def _prove_segment(self, file: SegmentFile, prover: Prover) -> list[Proven]:
        try:
            with Segment(self._root.fd, file.path) as segment:
                belongs = self._belongs()(segment.shape.digest)
                return [
                    (file, record if isinstance(record, Record) else None, Proof(finding))
                    for record in segment.records()
                    if (finding := _of_record(segment, record, prover, belongs)) is not None
                ]
        except FileNotFoundError:
            return [(file, None, Proof(Finding.GONE))]
        except NoSegmentError as error:  # where its writer has not finished the first block it never was one
            return [(file, None, Proof(Finding.TORN))] if error.is_torn else []
        except OSError as error:
            return [(file, None, Proof(Finding.UNREADABLE, errno=error.errno or errno.EIO))]

    def _belongs(self) -> Callable[[bytes], bool]:
        """Return what tells this cache's digest; where the manifest is of no use its name still does."""
        digest = self._one.manifest.digest
        if digest is not None:
            return digest[:16].__eq__
        ends = self._one.name.rpartition("_")[2]
        return lambda found: found.hex().startswith(ends[:32])


def _of_record(segment: Segment, record: Record | Verdict, prover: Prover, belongs: bool) -> Finding | None:
    """Say what comes of looking at a record; None where it was never a chunk: it was not finished."""
    if not belongs:
        return Finding.FOREIGN if segment.is_sealed else None
    if isinstance(record, Record):
        return segment.prove(record, prover)
    return Finding.FOREIGN if record is Verdict.FOREIGN else Finding.TORN


def _batches(files: Iterator[File]) -> Iterator[list[File]]:
    """Yield files in lists for one job each: some chunks', or one segment."""
    batch: list[File] = []
    for file in files:
        if isinstance(file, SegmentFile):
            yield [file]
            continue
        batch.append(file)
        if len(batch) == _FILES_A_JOB:
            yield batch
            batch = []
    if batch:
        yield batch


def _told(proofs: Sequence[Proven], tick: Tick) -> Iterable[Proven]:
    tick(len(proofs))
    return proofs


def _bare(provers: SimpleQueue[Prover], files: list[File]) -> list[Proven]:
    """Of files without a trailer the length alone can be looked at: whole pages, as slots have."""
    del provers
    return [(file, None, _bare_proof(file)) for file in files]


def _bare_proof(file: File) -> Proof:
    if isinstance(file, SegmentFile):
        return Proof(Finding.UNPROVEN)
    whole = file.bytes and not file.bytes % BLOCK_BYTES
    return Proof(Finding.UNPROVEN if whole else Finding.TORN, file.inode)


def _errno_name(number: int) -> str:
    return errno.errorcode.get(number, str(number)).lower() if number else ""
