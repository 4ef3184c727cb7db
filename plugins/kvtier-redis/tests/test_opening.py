"""Opening: errors are one line, which names the setting and shows no secret."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
import redis_servers
from redis_servers import README, Server, TlsServer, opened

from kvtier._settings import validation
from kvtier.errors import ConfigError, TierError
from kvtier.tiers import Status, TierContext
from kvtier.tiers import _registry as registry
from kvtier_redis import RedisConfig, RedisTier
from kvtier_redis._client import ClientFactory, PasswordError
from kvtier_redis._reasons import REASONS
from kvtier_testing.tiers import TierRig
from kvtier_tools.settings_tables import own_table

pytestmark = pytest.mark.anyio


async def check_put(it: TierRig) -> None:
    assert set(await it.put(range(2))) == {Status.OK}


async def problem(*servers: Server, **settings: Any) -> str:
    """Return the error of a tier that cannot be opened."""
    with anyio.fail_after(60), pytest.raises(TierError) as caught:
        async with opened(*servers, **settings):
            pass
    text = str(caught.value)
    assert text.startswith("tier cache: ")
    assert "\n" not in text
    return text


async def test_unreachable_addresses(own_server: Server) -> None:
    with own_server.stopped():
        text = await problem(own_server, connect_timeout_s=0.5, deadline_s=0.5)
        assert "cannot be reached (Timeout" in text
    own_server.kill()
    text = await problem(own_server)
    assert f"127.0.0.1:{own_server.port} cannot be reached" in text
    assert "addresses" in text
    assert "cannot be reached" in await problem(addresses=["no-such-host.invalid:6379"])


async def test_wrong_and_missing_passwords(own_server: Server) -> None:
    own_server.add_user("kv", "right")
    own_server.add_user("few", "right", "~* +client +info +role")
    own_server.add_user("default", "default")
    text = await problem(own_server, username="kv", password="hunter2")
    assert "authentication failed" in text
    assert "set username and password" in text
    assert "hunter2" not in text
    assert "authentication failed" in await problem(own_server)
    text = await problem(own_server, username="few", password="right")
    assert "ACL user 'few' lacks a permission" in text
    assert "'get'" in text
    async with opened(own_server, username="kv", password="right") as it:
        await check_put(it)


async def test_password_file_stays_hidden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "password"
    login: dict[str, Any] = {"username": "kv", "password_file": file}
    with Server(tmp_path / "one") as server:
        server.add_user("kv", "hunter2")
        text = await problem(server, **login)
        assert f"password_file = '{file}' cannot be read (No such file or directory)" in text
        for content, words in ((b"\xffhunter2", "is not UTF-8 text"), (b"\nhunter2\n", "has no password on")):
            file.write_bytes(content)
            assert f"password_file = '{file}' {words}" in await problem(server, **login)
        file.write_text("hunter2\n")
        async with opened(server, **login) as it:
            await check_put(it)
            server.kill()
            # Such a server repeats the arguments of unknown commands, including the password.
            with Server(tmp_path / "other", "--rename-command AUTH ''", port=server.port) as other:
                assert set(await it.put(range(2))) == {Status.FAILED}
                text = await problem(other, **login)
    assert "has no AUTH command (unknown command 'AUTH'" in text
    assert "unknown command 'AUTH'" in caplog.text
    assert "hunter2" not in text + caplog.text


async def test_password_command_is_run(tmp_path: Path, own_server: Server) -> None:
    own_server.add_user("kv", "hunter2")
    for command, words in (
        (["sh", "-c", "echo hunter2; exit 3"], "password_command = 'sh' failed (exit status 3)"),
        (["true"], "password_command = 'true' has no password on its first line"),
        ([str(tmp_path / "none")], "cannot be run (No such file or directory)"),
    ):
        text = await problem(own_server, username="kv", password_command=command)
        assert words in text
        assert "hunter2" not in text
    async with opened(own_server, username="kv", password_command=["echo", "hunter2"]) as it:
        await check_put(it)


@pytest.mark.parametrize("refused", [("client",), ("client", "info", "role", "touch")], ids="+".join)
async def test_refused_commands(
    tmp_path: Path, refused: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with Server(tmp_path / "acl") as denied:
        denied.add_user("kv", "right", f"~* {redis_servers.ACL} " + " ".join(f"-{name}" for name in refused))
        await check_degraded(denied, refused, caplog, username="kv", password="right")
    renamed = " ".join(f"--rename-command {name.upper()} ''" for name in refused)
    with Server(tmp_path / "renamed", renamed) as server:
        await check_degraded(server, refused, caplog)


async def check_degraded(
    server: Server, refused: tuple[str, ...], caplog: pytest.LogCaptureFixture, **login: Any
) -> None:
    """Check that the tier works without the refused commands, and logs a warning."""
    caplog.clear()
    if "info" in refused:
        assert "refuses INFO: set max_bytes" in await problem(server, **login)
    async with opened(server, max_bytes="1GiB", **login) as it:
        await check_put(it)
        assert set(await it.get(range(2))) == {Status.OK}
        await it.tier.reset()
        await check_put(it)
    for name in {"info", "role"}.intersection(refused):
        assert f"refuses {name.upper()}: " in caplog.text
    if "info" in refused:
        async with opened(server, max_bytes="600KiB", **login) as it:
            assert set(await it.put(range(10, 12))) == {Status.REFUSED}


def test_failed_command_runs_once_for_all(tmp_path: Path) -> None:
    """Otherwise connections would wait for each other's runs, and threads would pile up during a hang."""
    runs, end = tmp_path / "runs", tmp_path / "end"
    script = f"echo run >> {runs}; until [ -e {end} ]; do sleep 0.05; done; exit 1"
    config = RedisConfig(password_command=("sh", "-c", script))
    login = ClientFactory(config, "tests").options()["credential_provider"]
    all_there = threading.Barrier(5)

    def ask() -> str:
        all_there.wait(60)
        with pytest.raises(PasswordError) as caught:
            login.get_credentials()
        return str(caught.value)

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask) for _ in range(4)]
        all_there.wait(60)
        time.sleep(0.5)  # long enough that all of them wait
        end.touch()
        assert {one.result(60) for one in asked} == {"password_command = 'sh' failed (exit status 1)"}
    assert runs.read_text() == "run\n"


