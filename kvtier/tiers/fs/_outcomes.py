"""What the tier makes of its calls' results: statuses, and reasons in an operator's words."""

from __future__ import annotations

import errno
from array import array
from collections import Counter
from collections.abc import Container
from typing import Final

from kvtier.tiers._base import Outcome, Status
from kvtier.tiers.fs._files.call import Result, errno_name

REASONS: Final = {
    "max_bytes": "max_bytes is reached",
    "min_free": "the file system has no more free bytes than min_free_bytes, or can hold no more files",
    "counting": "it is not known yet how many bytes root_dir holds",
    "reset_failed": "a reset could not be written down: the tier has nothing and takes nothing",
    "enospc": "the file system is full",
    "edquot": "the disk quota is used up",
    "erofs": "the file system is read-only",
    "eacces": "permission is denied",
    "eperm": "the file system does not permit it",
    "eio": "the device failed",
    "enoent": "a directory below root_dir was removed",
    "estale": "the network file system has lost a file",
    "emfile": "the process has too many open files",
    "enfile": "the machine has too many open files",
    "enomem": "the machine is out of memory",
    "enodev": "the file system is not mounted any more",
    "enotconn": "the file system is not mounted any more",
    "enolck": "the file system has no locks, so that engines could not keep one bound together",
    "etimedout": "the file system did not answer",
}

_STATUSES: Final = {
    Result.OK: Status.OK,
    Result.EXISTS: Status.OK,
    Result.ABSENT: Status.ABSENT,
    Result.TORN: Status.CORRUPT,
    Result.FOREIGN: Status.CORRUPT,
    Result.CHECKSUM: Status.CORRUPT,
    Result.MIN_FREE: Status.REFUSED,
    Result.MAX_BYTES: Status.REFUSED,
    Result.COUNTING: Status.REFUSED,
    -errno.ENOSPC: Status.REFUSED,
    -errno.EDQUOT: Status.REFUSED,
}


def outcome_of(results: array[int]) -> Outcome:
    """Return the outcome of a put or a get, with the reasons of all that failed or was refused."""
    if not any(results):
        return Outcome.all(Status.OK, len(results))
    statuses = tuple(_STATUSES.get(result, Status.FAILED) for result in results)
    reasons = Counter(
        errno_name(-result) if result < 0 else Result(result).name.lower()
        for result, status in zip(results, statuses, strict=True)
        if status not in (Status.OK, Status.ABSENT)
    )
    return Outcome(statuses, reasons)


def chunks_with(results: array[int], wanted: Container[int]) -> list[int]:
    """Return which chunks have one of the results. Mostly all are OK, and it costs little."""
    return [i for i, result in enumerate(results) if result in wanted] if any(results) else []
