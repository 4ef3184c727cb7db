"""Work on segments in Python: what the tier does where the native helper is missing."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from kvtier.keys import GROUP_BYTES, MAX_KEY_BYTES
from kvtier.tiers.fs.call import FileCall, Place, Result
from kvtier.tiers.fs.python_files import PythonFiles
from kvtier.tiers.fs.segments.layout import Record
from kvtier.tiers.fs.segments.python_shelf import File, PythonShelf
from kvtier.tiers.fs.segments.store import Segments

Found = dict[int, tuple[File, Record]]
"""Where chunks of a call are, by their index."""


class PythonSegments(Segments[PythonShelf]):
    """``Store`` of segments in Python."""

    is_native: Final = False

    def __init__(self, max_bytes: int | None = None) -> None:
        super().__init__(max_bytes)
        files = PythonFiles()
        self.open_pool = files.open_pool
        self.close_pool = files.close_pool
        self.pool_fd = files.pool_fd
        self.begin = files.begin
        self.ended = files.ended
        self.tree_bytes = files.tree_bytes
        self.tree_remove = files.tree_remove

    def open_shelf(self, place: Place, writer: str, segment_bytes: int) -> PythonShelf:
        """See ``Segments.open_shelf``."""
        return PythonShelf(place, writer, segment_bytes)

    def put(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.put``."""
        added = 0
        with self.shelf(call.place) as shelf:
            for i in _locate(shelf, call, first, end):
                call.results[i] = Result.EXISTS
            missing = [i for i in range(first, end) if call.results[i] == Result.ABSENT]
            while missing:
                written, more = _put_some(shelf, call, missing)
                missing, added = missing[written:], added + more
        return added

    def get(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.get``."""
        with self.shelf(call.place) as shelf:
            by_file: dict[File, list[int]] = defaultdict(list)
            found = _locate(shelf, call, first, end)
            for i, (file, _) in found.items():
                by_file[file].append(i)
            for file, mine in by_file.items():
                torn = _get_some(shelf, call, file, sorted(mine, key=lambda i: found[i][1].block), found)
                for i in torn:  # perhaps there is another place
                    self.get(call, i, i + 1)

    def contains(self, call: FileCall, first: int, end: int) -> None:
        """See ``FileWork.contains``."""
        with self.shelf(call.place) as shelf:
            _locate(shelf, call, first, end)

    def discard(self, call: FileCall, first: int, end: int) -> int:
        """See ``FileWork.discard``: bytes are freed when segments are compacted or removed."""
        with self.shelf(call.place) as shelf:
            shelf.look_around(call.stop, whatever_it_takes=True)  # what is not found now would come back
            _each(call, range(first, end), lambda i: shelf.discard(call.keys[i]))
        return 0

    def touch(self, call: FileCall, first: int, end: int) -> None:
        """See ``Store.touch``."""
        with self.shelf(call.place) as shelf:
            _each(call, range(first, end), lambda i: shelf.touch(call.keys[i]))


def _each(call: FileCall, indices: Iterable[int], work: Callable[[int], bool]) -> None:
    for i in indices:
        try:
            if call.stop:
                call.results[i] = -errno.ECANCELED
            elif not _is_key(call, i):
                call.results[i] = -errno.EINVAL
            else:
                call.results[i] = Result.OK if work(i) else Result.ABSENT
        except FileNotFoundError:
            call.results[i] = Result.ABSENT
        except OSError as error:
            call.results[i] = -(error.errno or errno.EIO)


def _is_key(call: FileCall, i: int) -> bool:
    return GROUP_BYTES < len(call.keys[i]) <= MAX_KEY_BYTES


def _locate(shelf: PythonShelf, call: FileCall, first: int, end: int) -> Found:
    """Find chunks, looking for what others have written where some are not known. Writes results."""
    _each(call, range(first, end), lambda _: False)
    found: Found = {}
    for turn in range(2):
        missing = [i for i in range(first, end) if call.results[i] == Result.ABSENT]
        if not missing:
            break
        if turn:
            shelf.look_around(call.stop)
        by_file: dict[File, list[tuple[int, Record]]] = defaultdict(list)
        for i in missing:
            if (spot := shelf.find(call.keys[i])) is not None:
                by_file[spot[0]].append((i, spot[1]))
        for file, mine in by_file.items():
            try:
                there = shelf.sort_out(file, [record.block for _, record in mine])
            except OSError as error:
                for i, _ in mine:
                    call.results[i] = -(error.errno or errno.EIO)
                continue
            for i, record in mine:
                if record.block in there:
                    found[i] = file, record
                    call.results[i] = Result.OK
    return found


def _put_some(shelf: PythonShelf, call: FileCall, missing: list[int]) -> tuple[int, int]:
    """Write as many of the chunks as go at once. Return for how many there is a result, and the bytes."""
    assert call.memory is not None
    assert call.slots is not None
    result, written, added = -errno.ECANCELED, len(missing), 0
    views = [call.memory.view(call.slots[i]) for i in missing]
    try:
        if not call.stop:
            count, added, error = shelf.write([call.keys[i] for i in missing], views)
            result = Result.OK if error is None else -(error.errno or errno.EIO)
            written = count if error is None else len(missing)
    finally:
        for view in views:
            view.release()
    for i in missing[:written]:
        call.results[i] = result
    return written, added


def _get_some(shelf: PythonShelf, call: FileCall, file: File, mine: list[int], found: Found) -> list[int]:
    """Read chunks of one file. Return those whose place is forgotten: unfinished there, or gone."""
    torn = []
    assert call.memory is not None
    assert call.slots is not None
    for i in mine:
        record = found[i][1]
        if call.stop:
            call.results[i] = -errno.ECANCELED
            continue
        with call.memory.view(call.slots[i]) as view:
            try:
                (moved,) = shelf.read(file, [(record, view)])
            except FileNotFoundError:  # compacted, or evicted
                with suppress(OSError):
                    shelf.sort_out(file, [record.block])
                call.results[i] = Result.ABSENT
                torn.append(i)
                continue
            except OSError as error:
                call.results[i] = -(error.errno or errno.EIO)
                continue
            good, whole = shelf.is_good(record, view, moved), moved == view.nbytes
        if good:
            continue
        if shelf.unfinished(file, record.block):
            call.results[i] = Result.ABSENT
            torn.append(i)
        else:
            call.results[i] = Result.CHECKSUM if whole else Result.TORN
            call.inodes[i] = file.number << 32 | record.block
    return torn
