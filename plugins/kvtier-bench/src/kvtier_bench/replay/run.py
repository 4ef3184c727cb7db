"""Replays a trace through a running server, or through servers that it starts one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.errors import KVTierError
from kvtier_bench.engine.compared import (
    BLOCK_TOKENS,
    FS,
    MODELS,
    PLAIN,
    Settings,
    block_bytes,
    make_model,
    over_files,
    say,
)
from kvtier_bench.engine.server import Server, add_tokenizer, free_port
from kvtier_bench.machine import Machine, open_folder
from kvtier_bench.replay.records import Record
from kvtier_bench.replay.send import replay, too_long
from kvtier_bench.replay.workload import Scale, TraceRequest, Workload
from kvtier_bench.simulate.trace import TimedLine, read_lines
from kvtier_tools.doctor import read_settings

__all__ = ["Scale", "run"]

DEVICE_SHARE, PRIMARY_SHARE = 0.1, 0.3  # fraction of all different tokens


def run(
    trace: Path,
    scale: Scale,
    requests: int,
    url: str | None,
    configs: Sequence[str],
    root: Path | None,
    model: str,
) -> list[Record]:
    """Replay.

    Args:
        requests: number of requests from the trace.
        url: address of a running server; None to start one for each of ``configs``.
        configs: files with settings, or ``none``; by default one server without a connector and one with
            kvtier over files.
        root: directory for the files of tiers.
        model: size of the model of the started servers.

    Raises:
        KVTierError: the trace or a configuration is invalid, or a server does not answer.
    """
    if url is not None and configs:
        raise KVTierError("both --url and --config are given: a running server has its configuration")
    if not trace.is_file():
        raise KVTierError(f"{trace}: no such file; name a trace in Mooncake's format")
    lines = list(read_lines(trace, TimedLine))
    if not lines:
        raise KVTierError(f"{trace} has no requests")
    chosen = scale.requests(lines, requests)
    work = scale.describe(trace.name, chosen, len(lines))
    machine = Machine.here(root)
    if url is not None:
        records = asyncio.run(replay(url, url, scale, chosen, work.longest))
    else:
        with open_folder(root) as folder:
            settings = _settings(configs, folder, work, model)
            records = _replay_each(settings, folder, model, work, scale, chosen)
    return [*records, work, machine.again()]


def _settings(configs: Sequence[str], folder: Path, work: Workload, model: str) -> dict[str, Settings | None]:
    """Return the settings of each server's connector, by the server's name; None for no connector."""
    if not configs:
        primary_bytes = int(PRIMARY_SHARE * _blocks(work) * block_bytes(model))
        return {PLAIN: None, FS: over_files(primary_bytes, folder / "files")}
    settings: dict[str, Settings | None] = {}
    for config in configs:
        name = Path(config).stem
        name = f"{name} {len(settings) + 1}" if name in settings else name
        spec = {"spec_name": "KVTierOffloadingSpec"}
        settings[name] = None if config == PLAIN else {**spec, **read_settings(Path(config))}
    return settings


def _replay_each(
    settings: Mapping[str, Settings | None],
    folder: Path,
    model: str,
    work: Workload,
    scale: Scale,
    requests: Sequence[TraceRequest],
) -> list[Record]:
    bears = MODELS[model]["max_position_embeddings"]
    if work.longest > bears:
        raise too_long(work.longest, bears, scale)
    directory = make_model(folder, model)
    add_tokenizer(directory)
    longest = max(4 * BLOCK_TOKENS, work.longest)
    arguments: dict[str, Any] = {
        "served_model_name": model,
        "max_model_len": longest,
        "num_gpu_blocks_override": max(longest * 5 // 4 // BLOCK_TOKENS, int(DEVICE_SHARE * _blocks(work))),
    }
    records: list[Record] = []
    for name, extra_config in settings.items():
        say(f"starting a server: {name}")
        log = folder / "server.log"
        with Server(directory, extra_config, log, free_port(), **arguments) as server:
            records += asyncio.run(replay(name, server.url, scale, requests, work.longest))
            server.require_alive()
    return records


def _blocks(work: Workload) -> int:
    """Return the approximate number of blocks that the distinct tokens of all prompts fill."""
    return work.different_chunks * work.tokens_per_chunk // BLOCK_TOKENS
