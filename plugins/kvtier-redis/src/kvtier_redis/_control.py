"""Commands other than chunk transfers: the servers, the cache's identity and epoch, and the memory usage.

All calls block and run in a worker thread. None touches a slot.

**Epochs.** The keys of chunks contain an epoch, a random token. The key ``<cache>:epoch`` holds the epoch
that tiers join when they open. A reset stores a new one there, and continues in a private epoch that no other
tier knows, because only this process may have the new weights. No chunk put before the reset is found again,
even if the server loses the key: the next tier that opens then makes a new epoch.
"""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, cast

import redis
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.sentinel import MasterNotFoundError

from kvtier.errors import IdentityError, TierError
from kvtier.tiers import TRAILER_BYTES, GuardedLogger, TierContext
from kvtier_redis._client import ClientFactory, PasswordError, Pool
from kvtier_redis.config import Address, RedisConfig

PRIVATE: Final = "own-"
"""Prefix of private epochs."""

_SLOTS: Final = 16384
_SHARE_OF_MEMORY: Final = 0.75
_SCAN_KEYS: Final = 500
_WAIT_FOR_REPLICAS_MS: Final = 1000
_WITHOUT: Final = {
    "info": ("INFO", "its memory use is estimated from its number of keys, and bounded by max_bytes"),
    "role": ("ROLE", "it is taken for a primary until it refuses a write"),
}
"""Commands that managed services refuse, and the consequence."""

_log = GuardedLogger("kvtier.tiers.redis")


