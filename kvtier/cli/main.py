"""The command ``kvtier``. It works without torch and an engine; each command imports what it needs."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import importlib_metadata
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier import plugins, schema
from kvtier.cli import ending, engines, figures, roots
from kvtier.cli import new_tier as new_tiers
from kvtier.core.policies.base import EvictionPolicy
from kvtier.errors import KVTierError
from kvtier.plugins import Group
from kvtier.tiers import registry
from kvtier.tiers.base import SecondaryTier

app = typer.Typer(
    name="kvtier",
    help="Keep the KV cache of an LLM engine in host memory and in slower, larger tiers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(
    help="Measure parts of kvtier; figures are ratios taken in one run.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
roots.add_to(app)


def _writable(path: Path | None) -> Path | None:
    """See to it before minutes are spent on figures that could not be written."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written: name a file in a directory that can")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=_writable, help="Write the figures to FILE as JSON, too."
    ),
]


def _known_model(size: str) -> str:
    if size not in engines.MODELS:
        raise typer.BadParameter(f"{size!r} is none of {', '.join(engines.MODELS)}")
    return size


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
NativeOption = Annotated[
    bool, typer.Option("--native/--no-native", help="vLLM's own tiering over a CPU worker, too.")
]


def main() -> None:
    """Run the command line; an error that a user can act on ends it in one line, with exit status 2."""
    try:
        with ending.in_order():
            app()
    except (KVTierError, OSError) as error:
        Console(stderr=True).print(
            f"kvtier: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {importlib_metadata.version('kvtier')}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def tiers() -> None:
    """List the installed tiers and eviction policies, and whether each one loads."""
    console = Console()
    console.print(_plugin_table(plugins.TIERS, "Tiers", SecondaryTier))
    console.print(_plugin_table(plugins.POLICIES, "Eviction policies", EvictionPolicy))


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            show_default=False,
            help="Settings as JSON, or TOML in a *.toml: kvtier's, or an engine's kv_transfer_config.",
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help="Settings of one tier, in place of a file; may be given again."),
    ] = None,
    chunk_bytes: Annotated[
        int, typer.Option(min=4096, help="Length of the chunk, a multiple of 4096.")
    ] = 1_048_576,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output instead of a table.")
    ] = False,
) -> None:
    """Put a chunk into each tier, get it back, discard it, and say what is wrong. Status 1 if anything is."""
    checks = _lazy("kvtier.cli.doctor").run(config, tier or [], chunk_bytes)
    ill = list(dict.fromkeys(check.tier for check in checks if not check.is_ok))
    if as_json:
        typer.echo(json.dumps({"not_well": ill, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        figures.show(checks, Console())
        typer.echo(f"not well: {', '.join(ill)}" if ill else "all tiers are well")
    raise typer.Exit(1 if ill else 0)


@app.command(name="new-tier")
def new_tier(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tier's type in configurations.")],
    directory: Annotated[Path, typer.Option(help="Where the folder kvtier-NAME is made.")] = Path(),
) -> None:
    """Make a distribution with a tier that works, and its tests, to be turned into one's own."""
    folder = new_tiers.create(name, directory)
    typer.echo(f"made {folder}; next: pip install -e '{folder}[tests]' && pytest {folder}")


@app.command(name="schema")
def print_schema(
    table: Annotated[
        bool, typer.Option("--table", help="Print Markdown tables instead of a JSON schema.")
    ] = False,
) -> None:
    """Print every setting, those of the installed tiers included."""
    typer.echo(schema.table() if table else json.dumps(schema.json_schema(), indent=2))


@app.command()
def demo(json_file: JsonOption = None) -> None:
    """Run a real engine over kvtier, stop it, start it anew, and compare every token."""
    raise typer.Exit(_lazy("kvtier.cli.demo").main(json_file))


@bench.command(name="core")
def bench_core(json_file: JsonOption = None) -> None:
    """Microseconds that the owner's thread spends for each chunk."""
    _report(_lazy("kvtier.cli.bench_core").run(), json_file)


@bench.command(name="fs")
def bench_fs(
    root: Annotated[
        Path, typer.Argument(help="A directory on the file system to measure; it is left empty.")
    ],
    isolation: Annotated[
        Literal["process", "thread"],
        typer.Option(help="Where the tier is, seen from the engine that computes beside it."),
    ] = "process",
    json_file: JsonOption = None,
) -> None:
    """GB/s of the fs tier against the limit of its file system."""
    _report(_lazy("kvtier.cli.bench_fs").run(root, isolation=isolation), json_file)


@bench.command(name="tier")
def bench_tier(
    config: Annotated[
        Path,
        typer.Option("--config", metavar="FILE", help="Settings of one tier, as JSON, or TOML in a *.toml."),
    ],
    chunk_bytes: Annotated[
        list[int] | None,
        typer.Option(
            "--chunk-bytes", min=4096, help="Bytes of a chunk; may be given again. [65536, 524288, 2097152]"
        ),
    ] = None,
    mib: Annotated[int, typer.Option(min=1, help="MiB that are moved in each measured stretch.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each stretch is repeated.")] = 5,
    json_file: JsonOption = None,
) -> None:
    """GB/s, latency and processor time of any tier, beside the client that it is built on."""
    measure = _lazy("kvtier.cli.bench_tier")
    _report(measure.run(config, chunk_bytes or measure.SIZES, mib, rounds), json_file)


@bench.command(name="device")
def bench_device(
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
    json_file: JsonOption = None,
) -> None:
    """GB/s of copies between device and primary tier, host time for them, and the loss of computing."""
    _report(_lazy("kvtier.cli.bench_device").run(backend, host_only=host_only, mib=mib), json_file)


@bench.command(name="audit")
def bench_audit(
    backend: Annotated[
        str | None, typer.Option(help="cpu, cuda, rocm or xpu. [that of this machine's accelerator]")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """What it costs to audit no chunk, some as by default, and all: stores and loads of a device backend."""
    _report(_lazy("kvtier.cli.bench_audit").run(backend), json_file)


@bench.command(name="startup")
def bench_startup(
    gib: Annotated[
        list[float] | None,
        typer.Option("--gib", min=0.01, help="A size of the primary tier; may be given again. [1, 2, 4]"),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Seconds until the primary tier's memory is ready, beside vLLM's own region."""
    startup = _lazy("kvtier.cli.bench_startup")
    _report(startup.run(gib or startup.SIZES_GIB), json_file)


@bench.command(name="root")
def bench_root(
    root: RootOption = None,
    chunks: Annotated[
        int,
        typer.Option(min=1, help="Chunks that the root holds; each takes 8 KiB, and 3 inodes."),
    ] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="How often the tier is opened.")] = 3,
    json_file: JsonOption = None,
) -> None:
    """How soon a file tier answers that is opened on a root which holds many chunks."""
    _report(_lazy("kvtier.cli.bench_root").run(root, chunks=chunks, rounds=rounds), json_file)


@bench.command(name="overhead")
def bench_overhead(
    root: RootOption = None,
    model: ModelOption = "medium",
    rounds: Annotated[int, typer.Option(min=1, help="How often each engine is asked.")] = 10,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round, each one new.")] = 16,
    prompt_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Prompts that an engine works on at once.")] = 8,
    control: Annotated[
        bool, typer.Option("--control", help="A second engine without a connector, too: what noise does.")
    ] = False,
    native: NativeOption = False,
    json_file: JsonOption = None,
) -> None:
    """Tokens a second lost where nothing is reused: real engines, with and without kvtier."""
    measured = _lazy("kvtier.cli.bench_overhead").run(
        root,
        model=model,
        rounds=rounds,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        at_once=at_once,
        control=control,
        native=native,
    )
    _report(measured, json_file)


@bench.command(name="isolation")
def bench_isolation(
    root: RootOption = None,
    chunk_bytes: Annotated[int, typer.Option(min=4096, help="Bytes of a promoted chunk.")] = 524_288,
    promotion_rounds: Annotated[int, typer.Option(min=1, help="How often each promotion is measured.")] = 40,
    stretch_s: Annotated[float, typer.Option(min=0.01, help="Seconds of each stretch of computing.")] = 0.5,
    engine: Annotated[
        bool, typer.Option("--engine/--no-engine", help="Real engines, too; else no vLLM is needed.")
    ] = True,
    model: ModelOption = "medium",
    rounds: Annotated[int, typer.Option(min=1, help="How often each engine is asked.")] = 10,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round, each one new.")] = 16,
    prompt_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Prompts that an engine works on at once.")] = 8,
    json_file: JsonOption = None,
) -> None:
    """Tiers in a thread or in a process: the latency of promotions, and what the engine loses."""
    measured = _lazy("kvtier.cli.bench_isolation").run(
        root,
        chunk_bytes=chunk_bytes,
        promotion_rounds=promotion_rounds,
        stretch_s=stretch_s,
        engine=engine,
        model=model,
        rounds=rounds,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        at_once=at_once,
    )
    _report(measured, json_file)


@bench.command(name="convoy")
def bench_convoy(
    root: RootOption = None,
    model: ModelOption = "small",
    rounds: Annotated[int, typer.Option(min=1, help="How often each engine gets the requests.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests that are sent at once.")] = 50,
    prefix_tokens: PromptTokensOption = 512,
    output_tokens: OutputTokensOption = 8,
    native: NativeOption = True,
    json_file: JsonOption = None,
) -> None:
    """Many requests at once whose prefixes lie in files, with a small primary tier: real engines."""
    measured = _lazy("kvtier.cli.bench_convoy").run(
        root,
        model=model,
        rounds=rounds,
        requests=requests,
        prefix_tokens=prefix_tokens,
        output_tokens=output_tokens,
        native=native,
    )
    _report(measured, json_file)


def _lazy(module: str) -> Any:
    """Import a command's module only when it is asked for: it may need torch or an engine."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvtier":
            raise
        typer.echo(f"kvtier: this command needs {error.name}, which is not installed", err=True)
        raise typer.Exit(2) from None


def _report(result: object, json_file: Path | None) -> None:
    figures.show(result, Console())
    if json_file is not None:
        figures.write(result, json_file)


def _plugin_table(group: Group, title: str, base: type) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("name", "distribution", "version", "loads"):
        table.add_column(column, overflow="fold")
    for info in plugins.installed(group):
        cells = (info.name, info.distribution, info.version, _loads(group, info.name, base))
        table.add_row(*map(Text, cells))  # as text: what another distribution says is no markup
    return table


def _loads(group: Group, name: str, base: type) -> str:
    try:
        registry.load(name) if group is plugins.TIERS else plugins.load(group, name, base, "name")
    except KVTierError as error:
        return f"no: {error}"
    return "yes"


if __name__ == "__main__":
    main()
