"""Dumps of damaged chunks, in files for the search for the cause.

Their number is bounded, because the first dumps show as much as the next thousand. Their directory is
private.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from kvtier._log import GuardedLogger, LogLimit

logger = GuardedLogger("kvtier.audit")

MOST_FILES = 48
MOST_BYTES = 8 * 2**20  # size limit of each file

_LOG_EVERY_S = 60.0
_numbers = count(1)
_log_limit = LogLimit(_LOG_EVERY_S)


def write(what: str, facts: Mapping[str, object], **contents: bytes | memoryview) -> None:
    """Write facts and bytes to files, all or none of them, and log the place or the failure.

    ``what`` describes the damage in one sentence; ``contents`` are the bytes to compare, of equal length.
    """
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{next(_numbers)}"
    text = json.dumps({"what": what, **facts}, indent=2)
    try:
        folder = _directory()
        if len(list(folder.iterdir())) + len(contents) < MOST_FILES:
            _write_all(folder / name, {"json": text.encode(), **contents})
            logger.error("%s: %s; the evidence is kept in %s, as %s.*", what, dict(facts), folder, name)
        elif (added := _log_limit.allow("full", time.monotonic())) is not None:
            logger.error("%s: %s; evidence folder %s is full, empty it%s", what, dict(facts), folder, added)
    except OSError as error:
        logger.error("%s: %s; the evidence cannot be kept: %s", what, dict(facts), error)


def _directory() -> Path:
    """Return a directory that only this user can read. Raise OSError if another user owns it."""
    try:
        return _private(
            Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "kvtier/evidence"
        )
    except (OSError, RuntimeError):  # there may be no home directory at all
        return _private(Path(tempfile.gettempdir()) / f"kvtier-evidence-{os.getuid()}")


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not a directory owned by this user")
    folder.chmod(0o700)
    return folder


def _write_all(path: Path, parts: Mapping[str, bytes | memoryview]) -> None:
    """Write one file for each part. If one fails, remove all of them."""
    with ExitStack() as written:
        for kind, content in parts.items():
            target = path.with_name(f"{path.name}.{kind}")
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            written.callback(target.unlink, missing_ok=True)
            with open(fd, "wb") as file:
                file.write(content[:MOST_BYTES])
        written.pop_all()