@dataclass(frozen=True, slots=True)
class Topology:
    """The servers that store chunks.

    Attributes:
        by_slot: for each slot of a cluster, the index of its primary; empty if there is only one primary.
    """

    addresses: tuple[Address, ...]
    by_slot: Sequence[int] = ()

    def server_of(self, key: bytes) -> Address:
        """Return the server that owns a key."""
        return self.addresses[self.by_slot[key_slot(key)] if self.by_slot else 0]


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The memory of all servers together.

    Attributes:
        used_bytes: bytes used, including other clients' keys.
        limit_bytes: maximum number of bytes that may be used.
        is_evicting: whether the servers evict keys at the limit.
    """

    used_bytes: int
    limit_bytes: int
    is_evicting: bool

    @property
    def free_bytes(self) -> float:
        """Bytes that may still be put; infinite if the servers evict."""
        return float("inf") if self.is_evicting else self.limit_bytes - self.used_bytes


class _SentinelAuthError(MasterNotFoundError):
    """A sentinel refused the credentials, and no other sentinel knows the primary."""


class ControlClient:
    """Sends control commands for one tier."""

    def __init__(self, config: RedisConfig, context: TierContext, factory: ClientFactory) -> None:
        self._config = config
        self._context = context
        self._factory = factory
        self._clients: dict[Address, redis.Redis] = {}
        self._is_closed = False
        self._discoveries = 0
        self._refused: set[tuple[Address, str]] = set()
        self._cache = f"{config.key_prefix}:{context.identity.namespace}"

    def open(self) -> tuple[Topology, str, MemoryUsage]:
        """Return the servers, the epoch to join and the memory usage, after checking all of them.

        Raises:
            TierError: the tier cannot work; the message names the setting and the remedy.
        """
        try:
            topology = self.discover(ask_all=True)
            for address in topology.addresses:
                self._check_server(address)
            self._check_manifest(topology)
            epoch = self._on_key(topology, "epoch", lambda client, key: _get_or_set(client, key, _token()))
            usage = self.memory_usage(topology)
        except (RedisError, OSError) as error:
            raise self._error(self._explain(error)) from None
        if usage.limit_bytes <= 0:
            raise self._error(
                "the server reports neither maxmemory nor total_system_memory, or refuses INFO: set max_bytes"
            )
        return topology, epoch, usage

    def close(self) -> None:
        """Disconnect. Calls still running in threads end soon and leave no connection behind."""
        self._is_closed = True
        for client in list(self._clients.values()):  # An abandoned thread may add a client meanwhile.
            client.close()

    def discover(self, known: Sequence[Address] = (), *, ask_all: bool = False) -> Topology:
        """Return the servers that store chunks now.

        Each call asks a different node first, because a node may be outdated.

        See ``discover``.
        """
        self._discoveries += 1
        return discover(self._config, self._factory, known, self._discoveries - 1, ask_all=ask_all)

    def key_prefix(self, epoch: str) -> str:
        """Return the prefix of the keys of an epoch's chunks."""
        return f"{self._cache}:{epoch}:"

    def reset(self, before: Topology) -> tuple[Topology, str]:
        """Store a new epoch for tiers that open later, on the server that they will read it from.

        Args:
            before: the servers before the reset.

        Returns:
            The servers that store chunks now, and a private epoch for this tier.

        Raises:
            TierError: the epoch could not be stored.
        """
        try:
            topology = self.discover(before.addresses, ask_all=True)
            self._on_key(topology, "epoch", self._advance)
        except (RedisError, OSError) as error:
            raise TierError(f"the reset could not be stored: {self._explain(error)}") from None
        return topology, PRIVATE + _token()

    def memory_usage(self, topology: Topology) -> MemoryUsage:
        """Return the memory usage. Also reads the cache's own keys, so that they are not evicted first."""
        usages = [
            self._ask(address, "info", _memory_usage, None) or self._on(address, self._estimated_usage)
            for address in topology.addresses
        ]
        for name in ("manifest", "epoch"):
            self._on_key(topology, name, lambda client, key: client.get(key))
        limit = sum(usage.limit_bytes for usage in usages)
        max_bytes = int(self._config.max_bytes or limit)
        return MemoryUsage(
            sum(usage.used_bytes for usage in usages),
            max_bytes,
            limit <= max_bytes and all(usage.is_evicting for usage in usages),
        )

    def remove_epoch(self, topology: Topology, epoch: str, deadline: float) -> None:
        """Remove the chunks of a private epoch until the monotonic time ``deadline``; the rest expires."""

        def remove(client: redis.Redis) -> None:
            pattern = self.key_prefix(epoch) + "*"
            cursor: int | None = None
            while cursor != 0 and time.monotonic() < deadline:
                cursor, keys = cast("Any", client.scan(cursor or 0, match=pattern, count=_SCAN_KEYS))
                with client.pipeline(transaction=False) as pipeline:
                    for key in keys:
                        pipeline.unlink(key)
                    pipeline.execute()

        for address in topology.addresses:
            self._on(address, remove)

    def _check_server(self, address: Address) -> None:
        mode = "cluster" if self._config.mode == "cluster" else "standalone"
        server = self._ask(address, "info", lambda client: client.info("server"), {"redis_mode": mode})
        kind = str(server.get("redis_mode") or server.get("server_mode") or "standalone")
        if kind == "sentinel":
            raise self._error(f"{address} is a sentinel: set mode to 'sentinel', with sentinel_master")
        if (kind == "cluster") != (self._config.mode == "cluster"):
            mode = "cluster" if kind == "cluster" else "single"
            raise self._error(f"mode is {self._config.mode!r}, but {address} is {kind}: set mode to {mode!r}")
        role = self._ask(address, "role", lambda client: client.role(), [b"master"])
        if role[0] not in (b"master", "master"):
            raise self._error(f"{address} is a replica and takes no writes: set addresses to its primary's")

    def _check_manifest(self, topology: Topology) -> None:
        identity = self._context.identity

        def check(client: redis.Redis, key: str) -> None:
            found = _get_or_set(client, key, identity.manifest)
            identity.require(found, f"{topology.server_of(key.encode())}, key {key},")

        try:
            self._on_key(topology, "manifest", check)
        except IdentityError as error:
            raise self._error(str(error)) from error

    def _advance(self, client: redis.Redis, key: str) -> None:
        client.set(key, _token())
        try:
            replicas = int(cast("Mapping[str, Any]", client.info("replication")).get("connected_slaves", 0))
            # A primary that is cut off by a partition has no replicas left.
            if self._config.mode == "sentinel":
                replicas = max(1, replicas)
            confirmed = cast("int", client.wait(replicas, _WAIT_FOR_REPLICAS_MS)) if replicas else 0
        except ResponseError:  # the server refuses INFO or WAIT
            replicas, confirmed = 1, 0
        if confirmed < replicas:
            _log.warning(
                "tier %s: reset not confirmed by all replicas within %d ms: after a failover to one of them, "
                "engines that open later may find chunks from before the reset",
                self._context.name,
                _WAIT_FOR_REPLICAS_MS,
            )

    def _on_key(self, topology: Topology, name: str, call: Callable[[redis.Redis, str], Any]) -> Any:
        """Call with the client of the server that owns one of the cache's own keys, and with the key."""
        key = f"{self._cache}:{name}"
        return self._on(topology.server_of(key.encode()), lambda client: call(client, key))

    def _ask(self, address: Address, name: str, call: Callable[[redis.Redis], Any], default: Any) -> Any:
        """Return the answer to a command, or ``default`` if the server refuses it."""
        try:
            return self._on(address, call)
        except ResponseError as error:
            if name not in str(error).lower():  # the server refused another command, such as AUTH
                raise
        if (address, name) not in self._refused:
            self._refused.add((address, name))
            _log.warning("tier %s: %s refuses %s: %s", self._context.name, address, *_WITHOUT[name])
        return default

    def _estimated_usage(self, client: redis.Redis) -> MemoryUsage:
        """Return the estimated memory usage of a server that refuses INFO, counting each key as a chunk."""
        nbytes = self._context.chunk_bytes + TRAILER_BYTES
        return MemoryUsage(cast("int", client.dbsize()) * nbytes, 0, is_evicting=False)

    def _on(self, address: Address, call: Callable[[redis.Redis], Any]) -> Any:
        if self._is_closed:
            raise ConnectionAbortedError("the tier was closed meanwhile")
        if address not in self._clients:
            self._clients[address] = self._factory.client(address)
        client = self._clients[address]
        try:
            return call(client)
        except (RedisError, OSError) as error:
            error.add_note(str(address))  # The settings may name other servers: sentinels, or other nodes.
            cast("Pool", client.connection_pool).renew()
            raise
        finally:
            if self._is_closed:  # redis-py may have reconnected after the check above
                client.close()

    def _error(self, text: str) -> TierError:
        return TierError(f"tier {self._context.name}: {text}")

    def _explain(self, error: Exception) -> str:
        """Return the server, the error and the setting to check, without passwords."""
        notes: Sequence[str] = getattr(error, "__notes__", ())
        where = ", ".join(notes or self._config.addresses)
        prefix = "sentinel_" if self._config.mode == "sentinel" and not notes else ""
        text = self._factory.redact(error)
        if isinstance(error, PasswordError):
            return text
        if "unknown command 'AUTH'" in text:
            return f"{where} has no AUTH command ({text}); remove username, password and password_file"
        if "CERTIFICATE_VERIFY_FAILED" in text or isinstance(error, ssl.SSLCertVerificationError):
            return f"{where}: TLS certificate not trusted ({text}); set tls_ca_file, or tls_verify"
        if isinstance(error, _SentinelAuthError):
            return f"sentinel authentication failed ({text}); set sentinel_username and sentinel_password"
        if isinstance(error, AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
            return f"{where}: authentication failed ({text}); set {prefix}username and {prefix}password"
        if isinstance(error, NoPermissionError) or text.startswith("NOPERM"):
            user = getattr(self._config, f"{prefix}username") or "default"
            return f"{where}: ACL user {user!r} lacks a permission ({text})"
        if "DB index" in text or "Invalid Database" in text:
            return f"{where} has no database {self._config.db} ({text}); set db"
        if "unknown command 'SENTINEL'" in text:
            return f"{where} is not a sentinel; set addresses to the sentinels', or set mode"
        if "luster" in text and self._config.mode == "cluster":
            return f"{where}: {text}; set mode to 'single' unless it is a cluster"
        if isinstance(error, MasterNotFoundError):
            return f"no sentinel knows the primary ({text}); set sentinel_master and addresses"
        if isinstance(error, TimeoutError | ConnectionError | OSError):
            hint = "tls (is it a port without TLS?), tls_cert_file" if self._config.tls else "tls"
            return f"{where} cannot be reached ({text}); see addresses, connect_timeout_s, {hint}"
        return f"{where}: {text}"


def discover(
    config: RedisConfig,
    factory: ClientFactory,
    known: Sequence[Address] = (),
    first: int = 0,
    *,
    ask_all: bool = False,
) -> Topology:
    """Return the servers that store chunks. Blocks.

    Args:
        known: nodes of the cluster to ask, in addition to the settings.
        first: index of the node to ask first, modulo their number; the next ones are asked if it does not
            answer.
        ask_all: whether to wait for all sentinels: an epoch must not be read from or reset on a primary that
            a partition has cut off and that was replaced.

    Raises:
        RedisError, OSError: no server could be reached, or none knows the topology.
    """
    if config.mode == "sentinel":
        return Topology((_primary(config, factory, ask_all=ask_all),))
    if config.mode == "single":
        return Topology(config.parsed_addresses)
    last_error: Exception | None = None
    nodes = list(dict.fromkeys((*config.parsed_addresses, *known)))
    first %= len(nodes)
    for address in nodes[first:] + nodes[:first]:
        try:
            with closing(factory.client(address)) as client:
                return _cluster(client.execute_command("CLUSTER SLOTS"), address)
        except (ConnectionError, TimeoutError, OSError) as error:
            last_error = error
    assert last_error is not None
    raise last_error


def _primary(config: RedisConfig, factory: ClientFactory, *, ask_all: bool) -> Address:
    """Ask the sentinels in turn.

    ``Sentinel.discover_master`` does so, too, but does not report why a sentinel failed.
    """
    sentinel, name = factory.sentinel(), str(config.sentinel_master)
    found: list[tuple[int, Address]] = []  # addresses, each with the number of its election
    problems: list[str] = []
    denied: list[str] = []
    refused: ResponseError | None = None
    for address, client in zip(config.parsed_addresses, sentinel.sentinels, strict=True):
        try:
            state = cast("Mapping[str, Any]", client.sentinel_masters()).get(name)
        except PasswordError:
            raise
        except (ConnectionError, TimeoutError) as error:
            (denied if isinstance(error, AuthenticationError) else problems).append(f"{address}: {error}")
            continue
        except ResponseError as error:
            refused = error
            continue
        if not state or not sentinel.check_master_state(state, name):
            problems.append(f"{address} reports {name!r} as down" if state else f"{address} has no {name!r}")
            continue
        election = int(state.get("config-epoch", 0))
        found.append((election, Address(str(state["ip"]), int(state["port"]))))
        if not ask_all:
            break
    if found:
        return max(found, key=lambda one: one[0])[1]
    if refused is not None:
        raise refused
    if denied:
        raise _SentinelAuthError("; ".join(denied))
    raise MasterNotFoundError("; ".join(problems))


def _cluster(rows: Any, asked: Address) -> Topology:
    addresses: list[Address] = []
    by_slot = [-1] * _SLOTS
    for first, last, (host, port, *_), *_ in rows:
        address = Address((host.decode() if isinstance(host, bytes) else host) or asked.host, int(port))
        if address not in addresses:
            addresses.append(address)
        by_slot[first : last + 1] = [addresses.index(address)] * (last - first + 1)
    if -1 in by_slot:
        raise ResponseError(f"CLUSTERDOWN {by_slot.count(-1)} of {_SLOTS} slots have no server")
    return Topology(tuple(addresses), by_slot)


def _memory_usage(client: redis.Redis) -> MemoryUsage:
    """Return the memory usage of one server, with its own limit."""
    memory = cast("Mapping[str, Any]", client.info("memory"))
    system, maxmemory = int(memory.get("total_system_memory", 0)), int(memory.get("maxmemory", 0))
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    evicts = bool(maxmemory) and policy != "noeviction"
    return MemoryUsage(int(memory["used_memory"]), maxmemory or int(system * _SHARE_OF_MEMORY), evicts)


def _get_or_set(client: redis.Redis, key: str, text: str) -> str:
    """Return the value of a key, after setting it if it has none. A full server refuses SET, even with NX."""
    found = cast("bytes | None", client.get(key))
    if found is None:
        client.set(key, text, nx=True)
        found = cast("bytes | None", client.get(key))
    return text if found is None else found.decode(errors="replace")


def _token() -> str:
    return secrets.token_hex(8)
