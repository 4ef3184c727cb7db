"""Dumps of damaged chunks, in files for whoever looks for the cause.

Their number is bounded: the first ones say as much as the next thousand. Their directory is private.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from kvtier._telemetry.log_limit import LogLimit

logger = logging.getLogger("kvtier.audit")

MOST_FILES = 48
MOST_BYTES = 8 * 2**20  # of each file

_LOG_EVERY_S = 60.0
_numbers = count(1)
_log_limit = LogLimit(_LOG_EVERY_S)


def write(what: str, facts: Mapping[str, object], **contents: bytes | memoryview) -> None:
    """Write facts and bytes to files, all or none of them, and log where, or why not.

    Args:
        what: what was found, in one sentence.
        facts: what else is known.
        contents: the bytes to compare, of equal length.
    """
    try:
        folder = _directory()
        if len(list(folder.iterdir())) + len(contents) >= MOST_FILES:
            added = _log_limit.allow("full", time.monotonic())
            if added is not None:
                logger.error(
                    "%s: %s; evidence folder %s is full, empty it%s", what, dict(facts), folder, added
                )
            return
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{next(_numbers)}"
        text = json.dumps({"what": what, **facts}, indent=2)
        parts = {kind: content[:MOST_BYTES] for kind, content in contents.items()}
        _write_all(folder, name, {"json": text.encode(), **parts})
        logger.error("%s: %s; the evidence is kept in %s, as %s.*", what, dict(facts), folder, name)
    except OSError as error:
        logger.error("%s: %s; the evidence cannot be kept: %s", what, dict(facts), error)


def _directory() -> Path:
    with suppress(OSError, RuntimeError):  # there may be no home directory at all
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return _own(Path(state) / "kvtier" / "evidence")
    return _own(Path(tempfile.gettempdir()) / f"kvtier-evidence-{os.getuid()}")


def _own(folder: Path) -> Path:
    """Create a directory that only this user can read. Raise OSError where it is somebody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not a directory of this user's own")
    folder.chmod(0o700)
    return folder


def _write_all(folder: Path, name: str, parts: Mapping[str, bytes | memoryview]) -> None:
    """Write one file for each part; where one of them fails leave none."""
    try:
        for kind, content in parts.items():
            _write_file(folder / f"{name}.{kind}", content)
    except BaseException:
        for kind in parts:
            with suppress(OSError):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
        raise


def _write_file(path: Path, content: bytes | memoryview) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
