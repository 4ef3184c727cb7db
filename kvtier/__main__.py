"""The command ``kvtier``, also as ``python -m kvtier``."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130  # as a shell says it


def main() -> None:
    """Run the command line. Whatever interrupts it, imports included, no traceback is shown."""
    try:
        from kvtier.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        _flush()


def _flush() -> None:
    """Write out what is buffered. Who reads it may have gone: the interpreter would complain at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
