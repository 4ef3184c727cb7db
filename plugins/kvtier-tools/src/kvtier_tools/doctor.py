"""``kvtier doctor``: checks that each tier returns a chunk that was put.

The chunk has its own key and identity, so no engine ever finds it. Files created for it are removed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from kvtier import _build as build
from kvtier import _reasons as reasons
from kvtier._cli import JsonFlag, printable
from kvtier._config import TieringConfig
from kvtier._core.shared import PRIMARY
from kvtier._execution.executor import NamedTier
from kvtier._identity import Identity
from kvtier._log import GuardedLogger
from kvtier._memory._locked_file import KeptFile, kept_files
from kvtier._memory.region import SHARED_MEMORY, HeapMemory
from kvtier._settings.validation import did_you_mean
from kvtier.errors import ConfigError, TierError
from kvtier.keys import pack_key
from kvtier.tiers._base import Batch, Knowledge, Outcome, SecondaryTier, Status, TierConfig, TierContext
from kvtier.tiers._faults import require_fault, words_of
from kvtier.tiers._seal import seal
from kvtier.tiers.fs import FsConfig
from kvtier_tools import report
from kvtier_tools.fs import StopFlag, ledger, tree_remove
from kvtier_tools.limits import Need, chunks_need, disk_need, memory_needs
from kvtier_tools.report import Tick
from kvtier_tools.root.contents import RootView, remove_cache
from kvtier_tools.root.memory import summary

OPEN_AT_MOST_S = 60.0
_STEPS = 5  # steps of each check of a tier
_PAGE_BYTES = 4096
_MAX_FILE_BYTES = 16 * 2**20
_EXTRA_CONFIG = "kv_connector_extra_config"
_NO_TIERS = "there is no secondary tier to check: name a file with secondary_tiers, or give --tier"

IDENTITY = Identity.make("kvtier-doctor", {"purpose": "a probe; may be deleted"})
_PERMIT = "give this user the permission"
_SEE_TIER = "see the tier's settings, and the backend's own log"
REMEDIES: Mapping[Status, str] = {
    Status.ABSENT: "check for other programs that delete there, and that the tier has room for a chunk",
    Status.CORRUPT: "do not use it: the medium or the network changes bytes",
    Status.REFUSED: _SEE_TIER,
    Status.FAILED: _SEE_TIER,
}
_MORE_ROOM = "give the tier more room, or wait until it has some: engines run without it meanwhile"
REMEDIES_OF_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("max_bytes", "min_free", "full", "enospc", "edquot"), _MORE_ROOM),
    **dict.fromkeys(("eacces", "eperm"), _PERMIT),
    "counting": "wait until the root is counted: seconds to minutes",
    "erofs": "mount the file system writable",
}


@dataclass(frozen=True)
class Check:
    """The result of one step of a tier's check."""

    tier: str
    step: str
    result: str  # "ok", or the problem
    milliseconds: float = 0.0
    remedy: str = ""

    @property
    def is_ok(self) -> bool:
        return self.result == "ok"


@dataclass(frozen=True)
class Diagnosis:
    """The results for all tiers, as in the JSON document."""

    not_well: list[str]
    checks: list[Check]
    kept: list[KeptFile]  # host memory of engines that have ended


class _CheckError(Exception):
    """A step failed: the problem and the remedy."""


def _whole_pages(nbytes: int) -> int:
    if nbytes % _PAGE_BYTES:
        raise typer.BadParameter(f"{nbytes} is not a multiple of {_PAGE_BYTES}")
    return nbytes


def command(
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
        typer.Option(metavar="JSON", help="Settings of one tier, instead of a file; repeatable."),
    ] = None,
    chunk_bytes: Annotated[
        int,
        typer.Option(
            min=_PAGE_BYTES, max=2**30, callback=_whole_pages, help="Length of the chunk, a multiple of 4096."
        ),
    ] = 1_048_576,
    as_json: JsonFlag = False,
) -> None:
    """Check a configuration: put a chunk into each tier, get it back and discard it.

    Exit status 1 if a tier fails.

    Example: kvtier doctor --tier '{"type": "fs", "root_dir": "/var/cache/kvtier"}'
    """
    checks = run(config, tier or [], chunk_bytes)
    failed = list(dict.fromkeys(check.tier for check in checks if not check.is_ok))
    found = Diagnosis(failed, checks, kept_files(SHARED_MEMORY))
    report.finish(found, _show, as_json=as_json, is_healthy=not failed)


def _show(found: Diagnosis) -> None:
    rows = [(c.tier, c.step, c.result, f"{c.milliseconds:.3g}", c.remedy) for c in found.checks]
    report.table("Checks of each tier", [field.name for field in fields(Check)], rows)
    if found.kept:
        report.print_line(f"{summary(found.kept)}: see kvtier ls --memory")
    report.print_line(f"failing: {', '.join(found.not_well)}" if found.not_well else "all tiers work")


