"""``kvtier doctor``: puts a chunk into each tier, gets it back and discards it, and says what is wrong.

That a server listens, or a directory is there, shows little. What counts is whether a chunk comes back.
The chunk has a key and an identity of its own, so no engine ever finds it. What a tier of files has made
for it is removed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import anyio
import typer

from kvtier import build, native, reasons
from kvtier.cli import report
from kvtier.config import TieringConfig
from kvtier.core.tiering import PRIMARY
from kvtier.errors import ConfigError, TierError
from kvtier.executor import NamedTier
from kvtier.identity import Identity
from kvtier.keys import pack_key
from kvtier.memory.heap import HeapMemory
from kvtier.tiers.base import Batch, Knowledge, Outcome, SecondaryTier, Status, TierConfig, TierContext
from kvtier.tiers.faults import require_fault, words_of
from kvtier.tiers.fs import FsConfig
from kvtier.tiers.fs.files import make_files
from kvtier.tiers.fs.files.call import StopFlag
from kvtier.tiers.fs.maintenance.sweep import remove_cache
from kvtier.tiers.fs.quota import ledger
from kvtier.tiers.fs.root import Root, Tick
from kvtier.tiers.seal import seal
from kvtier.validation import did_you_mean

OPEN_AT_MOST_S = 60.0
_STEPS = 5  # of each tier
_LOGGERS = ("kvtier", "asyncio")
_INNERMOST = "kv_connector_extra_config"
_NO_TIERS = "there is no secondary tier to check: name a file that has some, or give --tier"
_SEE_LOG = "this goes on in engines, and is told in their log"

IDENTITY = Identity.make("kvtier-doctor", {"purpose": "a probe; may be deleted"})
_NO_ROOM = "give the tier more room, or wait until it has some: an engine goes on without it meanwhile"
_REMEDIES: Mapping[Status, str] = {
    Status.ABSENT: "it was put and is not there: see what else deletes there, and that a chunk fits in",
    Status.CORRUPT: "do not use it: the medium, or something in between, changes bytes",
    Status.REFUSED: _NO_ROOM,
    Status.FAILED: "see the tier's settings, and the backend's own log",
}


@dataclass(frozen=True)
class Check:
    """What became of a chunk in each tier.

    Attributes:
        tier: the tier's name.
        step: what was done.
        result: ``ok``, or what went wrong.
        milliseconds: how long it took.
        remedy: what to do about it.
    """

    tier: str
    step: str
    result: str
    milliseconds: float
    remedy: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it went well."""
        return self.result == "ok"


class _Ill(Exception):
    """A step has not done what it should have.

    Args:
        what: what went wrong.
        remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


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
        typer.Option(metavar="JSON", help="Settings of one tier, in place of a file; may be given again."),
    ] = None,
    chunk_bytes: Annotated[
        int, typer.Option(min=4096, max=2**30, help="Length of the chunk, a multiple of 4096.")
    ] = 1_048_576,
    as_json: report.JsonFlag = False,
) -> None:
    """Put a chunk into each tier, get it back, discard it, and say what is wrong. Status 1 if anything is."""
    checks = run(config, tier or [], chunk_bytes)
    ill = list(dict.fromkeys(check.tier for check in checks if not check.is_ok))
    if as_json:
        found = [asdict(check) for check in checks]
        typer.echo(json.dumps({"not_well": ill, "checks": found, "file_work": file_work()}, indent=2))
    else:
        rows = [(c.tier, c.step, c.result, f"{c.milliseconds:.3g}", c.remedy) for c in checks]
        columns = [field.name for field in fields(Check)]
        report.table("What became of a chunk in each tier", columns, rows)
        typer.echo(f"file work: {file_work()}")
        typer.echo(f"not well: {', '.join(ill)}" if ill else "all tiers are well")
    raise typer.Exit(1 if ill else 0)


def file_work() -> str:
    """Return whether the native helper or Python reads and writes chunks' files, and why."""
    if native.library is not None:
        return f"native ({native.library._name})"
    return f"Python, slower ({native.missing_because})"


def run(config: Path | None, tiers: Sequence[str], chunk_bytes: int) -> list[Check]:
    """Check each tier of a configuration, or those that are given.

    Args:
        config: a JSON or TOML file: kvtier's settings, or vLLM's ``kv_transfer_config`` around them.
        tiers: settings of one tier each, as JSON.
        chunk_bytes: length of the chunk.

    Raises:
        ConfigError: what is given is no configuration; the message names all that is wrong with it.
        TierError: a tier's plug-in cannot be used.
    """
    settings = _checked(config, tiers, chunk_bytes)
    memory = [] if tiers else [_memory(settings.cpu_bytes_to_use)]
    return memory + _probe(build.make_tiers(settings), chunk_bytes)


def _checked(config: Path | None, tiers: Sequence[str], chunk_bytes: int) -> TieringConfig:
    if config is None and not tiers:
        raise ConfigError(_NO_TIERS)
    given = _settings(config) if config is not None else {}
    if tiers:
        parsed = [_json(text, f"--tier {number}") for number, text in enumerate(tiers, start=1)]
        given = {"cpu_bytes_to_use": chunk_bytes, "secondary_tiers": parsed}
    settings = TieringConfig.from_extra_config(given)
    if not settings.secondary_tiers:
        raise ConfigError(_NO_TIERS)
    if problem := settings.shared_directory(os.path.realpath):  # here it may ask a file system
        raise ConfigError(f"secondary_tiers: {problem}: give each a directory of its own")
    return settings


