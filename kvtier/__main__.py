"""The command ``kvtier``, also as ``python -m kvtier``."""

from __future__ import annotations

import os
import signal
import sys

_FAILED = 2
_INTERRUPTED = 130  # the exit status that a shell reports


def main() -> None:
    """Run the command line. No interruption, even during imports, shows a traceback.

    SIGTERM and SIGHUP, unless ignored, unwind the command, so that it removes its temporary files.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda caught, _: sys.exit(128 + caught))  # as a shell does
    try:
        from kvtier._cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        _flush()


def _flush() -> None:
    """Flush buffered output. If its reader is gone or the disk full, no traceback is shown."""
    is_lost = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed before Python started
                stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            is_lost = is_lost or not isinstance(error, BrokenPipeError)
    if is_lost:
        sys.exit(_FAILED)


if __name__ == "__main__":
    main()