def run(config: Path | None, tiers: Sequence[str], chunk_bytes: int) -> list[Check]:
    """Check each tier of a configuration file or of ``tiers``, in JSON. Raises as ``TieringConfig``."""
    settings, is_engine = _configuration(config, tiers, chunk_bytes)
    named = build.make_tiers(settings)
    needs = _needs(settings, named, chunk_bytes, is_engine=is_engine)
    by_tier = {tier: list(found) for tier, found in groupby(needs, key=lambda need: need.tier)}
    sizes = [_check_of(found) for tier, found in by_tier.items() if not (tiers and tier == PRIMARY)]
    return sizes + _probe(named, chunk_bytes)


def _configuration(config: Path | None, tiers: Sequence[str], chunk_bytes: int) -> tuple[TieringConfig, bool]:
    """Return the settings, and whether they are an engine's."""
    if config is not None and tiers:
        raise ConfigError(f"both {config} and --tier are given: give one of them")
    if config is not None:
        given = read_settings(config)
    else:
        parsed = [_parsed(json.loads, text, f"--tier {number}") for number, text in enumerate(tiers, start=1)]
        given = {"cpu_bytes_to_use": chunk_bytes, "secondary_tiers": parsed}
    settings = TieringConfig.from_extra_config(given)
    if not settings.secondary_tiers:
        raise ConfigError(_NO_TIERS)
    if problem := settings.shared_directory(os.path.realpath):  # unlike engines, this may ask a file system
        raise ConfigError(f"secondary_tiers: {problem}: give each its own directory")
    return settings, "spec_name" in given


def read_settings(path: Path) -> dict[str, Any]:
    """Return kvtier's settings in a file, unwrapped from an engine's. ConfigError if it has none."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is not a configuration: it has more than {report.Bytes(_MAX_FILE_BYTES)}")
    found = _parsed(lambda text: (tomllib if path.suffix == ".toml" else json).loads(text), data, str(path))
    for outer in ("kv_transfer_config", "kv-transfer-config", _EXTRA_CONFIG):
        if isinstance(found, dict) and outer in found:
            found = found[outer]
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has no settings: it must be a mapping with the key secondary_tiers")
    if "kv_connector" in found:
        others = [key for key in found if key != "kv_connector" and did_you_mean(key, [_EXTRA_CONFIG])]
        hint = f"; {others[0]} is probably misspelled" if others else ""
        raise ConfigError(f"{path} has kv_connector, but no {_EXTRA_CONFIG}{hint}")
    return found


def _parsed(parse: Callable[[str], Any], text: str | bytes, where: str) -> Any:
    try:
        return parse(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError included
        raise ConfigError(f"{where} is neither JSON nor, in a file named *.toml, TOML: {error}") from None


def _needs(
    settings: TieringConfig, named: Sequence[NamedTier], chunk_bytes: int, *, is_engine: bool
) -> Iterator[Need]:
    """Yield what the settings need of this machine, tier by tier."""
    yield from memory_needs(PRIMARY, settings.cpu_bytes_to_use, is_engine=is_engine)
    for one in named:
        config = one.tier.config
        if isinstance(config, FsConfig) and config.max_bytes is not None:
            with suppress(OSError):  # the tier's open reports it
                yield disk_need(one.name, config.max_bytes, config.root_dir)
                yield chunks_need(one.name, config.max_bytes, chunk_bytes)


def _check_of(needs: Sequence[Need]) -> Check:
    """Return the check of a tier's needs. The first unmet need makes it fail."""
    short = next((need for need in needs if not need.is_met), None)
    if short is None:
        return Check(needs[0].tier, "size", "ok")
    return Check(short.tier, "size", str(short), remedy=short.remedy)


def _probe(named: Sequence[NamedTier], chunk_bytes: int) -> list[Check]:
    """Check each tier, and remove the files that this created in roots of file tiers."""
    configs = [one.tier.config for one in named]
    roots = [config.root_dir for config in configs if isinstance(config, FsConfig)]
    folders = [folder for root in roots for folder in (root / ledger.FOLDER, root, *root.parents)]
    missing = [folder for folder in folders if _is_missing(folder)]
    try:
        return anyio.run(_check_all, named, chunk_bytes)
    finally:
        for root in roots:
            with suppress(OSError, TierError), RootView(root) as found:
                remove_cache(found, IDENTITY.namespace)
                if root / ledger.FOLDER in missing and not ledger.writers(found.fd):
                    tree_remove(found.fd, ledger.FOLDER, StopFlag())
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _is_missing(folder: Path) -> bool:
    try:
        return not folder.exists()
    except OSError:  # the tier's open reports it
        return False


async def _check_all(named: Sequence[NamedTier], chunk_bytes: int) -> list[Check]:
    checks = []
    with report.progress("steps", len(named) * _STEPS) as tick:
        for one in named:
            with _background_errors() as errors:
                done = await _TierCheck(one, chunk_bytes, tick).run()
            checks += done
            if all(check.is_ok for check in done):
                remedy = "engines run into this too; their log has the details"
                checks += [Check(one.name, "background", text, remedy=remedy) for text in errors]
    return checks