def _memory(wanted_bytes: int) -> Check:
    """Check that the primary tier can be as large as the settings say, on this machine."""
    has_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted_bytes <= has_bytes:
        return Check(PRIMARY, "memory", "ok", 0.0)
    wanted, has = report.Bytes(wanted_bytes), report.Bytes(has_bytes)
    result = f"cpu_bytes_to_use is {wanted}, and this machine has {has} of memory"
    return Check(
        PRIMARY, "memory", result, 0.0, "set cpu_bytes_to_use to less, or run this on the engine's machine"
    )


def _probe(named: Sequence[NamedTier], chunk_bytes: int) -> list[Check]:
    """Examine each tier, and remove what that has left in roots of files."""
    roots = [root for one in named for root in _roots_of(one)]
    folders = [folder for root in roots for folder in (root / ledger.FOLDER, root, *root.parents)]
    missing = [folder for folder in folders if _is_missing(folder)]
    try:
        return anyio.run(_check_all, named, chunk_bytes)
    finally:
        for root in roots:
            with suppress(OSError, TierError), Root(root) as found:
                remove_cache(found, IDENTITY.namespace, make_files())
                if root / ledger.FOLDER in missing and not ledger.has_writers(found.fd):
                    make_files().tree_remove(found.fd, ledger.FOLDER, StopFlag())
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _is_missing(folder: Path) -> bool:
    try:
        return not folder.exists()
    except OSError:  # it cannot be looked at: what opens it says so
        return False


def _roots_of(named: NamedTier) -> tuple[Path, ...]:
    """Return the directories that a tier of files would leave the probe's place in."""
    config = named.tier.config
    return (config.root_dir,) if isinstance(config, FsConfig) else ()


def _settings(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # bytes that are no text, too
        raise ConfigError(f"{path} is neither JSON nor, named *.toml, TOML: {error}") from None
    for outer in ("kv_transfer_config", "kv-transfer-config", _INNERMOST):
        if isinstance(found, dict) and outer in found:
            found = found[outer]
    if isinstance(found, dict) and "kv_connector" in found:
        others = [key for key in found if key != "kv_connector" and did_you_mean(key, [_INNERMOST])]
        hint = f"; {others[0]} is probably misspelled" if others else ""
        raise ConfigError(f"{path} has kv_connector, but no {_INNERMOST}{hint}")
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has no settings: a mapping with the key secondary_tiers is needed")
    return found


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None


async def _check_all(named: Sequence[NamedTier], chunk_bytes: int) -> list[Check]:
    checks = []
    with report.progress("steps", len(named) * _STEPS) as tick:
        for one in named:
            with _Background() as background:
                done = await Examination(one, chunk_bytes, tick).run()
            checks += done
            if all(check.is_ok for check in done):
                checks += [Check(one.name, "background", said, 0.0, _SEE_LOG) for said in background.errors]
    return checks


class _Background(logging.Handler):
    """Gathers the errors that are logged meanwhile: what fails beside the calls fails none of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[str] = []

    def __enter__(self) -> _Background:
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an error, without its traceback, and pass a warning on."""
        said = record.getMessage()
        if record.levelno < logging.ERROR:
            typer.echo(f"kvtier: {said}", err=True)
            return
        cause = record.exc_info[1] if record.exc_info else None
        text = said if cause is None else f"{said}: {type(cause).__name__}: {cause}"
        if text not in self.errors:
            self.errors.append(text)


class Examination:
    """One tier and the probe that it is given.

    Args:
        named: the tier, not opened yet.
        chunk_bytes: length of the probe.
        tick: is told of each step that has ended.
    """

    def __init__(self, named: NamedTier, chunk_bytes: int, tick: Tick) -> None:
        self._tick = tick
        self._name = named.name
        self._tier: SecondaryTier[Any] = named.tier
        self._memory = HeapMemory(2, chunk_bytes)
        self._key = pack_key(os.urandom(32))
        self._checks: list[Check] = []

    async def run(self) -> list[Check]:
        """Put the probe, get it, discard it. What follows a step that fails is left out."""
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
        if not await self._is_there():
            raise _Ill("it says that it does not have the chunk", _REMEDIES[Status.ABSENT])
        self._require_ok(await self._tier.get(Batch([self._key], [1], self._memory)))
        if self._memory.view(0) != self._memory.view(1):
            raise _Ill("other bytes came back than were put", _REMEDIES[Status.CORRUPT])

    async def _discard(self) -> None:
        await self._tier.discard([self._key])
        if await self._is_there():
            remedy = "see that it may delete there: what is damaged could not be removed"
            raise _Ill("the chunk is there still", remedy)

    async def _is_there(self) -> bool:
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
        raise _Ill(f"{word}: {meaning}", _REMEDIES[Status(status)])


def _described(error: BaseException, limit_s: float, settings: TierConfig) -> tuple[str, str]:
    """Say what went wrong, and what to do about it."""
    if isinstance(error, _Ill):
        return str(error), error.remedy
    if isinstance(error, TimeoutError):
        return f"no answer in {limit_s:g} s", "see that it is up and not overloaded; else raise deadline_s"
    return words_of(error, settings), _remedy(error)


def _remedy(error: BaseException | None) -> str:
    """Return what to do about an error, by its kind or by that of its cause."""
    if isinstance(error, ConnectionError):
        return "see that the server runs, and can be reached from this machine"
    if isinstance(error, PermissionError):
        return "give this user the permission"
    if isinstance(error, TierError) and error.__cause__ is not None:
        return _remedy(error.__cause__)
    return "see the tier's settings, and the backend's own log"
