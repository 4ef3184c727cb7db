"""``kvtier size``: computes the needs of a model's KV cache on a machine, and a configuration for it."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvtier._cli import JsonFlag
from kvtier._core.shared import PRIMARY
from kvtier._memory.layout import default_blocks_per_chunk, whole_pages
from kvtier._plugins import install_command
from kvtier._settings.quantities import MOST_BYTES, size
from kvtier.errors import KVTierError
from kvtier_tools import report
from kvtier_tools.limits import Need, chunks_need, disk_need, memory_needs
from kvtier_tools.report import Bytes
from kvtier_tools.size.model_shape import ITEM_BYTES, Config, LayerGroup, ModelShape, read_config, shape_of

_LENGTHS: Final = (1024, 8192, 32_768)
_DEFAULT_BUDGET: Final = 0.25
_MEMORY: Any = "64GiB"  # parsed like options
_DISK: Any = "1TiB"
_CONTEXT: Any = "32k"
_MEMORY_SPEED: Any = "20GB"
_DISK_SPEED: Any = "3GB"


@dataclass(frozen=True)
class Chunks:
    """Chunks of one group of layers. Sizes count all workers together."""

    group: str
    layers: int
    bytes_per_token: int
    tokens_per_chunk: int
    chunk_bytes: Bytes


@dataclass(frozen=True)
class Room:
    """The capacity of a tier."""

    tier: str
    capacity: Bytes
    chunks: int
    tokens: int
    conversations: int


@dataclass(frozen=True)
class LoadTime:
    """Seconds until a prompt is on the device, by its source."""

    tokens: int
    loaded: Bytes
    from_memory_s: float
    from_disk_s: float
    computed_s: float | None


@dataclass(frozen=True)
class Sizes:
    """The results, as in the JSON document."""

    model: str
    bytes_per_token: int
    groups: list[Chunks]
    rooms: list[Room]
    memory_bytes_s: int
    disk_bytes_s: int
    loads: list[LoadTime]
    needs: list[Need]
    configuration: dict[str, Any]


def _size(text: str) -> int:
    try:
        return size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _tokens(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)(k?)", text)
    if found is None or not int(found[1]):
        raise typer.BadParameter(f"{text!r} is no number of tokens: write 32768 or 32k")
    return int(found[1]) * (1024 if found[2] else 1)


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A config.json, its folder, or a name in the hub's local cache."
        ),
    ],
    memory: Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="Host memory.")] = _MEMORY,
    disk: Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="Limit of the files.")] = _DISK,
    root: Annotated[Path, typer.Option(help="Directory of the files.")] = Path("/var/cache/kvtier"),
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel workers.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="Of the KV cache: auto, fp8, bfloat16, float16, float32.")
    ] = "auto",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of the engine's block.")] = 16,
    context: Annotated[
        int, typer.Option(parser=_tokens, metavar="TOKENS", help="Of a conversation.")
    ] = _CONTEXT,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Conversations of that length that take turns.")
    ] = 1,
    memory_speed: Annotated[
        int,
        typer.Option(parser=_size, metavar="SIZE", help="Bytes a second from host memory to each device."),
    ] = _MEMORY_SPEED,
    disk_speed: Annotated[
        int, typer.Option(parser=_size, metavar="SIZE", help="Bytes a second from the files.")
    ] = _DISK_SPEED,
    measure: Annotated[
        bool, typer.Option(help="Measure that speed in --root, with chunks of this size (`kvtier-bench`).")
    ] = False,
    prefill: Annotated[
        int | None, typer.Option(min=1, help="Tokens a second that the engine computes.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute a model's KV cache: bytes per token, chunks, tokens in each tier, seconds of a load.

    Prints a finished configuration. Reads config.json only, and needs neither torch nor a GPU.

    Example: kvtier size Qwen/Qwen3-8B --tp 2 --memory 256GiB --disk 7TiB
    """
    if dtype not in ("auto", *ITEM_BYTES):
        raise typer.BadParameter(f"{dtype!r}: write auto, {', '.join(ITEM_BYTES)}", param_hint="--dtype")
    found = sizes_of(
        read_config(model),
        model,
        shape=(tp, dtype, block_size),
        room=(memory, disk, context),
        concurrency=concurrency,
        speeds=(memory_speed * tp, None if measure else disk_speed, prefill),
        root=root,
    )
    report.finish(found, _show, as_json=as_json, is_healthy=True)


def sizes_of(
    config: Config,
    name: str,
    *,
    shape: tuple[int, str, int] = (1, "auto", 16),
    room: tuple[int, int, int] = (2**36, 2**40, 32_768),
    concurrency: int = 1,
    speeds: tuple[int, int | None, int | None] = (20 * 10**9, 3 * 10**9, None),
    root: Path = Path("/var/cache/kvtier"),
) -> Sizes:
    """Return the sizes of a model's cache.

    Args:
        config: the model's configuration.
        name: for the report.
        shape: tensor-parallel workers, dtype of the KV cache, and tokens per block.
        room: bytes of host memory and of files, and tokens per conversation.
        concurrency: number of conversations of that length that take turns.
        speeds: bytes per second from memory and from files (None: measured in ``root``), and tokens per
            second of the engine, if known.
        root: directory of the files.
    """
    made, (memory, disk, context) = shape_of(config, *shape), room
    chunks = [_chunks(made, group) for group in made.groups]
    memory_s, disk_s, prefill = speeds
    disk_s = disk_s or _measured(root, chunks[0].chunk_bytes)
    loads = [_load(chunks, made, it, memory_s, disk_s, prefill) for it in sorted({*_LENGTHS, context})]
    conversation = next(load for load in loads if load.tokens == context)
    return Sizes(
        name,
        sum(one.bytes_per_token for one in chunks),
        chunks,
        [_room(PRIMARY, memory, chunks, context), _room("fs", disk, chunks, context)],
        memory_s,
        disk_s,
        loads,
        [
            *_needs(memory, disk, root, chunks[0].chunk_bytes),
            _conversations_need(concurrency, conversation, memory),
        ],
        _configuration(made, memory, disk, root, conversation),
    )


