"""The promises of docs/security.md on file modes and secrets."""

from __future__ import annotations

import json
import os
import stat
import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
import torch
from pydantic import SecretStr, field_validator

from kvtier import Identity, KVCaches, PageRef, TieringConfig, open_manager, pack_key
from kvtier._memory.region import Region
from kvtier._settings.validation import hide
from kvtier.errors import ConfigError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import Batch, Knowledge, Outcome, Status
from kvtier.tiers import _registry as registry
from kvtier_bench.storage import tier as tier_bench
from kvtier_testing.dummy import DummyConfig
from kvtier_tools import doctor
from tests.unit.tiers.world import Scripted

SECRET = "correct-horse-battery"


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Only the modes that kvtier sets protect a file."""
    old = os.umask(0)
    yield
    os.umask(old)


def modes_below(root: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {"files": set(), "directories": set()}
    for path in root.rglob("*"):
        status = path.lstat()
        kind = "directories" if stat.S_ISDIR(status.st_mode) else "files"
        found[kind].add(stat.S_IMODE(status.st_mode))
    return found


def test_region_is_private(tmp_path: Path, no_umask: None) -> None:
    region = Region.open("security-test", slots=4, chunk_bytes=4096, directory=tmp_path)
    try:
        assert modes_below(tmp_path)["files"] == {0o600}
    finally:
        region.close()


class SecretConfig(DummyConfig):
    """A tier with a password."""

    password: SecretStr
    more: dict[str, list[SecretStr]] = {}
    url: str = ""
    port: int = 1

    @field_validator("url")
    @classmethod
    def _is_bare(cls, value: str) -> str:
        if "@" in value or "?" in value:
            raise ValueError(f"{value} is not bare")
        return value


class SecretTier(Scripted):
    """A tier with a password, which its client repeats in every error."""

    Config = SecretConfig  # type: ignore[assignment]
    verifies = False
    fails: ClassVar[Collection[str]] = ()

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        return [Knowledge.UNKNOWN] * len(keys)

    def _next(self, verb: str) -> Any:
        if verb in self.fails:
            config: Any = self.config
            secret = config.password.get_secret_value()
            raise RuntimeError(f"{verb}: unknown command 'AUTH', with args beginning with: '{secret}'")
        return [True, True] if verb == "contains" else None

    async def get(self, batch: Batch) -> Outcome:
        await self._scripted("get", batch)
        return Outcome.all(Status.OK, len(batch))  # not the bytes that were put: discarded


@pytest.fixture
def secret_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    load: Any = registry.load
    monkeypatch.setattr(
        registry, "load", lambda name, *field: SecretTier if name == "secret" else load(name, *field)
    )


def test_configuration_text_is_clean(secret_tier: None) -> None:
    config = TieringConfig.from_mapping(
        {"cpu_bytes_to_use": "1MiB", "secondary_tiers": [{"type": "secret", "password": SECRET}]}
    )
    for text in (repr(config), str(config), config.model_dump_json(), repr(config.model_dump())):
        assert SECRET not in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "secret", "password": SECRET, "port": "x"},
        {"type": "secret", "password": [SECRET]},
        {"type": "secret", "pasword": SECRET},
        {"type": "secret", "password": SECRET, "deadline_s": -1},
        {"type": "secret", "password": "x", "url": f"redis://me:{SECRET}@host/1"},
        {"type": "secret", "password": "x", "url": f"redis://me:a/b?{SECRET}@host/1"},
        {"type": "secret", "password": "x", "url": f"https://host/a?sig={SECRET}"},
        {"type": "secret", "password": "x", "more": {"a": [SECRET], "b": SECRET}},
        {"type": "acme", "root_dir": "/x", "password": 2 * SECRET},  # the field's validator quotes it
        {"type": "acme", "root_dir": "nowhere", "password": SECRET},  # the model's validator quotes it
        {"type": "acme", "root_dir": "/x", "logins": [{"token": {SECRET: SECRET}}]},
        {"type": "acme", "root_dir": "/x", "logins": [{"tokken": SECRET}]},
        {"type": "acme", "root_dir": "/x", "logins": {"token": SECRET}},
        {"type": "acme", "root_dir": "/x", "logins": SECRET},
    ],
)
def test_configuration_error_is_clean(secret_tier: None, acme: None, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]") as caught:
        TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [wrong]})
    assert_hidden(caught.value)


SETTINGS = {"type": "secret", "password": SECRET, "more": {"a": [SECRET]}}
VERBS = ("open", "contains", "put", "get", "touch", "discard", "usage", "reset", "aclose")


@pytest.mark.parametrize("verb", VERBS)
def test_client_secret_stays_out_of_log(
    verb: str, secret_tier: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SecretTier, "fails", (verb,))
    caplog.set_level("DEBUG")
    config = TieringConfig.from_mapping({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [SETTINGS]})
    anyio.run(use, config)
    assert f"{verb}: unknown command 'AUTH', with args beginning with: '*" in caplog.text
    assert SECRET not in caplog.text


async def use(config: TieringConfig) -> None:
    """Call each verb of a tier."""
    caches = KVCaches((torch.ones((8, 16384), dtype=torch.int8),), ((PageRef(0, 16384),),))
    keys = [pack_key(bytes([index]) * 32) for index in range(4)]
    async with open_manager(config, Identity.make("model", {}), caches) as manager:
        await manager.store(keys[:2], blocks=range(2))
        await manager.drain()
        await manager.lookup(keys)  # the tier is asked for the last two
        async with manager.acquire(keys[:2]):
            pass
        await manager.lookup(keys)
        await manager.reset()
        await manager.drain()


@pytest.mark.parametrize("verb", ["open", "put", "get", "discard", "aclose"])
def test_doctor_hides_client_secret(verb: str, secret_tier: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecretTier, "fails", ("contains" if verb == "get" else verb,))
    checks = doctor.run(None, [json.dumps(SETTINGS)], 4096)
    assert any("unknown command 'AUTH', with args beginning with: '*" in check.result for check in checks)
    assert SECRET not in repr(checks)


def test_bench_hides_client_secret(
    secret_tier: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(SecretTier, "fails", ("open",))
    file = tmp_path / "tier.json"
    file.write_text(json.dumps(SETTINGS))
    with pytest.raises(TierError, match="unknown command 'AUTH'") as caught:
        tier_bench.run(file, [4096], 1, 1)
    assert_hidden(caught.value)


@pytest.mark.parametrize("password", ["b", "kv", "uck"])
def test_short_secret_leaves_no_trace(password: str) -> None:
    text = "s3 bucket kv-cache: b is not its password"
    assert hide(text, SecretConfig(type="secret", password=SecretStr(password))) == text


def test_four_characters_are_hidden() -> None:
    config = SecretConfig(type="secret", password=SecretStr("pass"))
    assert hide("AUTH 'pass'", config) == "AUTH '**********'"


def test_failing_plug_in_is_clean(secret_tier: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(self: SecretTier, config: SecretConfig) -> None:
        raise RuntimeError(f"no {config.password.get_secret_value()}")

    monkeypatch.setattr(SecretTier, "__init__", make)
    with pytest.raises(TierError, match=r"cannot be constructed: RuntimeError: no \*") as caught:
        doctor.run(None, [json.dumps(SETTINGS)], 4096)
    assert_hidden(caught.value)


def assert_hidden(error: BaseException | None) -> None:
    assert SECRET not in "".join(traceback.format_exception(error))
    while error is not None:
        assert SECRET not in str(error) + repr(error)
        error = error.__cause__ or error.__context__
