"""``kvtier bench`` and ``kvtier demo``. Each imports what it needs, torch or an engine, when it is run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvtier._cli.report import JsonFlag
from kvtier_bench import engines, figures

bench = typer.Typer(
    help="Measure parts of kvtier; figures are ratios taken in one run.", no_args_is_help=True
)


def _known_model(size: str) -> str:
    if size not in engines.MODELS:
        raise typer.BadParameter(f"{size!r} is none of {', '.join(engines.MODELS)}")
    return size


def _whole_blocks(tokens: int) -> int:
    if tokens % engines.BLOCK_TOKENS:
        raise typer.BadParameter(f"{tokens} is no multiple of {engines.BLOCK_TOKENS}, the engine's block")
    return tokens


RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="DIRECTORY",
        help="Where files go, to be removed again: a directory on the disk to measure. Default: a temporary "
        "one.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="|".join(engines.MODELS),
        callback=_known_model,
        help="Size of the random model that is made for it.",
    ),
]
PromptTokensOption = Annotated[
    int, typer.Option(min=engines.BLOCK_TOKENS, max=4096, help="Tokens of a prompt that fill chunks.")
]
OutputTokensOption = Annotated[int, typer.Option(min=1, max=1024, help="Tokens generated for each prompt.")]
ChunkTokensOption = Annotated[
    int, typer.Option(min=engines.BLOCK_TOKENS, callback=_whole_blocks, help="Tokens of a chunk.")
]
NativeOption = Annotated[
    bool, typer.Option("--native/--no-native", help="vLLM's own tiering over a CPU worker, too.")
]
RoundsOption = Annotated[int, typer.Option(min=1, help="How often each measurement is repeated.")]


def demo(as_json: JsonFlag = False) -> None:
    """Run a real engine over kvtier, stop it, start it anew, and compare every token."""
    raise typer.Exit(_lazy("demo").main(as_json))


@bench.command()
def core(as_json: JsonFlag = False) -> None:
    """Microseconds that the owner's thread spends for each chunk."""
    _report(_lazy("core").run(), as_json)


@bench.command()
def fs(
    root: Annotated[
        Path, typer.Argument(help="A directory on the file system to measure; it is left empty.")
    ],
    chunk_bytes: Annotated[
        list[int] | None,
        typer.Option(min=4096, help="Bytes of a chunk; may be given again. [65536, 524288, 2097152]"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of each measured stretch.")] = 1.0,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """GB/s of the fs tier against the limit of its file system."""
    measure = _lazy("fs")
    _report(measure.run(root, chunk_bytes or measure.SIZES, seconds, rounds), as_json)


@bench.command()
def tier(
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="Settings of one tier, as JSON, or TOML in a *.toml.")
    ],
    chunk_bytes: Annotated[
        list[int] | None,
        typer.Option(min=4096, help="Bytes of a chunk; may be given again. [65536, 524288, 2097152]"),
    ] = None,
    mib: Annotated[int, typer.Option(min=1, help="MiB that are moved in each measured stretch.")] = 256,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """GB/s, latency and processor time of any tier, beside the client that it is built on."""
    measure = _lazy("tier")
    _report(measure.run(config, chunk_bytes or measure.SIZES, mib, rounds), as_json)


@bench.command()
def device(
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, rocm or xpu. Default: what is there.")
    ] = None,
    host_only: Annotated[
        bool, typer.Option("--host-only", help="Only the host's time to describe copies: needs no device.")
    ] = False,
    mib: Annotated[
        int | None,
        typer.Option(min=16, help="MiB of device memory, and of slots. [2048; 64 on the CPU]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """GB/s of copies between device and primary tier, host time for them, and the loss of computing."""
    _report(_lazy("device").run(backend, host_only=host_only, mib=mib), as_json)


@bench.command()
def overhead(
    root: RootOption = None,
    model: ModelOption = "medium",
    rounds: RoundsOption = 10,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round, each one new.")] = 16,
    prompt_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Prompts that an engine works on at once.")] = 8,
    chunk_tokens: ChunkTokensOption = engines.BLOCK_TOKENS,
    control: Annotated[
        bool, typer.Option("--control", help="A second engine without a connector, too: what noise does.")
    ] = False,
    native: NativeOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Tokens a second lost where nothing is reused: real engines, with and without kvtier."""
    measure = _lazy("overhead")
    work = measure.Work(model, rounds, prompts, prompt_tokens, output_tokens, at_once, chunk_tokens)
    _report(measure.run(root, work, control=control, native=native), as_json)


@bench.command()
def convoy(
    root: RootOption = None,
    model: ModelOption = "small",
    rounds: RoundsOption = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests that are sent at once.")] = 50,
    prefix_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 8,
    chunk_tokens: ChunkTokensOption = engines.BLOCK_TOKENS,
    native: NativeOption = True,
    as_json: JsonFlag = False,
) -> None:
    """Many requests at once whose prefixes lie in files, with a small primary tier: real engines."""
    measure = _lazy("convoy")
    work = measure.Work(model, rounds, requests, prefix_tokens, output_tokens, chunk_tokens)
    _report(measure.run(root, work, native=native), as_json)


def _lazy(module: str) -> Any:
    try:
        return importlib.import_module(f"kvtier_bench.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvtier"):
            raise
        typer.echo(f"kvtier: this command needs {error.name}, which is not installed", err=True)
        raise typer.Exit(2) from None


def _report(result: object, as_json: bool) -> None:
    if as_json:
        typer.echo(figures.as_json(result))
    else:
        figures.show(result, Console())