def _measured(root: Path, chunk_bytes: int) -> int:
    """Return the bytes that the file tier reads below ``root`` in a second."""
    try:
        from kvtier_bench.storage import fs
    except ModuleNotFoundError as error:
        raise KVTierError(f"--measure needs kvtier-bench: {install_command('kvtier-bench')}") from error
    return fs.read_bytes_s(root, chunk_bytes)


def _copies(shape: ModelShape) -> int:
    """Return the number of copies of a page in a slot. Canonical pages have only one."""
    return shape.workers // shape.copies if _is_canonical(shape) else shape.workers


def _is_canonical(shape: ModelShape) -> bool:
    return shape.copies > 1 and not shape.has_states


def _chunks(shape: ModelShape, group: LayerGroup) -> Chunks:
    block = shape.block_bytes * _copies(shape)
    same = len({one.block_tokens for one in shape.groups}) == 1 and not shape.has_states
    blocks = default_blocks_per_chunk(block, group.block_tokens) if same else 1
    tokens = blocks * group.block_tokens
    nbytes = Bytes(whole_pages(block * blocks))
    return Chunks(group.kind, group.layers, nbytes // tokens, tokens, nbytes)


def _room(tier: str, capacity: int, chunks: list[Chunks], context: int) -> Room:
    tokens = capacity // sum(one.bytes_per_token for one in chunks)
    return Room(tier, Bytes(capacity), capacity // chunks[0].chunk_bytes, tokens, tokens // context)


def _load(
    chunks: list[Chunks], shape: ModelShape, tokens: int, memory: int, disk: int, prefill: int | None
) -> LoadTime:
    nbytes = sum(
        one.chunk_bytes * -(-group.tokens_of(tokens) // one.tokens_per_chunk)
        for one, group in zip(chunks, shape.groups, strict=True)
    )
    from_memory = nbytes / memory
    computed = tokens / prefill if prefill else None
    return LoadTime(tokens, Bytes(nbytes), from_memory, nbytes / disk + from_memory, computed)


def _needs(memory: int, disk: int, root: Path, chunk_bytes: int) -> Iterator[Need]:
    yield from memory_needs(PRIMARY, memory, is_engine=True)
    yield _locked_need(memory)
    yield disk_need("fs", disk, root.absolute())
    yield chunks_need("fs", disk, chunk_bytes)


def _locked_need(wanted_bytes: int) -> Need:
    """Return the limit of locked memory that pinning the primary tier needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has = MOST_BYTES if limit == resource.RLIM_INFINITY else limit
    remedy = "ulimit -l unlimited; docker run --ulimit memlock=-1"
    return Need(PRIMARY, "cpu_bytes_to_use", wanted_bytes, has, "the limit of locked memory", remedy)


def _conversations_need(concurrency: int, each: LoadTime, memory: int) -> Need:
    """Return the primary tier's size that conversations in turns need."""
    name = f"room for {concurrency} conversations of {each.tokens} tokens"
    remedy = "raise --memory, or expect their turns to load from the files"
    return Need(PRIMARY, name, concurrency * each.loaded, memory, "cpu_bytes_to_use", remedy)


def _configuration(
    shape: ModelShape, memory: int, disk: int, root: Path, conversation: LoadTime
) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` with these sizes. It omits settings that can keep their defaults."""
    settings: dict[str, Any] = {"spec_name": "KVTierOffloadingSpec", "cpu_bytes_to_use": _unit(memory)}
    if (share := conversation.loaded / memory) > _DEFAULT_BUDGET:
        settings["promotion_budget"] = min(0.75, -(-share * 100 // 5) * 0.05)
    if _is_canonical(shape):
        settings["canonical_layout"] = True
    if conversation.computed_s and conversation.computed_s < conversation.from_disk_s:
        settings["load_gate"] = "latency"
    settings["secondary_tiers"] = [{"type": "fs", "root_dir": str(root), "max_bytes": _unit(disk)}]
    return {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def _unit(nbytes: int) -> int | str:
    units = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20}
    return next((f"{nbytes // of}{name}" for name, of in units.items() if nbytes % of == 0), nbytes)


def _load_title(found: Sizes) -> str:
    memory, disk = found.memory_bytes_s / 1e9, found.disk_bytes_s / 1e9
    return f"Seconds to load a prompt, at {memory:.3g} GB/s from memory and {disk:.3g} GB/s from the files"


def _show(found: Sizes) -> None:
    report.print_line(f"{found.model}: {found.bytes_per_token:,} bytes per token in all groups and workers")
    for title, kind, rows in (
        ("Chunks, by group of layers", Chunks, found.groups),
        ("What fits", Room, found.rooms),
        (_load_title(found), LoadTime, found.loads),
    ):
        columns = [field.name.replace("_", " ") for field in fields(kind)]
        report.table(title, columns, [[getattr(row, field.name) for field in fields(kind)] for row in rows])
    for need in found.needs:
        if not need.is_met:
            report.print_line(f"does not fit: {need}: {need.remedy}")
    report.print_line("Configuration, for --kv-transfer-config:")
    report.print_line(json.dumps(found.configuration))
