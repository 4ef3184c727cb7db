"""``kvtier doctor`` finds what real puts and gets find, says what to do, and ends with a status."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier import _cli as cli
from kvtier._memory.memory_limits import MemoryLimit
from kvtier.errors import ConfigError, TierError
from kvtier.tiers import Status
from kvtier.tiers.fs import FsTier
from kvtier_testing.dummy import DummyTier
from kvtier_tools import doctor, limits

STEPS = ["open", "put", "get", "discard", "close"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "400")
    return lambda *arguments: CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)])


def tier(**settings: Any) -> Any:
    return json.dumps({"type": "dummy", **settings})


def checks(result: Any) -> Any:
    return [(row["step"], row["result"]) for row in json.loads(result.stdout)["checks"]]


def ill_step(result: Any) -> Any:
    (row,) = (row for row in json.loads(result.stdout)["checks"] if row["result"] != "ok")
    return row


def test_table_ends_with_verdict(run: Any) -> None:
    result = run("--tier", tier(name="shelf"))
    assert result.exit_code == 0
    assert "Checks of each tier" in result.output
    assert result.output.splitlines()[-1] == "all tiers work"
    result = run("--tier", tier(name="shelf", failure_rate=1), "--tier", tier(name="other"))
    assert result.exit_code == 1
    assert "injected: a fault that the settings asked for" in result.output
    assert result.output.splitlines()[-1] == "failing: shelf"


@pytest.mark.parametrize(
    ("settings", "step", "result", "remedy"),
    [
        ({"corruption_rate": 1}, "get", "other bytes than were put", "changes bytes"),
        ({"failure_rate": 1}, "put", "injected", "backend's own log"),
        ({"hang_rate": 1, "deadline_s": 0.02}, "put", "no answer in 0.02 s", "overloaded"),
        ({"capacity_bytes": 100}, "put", "full: the tier has no room", "more room"),
    ],
)
def test_real_calls_find_faults(run: Any, settings: Any, step: Any, result: Any, remedy: Any) -> None:
    done = run("--tier", tier(**settings), "--json")
    assert done.exit_code == 1
    row = ill_step(done)
    assert (row["tier"], row["step"]) == ("dummy", step)
    assert result in row["result"]
    assert remedy in row["remedy"]
    assert [name for name, _ in checks(done)][-2:] == ["discard", "close"], "nothing is left behind"


@pytest.mark.parametrize(
    ("error", "result", "remedy"),
    [
        (ConnectionRefusedError("port 6379"), "ConnectionRefusedError: port 6379", "the server runs"),
        (
            TierError("bucket b is not there: make it"),
            "bucket b is not there: make it",
            "see the tier's settings",
        ),
        (PermissionError("/data"), "PermissionError: /data", "permission"),
        (RuntimeError("odd"), "RuntimeError: odd", "backend's own log"),
    ],
)
def test_unopenable_tier_not_probed(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Any, result: Any, remedy: Any
) -> None:
    async def fails(self: Any, context: Any) -> None:
        raise error

    monkeypatch.setattr(DummyTier, "open", fails)
    done = run("--tier", tier(), "--json")
    assert done.exit_code == 1
    row = ill_step(done)
    assert (row["step"], row["result"]) == ("open", result)
    assert remedy in row["remedy"]
    assert len(checks(done)) == 1


def test_losing_and_hoarding_are_ill(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def nothing(self: Any, keys: Any) -> Any:
        return None

    monkeypatch.setattr(DummyTier, "discard", nothing)
    assert (
        ill_step(run("--tier", tier(), "--json"))["result"]
        == "the tier still has the chunk after it was discarded"
    )
    monkeypatch.setattr(DummyTier, "known", lambda self, keys: [1] * len(keys))  # ABSENT
    assert "the tier does not have it" in ill_step(run("--tier", tier(), "--json"))["result"]


def fs(root: Path, **settings: object) -> dict[str, object]:
    return {"type": "fs", "root_dir": str(root), "min_free_bytes": 0, **settings}


TIERS = [{"type": "dummy"}, {"type": "dummy", "complete_index": False}]
SETTINGS = {"cpu_bytes_to_use": "1GiB", "secondary_tiers": TIERS}


@pytest.mark.parametrize(
    "content",
    [
        'cpu_bytes_to_use = "1GiB"\n' + 2 * "[[secondary_tiers]]\ntype = 'dummy'\n",
        SETTINGS,
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {**SETTINGS, "spec_name": "X"}},
        {"kv_transfer_config": {"kv_connector_extra_config": SETTINGS}},
    ],
)
def test_engine_file_is_read(run: Any, tmp_path: Path, content: Any) -> None:
    is_toml = isinstance(content, str)
    file = tmp_path / ("engine.toml" if is_toml else "engine.json")
    file.write_text(content if is_toml else json.dumps(content))
    result = run(file, "--json", "--chunk-bytes", 8192)
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["checks"]
    assert [row["tier"] for row in rows] == ["cpu"] + ["dummy"] * 5 + ["dummy-2"] * 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is neither JSON nor"),
        ("[" * 100_000, "is neither JSON nor"),
        (" " * (2**24 + 1), "more than 16.0 MiB"),
        ("[]", "has no settings"),
        ('{"cpu_bytes_to_use": "1GiB"}', "no secondary tier to check"),
        ('{"cpu_bytes_to_use": "1GiB", "secondary_tiers": [{"type": "dumy"}]}', "dumy"),
        (
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_confg": SETTINGS},
            "kv_connector_extra_confg is probably misspelled",
        ),
    ],
)
def test_invalid_configuration_named(run: Any, tmp_path: Path, content: Any, message: Any) -> None:
    file = tmp_path / "engine.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    result = run(file)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no secondary tier to check"),
        (("--tier", "dummy"), "--tier 1 is neither JSON"),
        (("--tier", "[" * 100_000), "--tier 1 is neither JSON"),
        (("engine.json", "--tier", "{}"), "give one of them"),
    ],
)
def test_bare_arguments_are_refused(run: Any, arguments: Any, words: Any) -> None:
    assert words in refused(run(*arguments))


def below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_probe_leaves_no_trace(run: Any, tmp_path: Path) -> None:
    settings = {"type": "fs", "root_dir": str(tmp_path / "new" / "one"), "min_free_bytes": 0}
    result = run("--tier", json.dumps(settings))
    assert result.exit_code == 0, result.output
    assert below(tmp_path) == []


def test_probe_keeps_existing_files(run: Any, tmp_path: Path) -> None:
    (tmp_path / ".kvtier").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    settings = {"type": "fs", "root_dir": str(tmp_path), "min_free_bytes": 0}
    assert run("--tier", json.dumps(settings)).exit_code == 0
    kept = below(tmp_path)
    assert [name for name in kept if not name.startswith(".kvtier/")] == [".kvtier", "notes.txt"]
    assert ".kvtier/ledger" in kept


def test_probe_spares_other_probe(run: Any, tmp_path: Path) -> None:
    settings = {"type": "fs", "root_dir": str(tmp_path), "min_free_bytes": 0}
    home = tmp_path / doctor.IDENTITY.namespace
    home.mkdir()
    with (home / "users.e0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert run("--tier", json.dumps(settings)).exit_code == 0
        assert (home / "config.json").exists()
    assert run("--tier", json.dumps(settings)).exit_code == 0
    assert below(tmp_path) == []


# --------------------------------------------------------- what an operator must not be told is well


def written(tmp_path: Path, content: object) -> Path:
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(content))
    return file


def refused(result: Any) -> str:
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


@pytest.mark.parametrize(
    ("settings", "limit", "place"),
    [
        ({"cpu_bytes_to_use": "1EiB"}, 2**40, "/limit has 1.0 TiB"),
        ({"cpu_bytes_to_use": "1EiB", "spec_name": "KVTierOffloadingSpec"}, 2**60, "/dev/shm has "),
    ],
)
def test_large_primary_tier_is_ill(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, limit: Any, place: Any
) -> None:
    monkeypatch.setattr(limits, "memory_limits", lambda: [MemoryLimit(limit, Path("/limit"), 0)])
    result = run(written(tmp_path, {**settings, "secondary_tiers": [{"type": "dummy"}]}), "--json")
    assert result.exit_code == 1
    row = ill_step(result)
    assert (row["tier"], row["step"]) == ("cpu", "size")
    assert f"cpu_bytes_to_use is 1.0 EiB, and {place}" in row["result"]
    assert json.loads(result.stdout)["not_well"] == ["cpu"]


def test_large_root_is_ill(run: Any, tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    result = run("--tier", json.dumps(fs(root, max_bytes="1EiB")), "--json")
    assert result.exit_code == 1
    row = ill_step(result)
    assert (row["tier"], row["step"]) == ("fs", "size")
    assert f"max_bytes is 1.0 EiB, and {tmp_path} has " in row["result"]
    assert below(tmp_path) == []


def test_a_root_smaller_than_its_chunks_is_named(run: Any, tmp_path: Path) -> None:
    result = run("--tier", json.dumps(fs(tmp_path, max_bytes="3MiB")), "--json")
    row = ill_step(result)
    assert row["result"] == "room for 4 chunks is 4.0 MiB, and max_bytes has 3.0 MiB"
    assert row["remedy"] == "raise max_bytes"


def test_linked_roots_are_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    tiers = [fs(tmp_path / "real"), fs(tmp_path / "link" / "below")]
    message = refused(run(written(tmp_path, {"cpu_bytes_to_use": 1, "secondary_tiers": tiers})))
    assert "one inside the other" in message
    assert below(tmp_path / "real") == []


def test_unreadable_root_is_reported(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def refusing(function: Any) -> Any:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and str(path).startswith(str(tmp_path / "locked")):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *rest, **more)

        return call

    for name in ("stat", "mkdir", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    tiers = ["--tier", json.dumps(fs(tmp_path / "locked" / "root")), "--tier", tier()]
    result = run(*tiers, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["not_well"] == ["fs"]
    assert ill_step(result)["remedy"] == "give this user the permission"
    assert [row for row in checks(result) if row[1] == "ok"] == [(step, "ok") for step in STEPS]
    assert "failing: fs" in run(*tiers).output


@pytest.mark.parametrize("word", sorted(FsTier.reasons))
def test_only_full_disk_suggests_room(word: Any) -> None:
    is_room = word in {"max_bytes", "min_free", "enospc", "edquot"}
    remedy = doctor.REMEDIES_OF_REASONS.get(word, doctor.REMEDIES[Status.REFUSED])
    assert ("more room" in remedy) == is_room


def test_background_failure_is_reported(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def put(self: Any, batch: Any) -> Any:
        try:
            raise OverflowError("too far")
        except OverflowError:
            logging.getLogger("kvtier.tiers.dummy").exception("the shelf could not be looked through")
        return await real(self, batch)

    real = DummyTier.put
    monkeypatch.setattr(DummyTier, "put", put)
    result = run("--tier", tier(), "--tier", tier(name="other", failure_rate=1), "--json")
    assert result.exit_code == 1
    rows = [row for row in json.loads(result.stdout)["checks"] if row["result"] != "ok"]
    assert [(row["tier"], row["step"]) for row in rows] == [("dummy", "background"), ("other", "put")]
    assert rows[0]["result"] == "the shelf could not be looked through: OverflowError: too far"
    assert "Traceback" not in result.output