class _ErrorCollector(logging.Handler):
    """Collects logged errors, each once and without traceback, and prints warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno < logging.ERROR:
            typer.echo(f"kvtier: {printable(text)}", err=True)
            return
        cause = record.exc_info[1] if record.exc_info else None
        text = text if cause is None else f"{text}: {type(cause).__name__}: {cause}"
        if text not in self.errors:
            self.errors.append(text)


@contextmanager
def _background_errors() -> Iterator[list[str]]:
    """Collect logged errors: an error in a tier's background work does not fail a call."""
    collector = _ErrorCollector()
    loggers = [GuardedLogger(name).logger for name in ("kvtier", "asyncio")]
    for logger in loggers:
        logger.addHandler(collector)
    try:
        yield collector.errors
    finally:
        for logger in loggers:
            logger.removeHandler(collector)


class _TierCheck:
    """Checks one tier: opens it, puts, gets and discards a chunk, closes it."""

    def __init__(self, named: NamedTier, chunk_bytes: int, tick: Tick) -> None:
        self._tick = tick
        self._name = named.name
        self._tier: SecondaryTier[Any] = named.tier
        self._memory = HeapMemory(2, chunk_bytes)
        self._key = pack_key(os.urandom(32))
        self._checks: list[Check] = []

    async def run(self) -> list[Check]:
        """Run the steps; skip those that depend on a failed one."""
        deadline_s = self._tier.config.deadline_s
        if await self._step("open", self._open, max(OPEN_AT_MOST_S, deadline_s)):
            if await self._step("put", self._put, deadline_s):
                await self._step("get", self._get, deadline_s)
            await self._step("discard", self._discard, deadline_s)
            await self._step("close", self._tier.aclose, max(OPEN_AT_MOST_S, deadline_s))
        return self._checks

    async def _step(self, name: str, act: Callable[[], Awaitable[None]], limit_s: float) -> bool:
        begun_s = time.perf_counter()
        result, remedy = "ok", ""
        try:
            async with asyncio.timeout(limit_s) as limit:
                await act()
            if limit.expired():
                raise TimeoutError
        except BaseException as error:
            require_fault(error)
            result, remedy = _described(error, limit_s, self._tier.config)
        milliseconds = (time.perf_counter() - begun_s) * 1e3
        self._checks.append(Check(self._name, name, result, milliseconds, remedy))
        self._tick(1)
        return result == "ok"

    async def _open(self) -> None:
        await self._tier.open(TierContext(self._name, IDENTITY, self._memory.chunk_bytes))

    async def _put(self) -> None:
        self._memory.view(0)[:] = os.urandom(self._memory.chunk_bytes)
        batch = Batch([self._key], [0], self._memory)
        batch.trailers[0] = seal(self._key, batch.views[0], IDENTITY.short_digest)
        self._require_ok(await self._tier.put(batch))

    async def _get(self) -> None:
        if not await self._has_chunk():
            raise _CheckError("the chunk was put, but the tier does not have it", REMEDIES[Status.ABSENT])
        self._require_ok(await self._tier.get(Batch([self._key], [1], self._memory)))
        if self._memory.view(0) != self._memory.view(1):
            raise _CheckError("the tier returned other bytes than were put", REMEDIES[Status.CORRUPT])

    async def _discard(self) -> None:
        await self._tier.discard([self._key])
        if await self._has_chunk():
            remedy = "allow the tier to delete; without that it cannot remove damaged chunks"
            raise _CheckError("the tier still has the chunk after it was discarded", remedy)

    async def _has_chunk(self) -> bool:
        (known,) = self._tier.known([self._key])
        if known == Knowledge.UNKNOWN:
            (answer,) = await self._tier.contains([self._key])
            return bool(answer)
        return known == Knowledge.PRESENT

    def _require_ok(self, outcome: Outcome) -> None:
        (status,) = outcome.statuses
        if status == Status.OK:
            return
        word = next(iter(outcome.reasons), status.name.lower())
        meaning = {**reasons.TRANSFER, **self._tier.reasons}.get(word, "the log has the details")
        remedy = REMEDIES_OF_REASONS.get(word, REMEDIES[Status(status)])
        raise _CheckError(f"{word}: {meaning}", remedy)


def _described(error: BaseException, limit_s: float, settings: TierConfig) -> tuple[str, str]:
    """Return the problem and the remedy."""
    if isinstance(error, _CheckError):
        problem, remedy = error.args
        return problem, remedy
    if isinstance(error, TimeoutError):
        return f"no answer in {limit_s:g} s", "check that it is up and not overloaded; else raise deadline_s"
    return words_of(error, settings), _remedy(error)


def _remedy(error: BaseException) -> str:
    """Return the remedy for an error, by its kind or its cause's kind."""
    if isinstance(error, ConnectionError):
        return "check that the server runs and can be reached from this machine"
    if isinstance(error, PermissionError):
        return _PERMIT
    if isinstance(error, TierError) and error.__cause__ is not None:
        return _remedy(error.__cause__)
    return _SEE_TIER
