"""``kvtier bench`` and ``kvtier demo``. Each command imports torch or an engine only when it runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvtier._cli.report import JsonFlag
from kvtier_bench import engines, figures

bench = typer.Typer(
    help="Benchmarks of kvtier. Compare ratios within one run; absolute times depend on the machine.",
    no_args_is_help=True,
)


def _known_model(size: str) -> str:
    if size not in engines.MODELS:
        raise typer.BadParameter(f"{size!r} is none of {', '.join(engines.MODELS)}")
    return size


def _whole_blocks(tokens: int) -> int:
    if tokens % engines.BLOCK_TOKENS:
        raise typer.BadParameter(
            f"{tokens} is no multiple of {engines.BLOCK_TOKENS}, the engine's block size"
        )
    return tokens


RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="DIRECTORY",
        help="Directory on the disk to measure; emptied afterwards. Default: a temporary one.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="|".join(engines.MODELS),
        callback=_known_model,
        help="Size of the randomly initialised model.",
    ),
]
PromptTokensOption = Annotated[
    int, typer.Option(min=engines.BLOCK_TOKENS, max=4096, help="Prompt length in tokens.")
]
OutputTokensOption = Annotated[int, typer.Option(min=1, max=1024, help="Tokens generated for each prompt.")]
ChunkTokensOption = Annotated[
    int, typer.Option(min=engines.BLOCK_TOKENS, callback=_whole_blocks, help="Tokens per chunk.")
]
NativeOption = Annotated[
    bool, typer.Option("--native/--no-native", help="Also measure vLLM's own tiering, over a CPU worker.")
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Number of repetitions.")]


def demo(as_json: JsonFlag = False) -> None:
    """Run vLLM with kvtier, restart it on the same files, and compare every token."""
    raise typer.Exit(_lazy("demo").main(as_json))


@bench.command()
def core(as_json: JsonFlag = False) -> None:
    """Time per chunk that the scheduler's thread spends in kvtier, beside vLLM's own tiering."""
    _report(_lazy("core").run(), as_json)


@bench.command()
def fs(
    root: Annotated[
        Path,
        typer.Argument(help="Directory on the file system to measure; files in it are removed afterwards."),
    ],
    chunk_bytes: Annotated[
        list[int] | None,
        typer.Option(min=4096, help="Chunk size in bytes; repeatable. [65536, 524288, 2097152]"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of each measurement, in seconds.")] = 1.0,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """Throughput of the fs tier, as a share of the file system's limit."""
    measure = _lazy("fs")
    _report(measure.run(root, chunk_bytes or measure.SIZES, seconds, rounds), as_json)


@bench.command()
def tier(
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="Settings of one tier: JSON, or TOML if it ends in .toml.")
    ],
    chunk_bytes: Annotated[
        list[int] | None,
        typer.Option(min=4096, help="Chunk size in bytes; repeatable. [65536, 524288, 2097152]"),
    ] = None,
    mib: Annotated[int, typer.Option(min=1, help="MiB moved in each measurement.")] = 256,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """Throughput, latency and CPU time of any tier, beside the client library it uses."""
    measure = _lazy("tier")
    _report(measure.run(config, chunk_bytes or measure.SIZES, mib, rounds), as_json)


@bench.command()
def device(
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, rocm or xpu. Default: detected.")
    ] = None,
    host_only: Annotated[
        bool, typer.Option("--host-only", help="Measure only the host time per submission; needs no device.")
    ] = False,
    mib: Annotated[
        int | None,
        typer.Option(min=16, help="MiB of device memory, and as much of slots. [2048; 64 on the CPU]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Copies between device and primary tier: throughput, host time, and compute lost."""
    _report(_lazy("device").run(backend, host_only=host_only, mib=mib), as_json)


@bench.command()
def overhead(
    root: RootOption = None,
    model: ModelOption = "medium",
    rounds: RoundsOption = 10,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per round, all different.")] = 16,
    prompt_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Concurrent prompts.")] = 8,
    chunk_tokens: ChunkTokensOption = engines.BLOCK_TOKENS,
    control: Annotated[
        bool, typer.Option("--control", help="Also measure a second engine without a connector: the noise.")
    ] = False,
    native: NativeOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Throughput lost to kvtier when no prompt is reused; real engines."""
    measure = _lazy("overhead")
    work = measure.Work(model, rounds, prompts, prompt_tokens, output_tokens, at_once, chunk_tokens)
    _report(measure.run(root, work, control=control, native=native), as_json)


@bench.command()
def convoy(
    root: RootOption = None,
    model: ModelOption = "small",
    rounds: RoundsOption = 5,
    requests: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 50,
    prefix_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 8,
    chunk_tokens: ChunkTokensOption = engines.BLOCK_TOKENS,
    native: NativeOption = True,
    as_json: JsonFlag = False,
) -> None:
    """Many concurrent requests whose prefixes are in files, with a small primary tier; real engines."""
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