async def test_wrong_sentinel_passwords(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "primary") as primary,
        Server(tmp_path / "replica", f"--replicaof 127.0.0.1 {primary.port}"),
        redis_servers.sentinels(tmp_path, primary) as ports,
    ):
        for port in ports:
            with redis.Redis(port=port) as sentinel:
                sentinel.execute_command("ACL", "SETUSER", "default", ">right")
        primary.add_user("default", "right")
        addresses = [f"127.0.0.1:{port}" for port in ports]
        settings: dict[str, Any] = {"addresses": addresses, "mode": "sentinel", "sentinel_master": "kv"}
        text = await problem(**settings, sentinel_password="hunter2")
        assert all(f"{address}: " in text for address in addresses)
        assert "sentinel authentication failed" in text
        assert text.endswith("; set sentinel_username and sentinel_password")
        assert "hunter2" not in text
        assert "redis.client" not in text
        settings["sentinel_password"] = "right"
        text = await problem(**{**settings, "addresses": ["127.0.0.1:1", addresses[0]]}, password="hunter2")
        assert f"tier cache: 127.0.0.1:{primary.port}: authentication failed" in text
        assert text.endswith("; set username and password")
        async with opened(**settings, password="right") as it:
            await check_put(it)
    text = await problem(**settings, password="right")
    assert "no sentinel knows the primary" in text
    assert all(f"{address}: Error " in text for address in addresses)


async def test_unfit_databases_and_modes(server: Server, cluster: list[Server], tmp_path: Path) -> None:
    text = await problem(server, db=99)
    assert "has no database 99" in text
    assert "set db" in text
    assert "set mode to 'single'" in await problem(server, mode="cluster")
    assert "is cluster: set mode to 'cluster'" in await problem(cluster[0])
    text = await problem(server, mode="sentinel", sentinel_master="kv", connect_timeout_s=0.5)
    assert "sentinel" in text
    with (
        Server(tmp_path / "replica", f"--replicaof 127.0.0.1 {server.port}") as replica,
        redis_servers.sentinels(tmp_path, server) as ports,
    ):
        assert "is a replica" in await problem(replica)
        assert "is a sentinel: set mode to 'sentinel'" in await problem(addresses=[f"127.0.0.1:{ports[0]}"])
        addresses = [f"127.0.0.1:{port}" for port in ports]
        text = await problem(addresses=addresses, mode="sentinel", sentinel_master="other")
        assert "'other'" in text
        assert "set sentinel_master" in text


