"""The commands ``bench``, ``demo`` and ``simulate``. Each imports torch or an engine only when it runs."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier._cli import JsonFlag
from kvtier._plugins import install_command
from kvtier.errors import KVTierError
from kvtier_bench import figures
from kvtier_bench.engine import compared as engines

bench = typer.Typer(
    help="Benchmarks of kvtier. Compare ratios within one run; absolute times depend on the machine.",
    no_args_is_help=True,
)


RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="DIRECTORY",
        help="Directory on the disk to measure; emptied afterwards. Default: a temporary one.",
    ),
]
ModelOption = Annotated[engines.Size, typer.Option(help="Size of the randomly initialized model.")]
ChunkBytesOption = Annotated[
    list[int] | None,
    typer.Option(min=4096, help="Chunk size in bytes; repeatable. [65536, 524288, 2097152]"),
]
MibOption = Annotated[int, typer.Option(min=1, help="MiB moved in each measurement.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Number of repetitions.")]


def demo(as_json: JsonFlag = False) -> None:
    """Run vLLM with kvtier, restart it with its host memory and on its files, and compare every token."""
    raise typer.Exit(_lazy("engine.demo").main(as_json))


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="File in Mooncake's format: a JSON object per request; hash_ids name the chunks of its "
            "prompt. Or a generated trace: agents, drift, heads, loops, scans or shifts."
        ),
    ],
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Eviction policy; repeatable. Default: all.")
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory, as 64GiB or as a share of the trace's chunks, 10%; repeatable. "
            "[0.3%, 1%, 3%, 10%, 20%, 30%]",
        ),
    ] = None,
    chunk_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of a chunk: of 512 tokens of an 8B model by default.")
    ] = "64MiB",
    device: Annotated[
        str, typer.Option(metavar="SIZE", help="Device memory for KV in front, as --capacity. Default: none.")
    ] = "0%",
    requests: Annotated[int, typer.Option(min=1, help="Requests of a generated trace.")] = 12_000,
    seed: Annotated[int, typer.Option(help="Seed of a generated trace.")] = 0,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of a prompt that the engine computes in one step. 0: whole prompts."
        ),
    ] = 2048,
    as_json: JsonFlag = False,
) -> None:
    """Show the hit rate of each eviction policy on a trace, by size of host memory.

    Example: kvtier simulate trace.jsonl --capacity 64GiB --capacity 256GiB --device 40GiB
    """
    measure = _lazy("simulate.run")
    capacities = capacity or measure.CAPACITIES
    step = max_num_batched_tokens
    rows = measure.run(trace, policy or (), capacities, chunk_bytes, device, requests, seed, step)
    figures.report(rows, as_json)


@bench.command()
def core(as_json: JsonFlag = False) -> None:
    """Time per chunk that the scheduler's thread spends in kvtier, compared with vLLM's own tiering."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    figures.report(_lazy("managers.core").run(), as_json)


