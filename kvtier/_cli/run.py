"""Runs the command line: exit status, signals, errors, and the options that all commands have."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Final

import importlib_metadata
import typer
from rich.console import Console

from kvtier.errors import KVTierError

STATUS: Final = (
    "Exit status: 0 everything works; 1 a problem was found; 2 wrong use, or it cannot be "
    "done; 128 and more ended by a signal."
)
_FAILED: Final = 2

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output instead of text.")
]


def run(app: Callable[[], object]) -> None:
    """Run the command line. An error that the user can fix ends it with one line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character may be missing in the encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        with _exit_on_signals():
            app()
    except (KVTierError, OSError) as error:
        _fail(str(error))
    except RecursionError:
        _fail("a file is nested too deeply to be read: check that it is the right one")
    except MemoryError:
        _fail("out of memory: run this where more is free")


def _fail(message: str) -> None:
    text = f"kvtier: {printable(message)}"
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(_FAILED)


def printable(text: str) -> str:
    """Return text with control characters escaped: in file names they could control the terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the command, so that it removes its temporary files, such as a bench's.

    By default they end the process at once. Ignored signals stay ignored.
    """
    ours = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # as a shell does


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"kvtier {importlib_metadata.version('kvtier')}")
        raise typer.Exit


VersionFlag = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]