async def test_unfit_tls_settings(server: Server, tls_server: TlsServer) -> None:
    mine = tls_server.settings
    assert "tls" in await problem(tls_server.server, connect_timeout_s=1, deadline_s=1)
    assert "is it a port without TLS?" in await problem(server, tls=True, connect_timeout_s=1, deadline_s=1)
    text = await problem(tls_server.server, **{**mine, "tls_ca_file": None})
    assert "TLS certificate not trusted" in text
    assert "set tls_ca_file, or tls_verify" in text
    without: dict[str, Any] = {
        name: value for name, value in mine.items() if name not in ("tls_cert_file", "tls_key_file")
    }
    assert "tls_cert_file" in await problem(tls_server.server, **without)
    trusting: dict[str, Any] = {**mine, "tls_ca_file": None, "tls_verify": "none"}
    async with opened(tls_server.server, **trusting) as it:
        await check_put(it)


async def test_foreign_manifest_is_refused(own_server: Server) -> None:
    async with opened(own_server):
        pass
    with own_server.client() as client:
        (name,) = client.keys("*:manifest")
        client.set(name, client.get(name).replace(b"float16", b"float32"))
    text = await problem(own_server)
    assert "belongs to another cache: dtype is 'float32' there and 'float16' here" in text
    assert name.decode() in text


async def test_lost_epoch_finds_nothing(own_server: Server) -> None:
    async with opened(own_server) as it:
        await it.put(range(4))
        await it.tier.reset()
        with own_server.client() as client:
            client.delete(*client.keys("*:epoch"))
    async with opened(own_server) as it:
        assert set(await it.get(range(4))) == {Status.ABSENT}


async def test_private_epochs_are_removed(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may not remove them within the default, and would leave the rest to expire.
    monkeypatch.setattr("kvtier_redis.tier._CLOSING_CLEANUP_S", 60.0)
    async with opened(own_server) as it:
        await it.put(range(3))
        await it.tier.reset()
        await it.put(range(100, 150))
        await it.tier.reset()
        await it.put(range(200, 250))
    with own_server.client() as client:
        assert len(client.keys("*:*:*:*")) == 3  # Chunks of the shared epoch expire.


async def test_long_chunks_are_refused() -> None:
    context = TierContext("cache", redis_servers.IDENTITY, 512 * 2**20)
    with pytest.raises(TierError, match="exceed the maximum of a Redis value"):
        await RedisTier(RedisConfig()).open(context)


SENTINEL = {"mode": "sentinel", "sentinel_master": "kv"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"addresses": ["redis://user:hunter2@host:1"]}, "an address is host:port or /path"),
        ({"addresses": ["host:0"]}, "'host:0' is neither host:port nor the path of a socket"),
        ({"addresses": ["a", "b"]}, "mode single has one"),
        ({"addresses": ["/s"], "tls": True}, "no TLS on a Unix socket"),
        ({"mode": "cluster", "addresses": ["/s"]}, "mode cluster needs host:port"),
        ({"mode": "cluster", "db": 1}, "a cluster has only database 0"),
        ({"mode": "sentinel"}, "sentinel_master is missing"),
        ({"sentinel_master": "kv"}, "set mode to 'sentinel'"),
        ({"sentinel_password": "hunter2"}, "sentinel_password: for mode sentinel only, remove it"),
        (
            {**SENTINEL, "sentinel_password": "hunter2", "sentinel_password_file": "/p"},
            "give one of sentinel_password and sentinel_password_file",
        ),
        (
            {"password": "hunter2", "password_file": "/p", "password_command": ["x"]},
            "give one of password and password_file and password_command",
        ),
        ({"tls_ca_file": "/ca"}, "need tls = true"),
        ({"tls_verify": "none"}, "need tls = true"),
        ({"tls": True, "tls_key_file": "/key"}, "tls_key_file needs tls_cert_file"),
        ({"pasword": "hunter2"}, "did you mean password?"),
    ],
)
def test_invalid_settings_are_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validation.build(RedisConfig, {"type": "redis", **settings})
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_readme_lists_settings_and_reasons() -> None:
    table = own_table("redis")
    assert table in README, f"copy this table:\n{table}"
    for reason in REASONS:
        assert f"| `{reason}` |" in README


def test_readme_configurations_work() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert {registry.validate(json.loads(line)).type for line in block.splitlines()} == {"redis"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host", "host:6379"),
        ("host:1", "host:1"),
        ("::1", "[::1]:6379"),
        ("[::1]", "[::1]:6379"),
        ("[::1]:7", "[::1]:7"),
        ("/run/redis.sock", "/run/redis.sock"),
        ("unix:/run/redis.sock", "/run/redis.sock"),
    ],
)
def test_addresses_in_every_spelling(text: str, shown: str) -> None:
    (address,) = RedisConfig(addresses=(text,)).parsed_addresses
    assert str(address) == shown