@bench.command()
def fs(
    root: Annotated[
        Path,
        typer.Argument(help="Directory on the file system to measure; files in it are removed afterwards."),
    ],
    chunk_bytes: ChunkBytesOption = None,
    mib: MibOption = 512,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """Throughput of the fs tier, as a share of the file system's limit."""
    measure = _lazy("storage.fs")
    figures.report(measure.run(root, chunk_bytes or measure.SIZES, mib, rounds), as_json)


@bench.command()
def tier(
    config: Annotated[Path, typer.Option(metavar="FILE", help="Settings of one tier, as JSON.")],
    chunk_bytes: ChunkBytesOption = None,
    mib: MibOption = 256,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """Throughput, latency and CPU time of any tier, compared with the client library it uses."""
    measure = _lazy("storage.tier")
    figures.report(measure.run(config, chunk_bytes or measure.SIZES, mib, rounds), as_json)


@bench.command()
def peers(
    chunk_bytes: ChunkBytesOption = None,
    mib: MibOption = 256,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """Throughput and latency of reads from another process's memory: the nixl tier, compared with NIXL alone.

    Example: UCX_TLS=tcp,self kvtier bench peers
    """
    measure = _lazy("storage.peers")
    figures.report(measure.run(chunk_bytes or measure.SIZES, mib, rounds), as_json)


@bench.command()
def device(
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, rocm or xpu. Default: detected.")
    ] = None,
    mib: Annotated[
        int | None,
        typer.Option(min=16, help="MiB of device memory, and as much of slots. [2048; 64 on the CPU]"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Copies between device and primary tier: throughput, host time, and compute lost."""
    figures.report(_lazy("device").run(backend, mib), as_json)


@bench.command()
def fleet(
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help="Settings of a tier that two engines share; repeatable."),
    ] = None,
    nixl: Annotated[bool, typer.Option("--nixl", help="Engines that read each other's memory, too.")] = False,
    kvcr: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="Interpreter that has NVIDIA KVCR: requests that name their source, with KVCR and with "
            "kvtier, times and faults. Implies --nixl.",
        ),
    ] = None,
    serve: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            min=0.001,
            help="Measure only the tokens per second that an engine loses while a peer reads its chunks "
            "over NIXL at this rate; the options above and --root are ignored.",
        ),
    ] = None,
    root: RootOption = None,
    model: ModelOption = engines.Size.SMALL,
    rounds: RoundsOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """Time to the first token of prompts that another engine computed, by shared tier; real engines.

    Example: kvtier bench fleet --tier '{"type": "mooncake", "master": "localhost:50051"}'
    """
    if serve is not None:
        figures.report(_lazy("engine.serving").run(model.value, rounds, serve), as_json)
        return
    measure = _lazy("engine.fleet")
    figures.report(
        measure.run(root, measure.Work(model.value, rounds), tier or (), nixl=nixl, kvcr=kvcr), as_json
    )


@bench.command()
def gate(
    model: ModelOption = engines.Size.TINY,
    requests: Annotated[int, typer.Option(min=2, help="Requests that count in each phase.")] = 40,
    tier: Annotated[
        str, typer.Option(metavar="JSON", help="Settings of the tier; the default needs kvtier-testing.")
    ] = '{"type": "dummy", "capacity_bytes": "1GiB"}',
    as_json: JsonFlag = False,
) -> None:
    """Time to the first token while a tier is throttled, and after, by `load_gate`; real engines."""
    measure = _lazy("engine.gate")
    figures.report(measure.run(measure.Work(model.value, requests, tier)), as_json)


@bench.command()
def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            help="File in Mooncake's format: a JSON object per request, with timestamp, input_length, "
            "output_length and hash_ids."
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option(help="Server to send to, OpenAI-compatible. Default: vLLM servers started for this."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|none",
            help="Settings of a server to start, as for kvtier doctor; repeatable: one server after another. "
            "[none, and kvtier with host memory and files]",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests, as whole conversations.")] = 200,
    speed: Annotated[float, typer.Option(min=1e-3, help="Divide the times of the trace by this.")] = 30.0,
    tokens_per_chunk: Annotated[
        int, typer.Option(min=16, max=512, help="Tokens that replace 512 tokens of the trace.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the choice of conversations, and of the tokens.")] = 0,
    model: ModelOption = engines.Size.TINY,
    root: RootOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Recorded traffic, replayed over HTTP at its own times: TTFT, tokens, hits and bytes by tier, failures.

    Example: kvtier bench replay trace.jsonl --url http://localhost:8000 --speed 1 --tokens-per-chunk 512
    """
    measure = _lazy("replay.run")
    scale = measure.Scale(speed, tokens_per_chunk, seed)
    figures.report(measure.run(trace, scale, requests, url, config or (), root, model.value), as_json)


@bench.command()
def restart(
    gib: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="GiB of host memory, which has to be free; repeatable. [1]"),
    ] = None,
    chunk_bytes: ChunkBytesOption = None,
    model: Annotated[
        engines.Size | None,
        typer.Option(help="Measure real engines with a model of this size instead; --gib is ignored."),
    ] = None,
    rounds: RoundsOption = 3,
    as_json: JsonFlag = False,
) -> None:
    """Restarts over host memory kept by `keep_host_memory_s`: time until it serves again, and its cost.

    Example: kvtier bench restart --gib 4 --gib 12 --chunk-bytes 524288
    """
    if model is not None:
        figures.report(_lazy("engine.restart").run(model.value, rounds), as_json)
        return
    sizes = chunk_bytes or [524288, 2097152]
    figures.report(_lazy("storage.restart").run(gib or [1.0], sizes, rounds), as_json)


@bench.command()
def hints(
    trace: Annotated[
        Path | None, typer.Argument(help="File in Mooncake's format. Default: generated conversations.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=4, help="Conversations of 3 to 8 turns.")] = 40,
    agents: Annotated[
        int, typer.Option(min=2, help="Conversations at a time; half of them send hints.")
    ] = 12,
    tokens_per_chunk: Annotated[
        int, typer.Option(min=16, max=512, help="Tokens that replace 512 tokens of the trace.")
    ] = 32,
    host: Annotated[
        float, typer.Option(min=1, max=100, help="Host memory, in percent of the different chunks.")
    ] = 10.0,
    pin_budget: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of it for pinned chunks.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the conversations, their pauses and tokens.")] = 0,
    model: ModelOption = engines.Size.TINY,
    root: RootOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Agents that return from tool calls, by their KV hints: TTFT, hits and bytes, compared with an oracle.

    Example: kvtier bench hints trace.jsonl
    """
    measure = _lazy("engine.hints")
    name = "generated" if trace is None else trace.name
    work = measure.Agents(name, conversations, agents, tokens_per_chunk, host, pin_budget, model.value)
    figures.report(measure.run(trace, work, seed, root), as_json)


@bench.command()
def versus(
    root: RootOption = None,
    model: ModelOption = engines.Size.SMALL,
    lmcache: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Interpreter that has LMCache. Default: this one."),
    ] = None,
    rounds: RoundsOption = 5,
    chunk_tokens: Annotated[int, typer.Option(min=32, help="Tokens of a chunk; a multiple of 32.")] = 256,
    only: Annotated[engines.Part | None, typer.Option(help="Measure only this.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare kvtier, vLLM's own tiering and LMCache: speed, and requests while the cache fails.

    Example: kvtier bench versus --lmcache /opt/lmcache/bin/python
    """
    measure = _lazy("engine.versus.run")
    setting = measure.setting_of(model, chunk_tokens)
    parts = [only] if only else list(engines.Part)
    figures.report(measure.run(root, lmcache, setting, rounds, parts), as_json)


def _lazy(module: str) -> Any:
    try:
        return importlib.import_module(f"kvtier_bench.{module}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("kvtier_tools"):
            remedy = install_command("kvtier-tools")
            raise KVTierError(f"this command needs kvtier-tools: {remedy}") from error
        if error.name is None or error.name.startswith("kvtier"):
            raise
        typer.echo(f"kvtier: this command needs {error.name}, which is not installed", err=True)
        raise typer.Exit(2) from None
