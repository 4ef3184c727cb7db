"""``kvtier bench`` and ``kvtier demo``. Each imports what it needs, torch or an engine, when it is run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier._cli.report import JsonFlag
from kvtier_bench import engines, figures

bench = typer.Typer(
    help="Measure parts of kvtier; figures are ratios taken in one run.", no_args_is_help=True
)


RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="DIRECTORY",
        help="Where files go, to be removed again: a directory on the disk to measure. Default: a temporary "
        "one.",
    ),
]
ModelOption = Annotated[engines.Size, typer.Option(help="Size of the random model that is made for it.")]
ChunkBytesOption = Annotated[
    list[int] | None,
    typer.Option(min=4096, help="Bytes of a chunk; may be given again. [65536, 524288, 2097152]"),
]
MibOption = Annotated[int, typer.Option(min=1, help="MiB that are moved in each measured stretch.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="How often each measurement is repeated.")]


def demo(as_json: JsonFlag = False) -> None:
    """Run a real engine over kvtier, stop it, start it anew, and compare every token."""
    raise typer.Exit(_lazy("demo").main(as_json))


@bench.command()
def core(as_json: JsonFlag = False) -> None:
    """Microseconds that the owner's thread spends for each chunk."""
    figures.report(_lazy("core").run(), as_json)


@bench.command()
def fs(
    root: Annotated[
        Path, typer.Argument(help="A directory on the file system to measure; it is left empty.")
    ],
    chunk_bytes: ChunkBytesOption = None,
    mib: MibOption = 512,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """GB/s of the fs tier against the limit of its file system."""
    measure = _lazy("fs")
    figures.report(measure.run(root, chunk_bytes or measure.SIZES, mib, rounds), as_json)


@bench.command()
def tier(
    config: Annotated[Path, typer.Option(metavar="FILE", help="Settings of one tier, as JSON.")],
    chunk_bytes: ChunkBytesOption = None,
    mib: MibOption = 256,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """GB/s, latency and processor time of any tier, beside the client that it is built on."""
    measure = _lazy("tier")
    figures.report(measure.run(config, chunk_bytes or measure.SIZES, mib, rounds), as_json)


@bench.command()
def device(
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, rocm or xpu. Default: what is there.")
    ] = None,
    mib: Annotated[
        int | None,
        typer.Option(min=16, help="MiB of device memory, and of slots. [2048; 64 on the CPU]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """GB/s of copies between device and primary tier, host time for them, and the loss of computing."""
    figures.report(_lazy("device").run(backend, mib), as_json)


@bench.command()
def overhead(
    root: RootOption = None,
    model: ModelOption = engines.Size.MEDIUM,
    rounds: RoundsOption = 10,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round, each one new.")] = 16,
    control: Annotated[
        bool, typer.Option("--control", help="A second engine without a connector, too: what noise does.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Tokens a second lost where nothing is reused: real engines, with and without kvtier."""
    measure = _lazy("overhead")
    figures.report(measure.run(root, measure.Work(model.value, rounds, prompts), control=control), as_json)


@bench.command()
def convoy(
    root: RootOption = None,
    model: ModelOption = engines.Size.SMALL,
    rounds: RoundsOption = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests that are sent at once.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """Many requests at once whose prefixes lie in files, with a small primary tier: real engines."""
    measure = _lazy("convoy")
    figures.report(measure.run(root, measure.Work(model.value, rounds, requests)), as_json)


def _lazy(module: str) -> Any:
    try:
        return importlib.import_module(f"kvtier_bench.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvtier"):
            raise
        typer.echo(f"kvtier: this command needs {error.name}, which is not installed", err=True)
        raise typer.Exit(2) from None
