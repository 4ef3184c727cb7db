"""Tiers that engines share, each over its own server if it needs one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier_testing.tiers._servers import absent, free_port
from tests.common import load_file
from tests.integration.harness import PROJECT, redis_servers

MEMBERS = 4
"""Maximum number of engines that read each other's memory."""


@dataclass(frozen=True)
class SharedTier:
    """A tier that engines share.

    Attributes:
        name: the tier's name.
        of: returns its settings in the configuration of one of the engines, by number.
        environment: variables of all engines.
    """

    name: str
    of: Callable[[int], dict[str, Any]]
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def shared_tier(name: str, directory: Path) -> Iterator[SharedTier]:
    """Start the servers of the named tier. Skip the test if it is not installed.

    Args:
        directory: directory for its data and logs.
    """
    with _TIERS[name](directory) as shared:
        yield shared


@contextmanager
def _fs(directory: Path) -> Iterator[SharedTier]:
    yield SharedTier("fs", lambda _: {"type": "fs", "root_dir": str(directory / "root")})


@contextmanager
def _redis(directory: Path) -> Iterator[SharedTier]:
    if importlib.util.find_spec("kvtier_redis") is None:
        absent("kvtier-redis is not installed: pip install -e plugins/kvtier-redis")
    path = directory / "redis.sock"
    with redis_servers().Server(directory / "redis", f"--unixsocket {path}"):
        yield SharedTier("redis", lambda _: {"type": "redis", "addresses": [str(path)]})


@contextmanager
def _mooncake(directory: Path) -> Iterator[SharedTier]:
    with mooncake_pools().Pool(directory / "pool", 256 << 20) as pool:
        yield SharedTier("mooncake", lambda _: {"type": "mooncake", "master": pool.address})


@contextmanager
def _nixl(directory: Path) -> Iterator[SharedTier]:
    for module in ("kvtier_nixl", "nixl"):
        if importlib.util.find_spec(module) is None:
            absent("pip install -e plugins/kvtier-nixl; pip install --no-deps nixl nixl-cu12")
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(MEMBERS)]
    common = {"serve_bytes": "64MiB", "receive_bytes": "16MiB", "answer_timeout_s": 10.0}

    def of(engine: int) -> dict[str, Any]:
        return {"type": "nixl", "listen": addresses[engine], "peers": addresses, **common}

    yield SharedTier("nixl", of, {"UCX_TLS": "tcp,self"})


def mooncake_pools() -> Any:
    """Return the module of the Mooncake tests that starts pools."""
    if importlib.util.find_spec("kvtier_mooncake") is None:
        absent("kvtier-mooncake is not installed: pip install -e plugins/kvtier-mooncake")
    return load_file("kvtier_mooncake_tests_pools", PROJECT / "plugins/kvtier-mooncake/tests/pools.py")


_TIERS = {"fs": _fs, "redis": _redis, "mooncake": _mooncake, "nixl": _nixl}
