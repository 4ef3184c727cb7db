"""What is said to servers besides chunks: which there are, whose place this is, its epoch, how full they are.

Everything here blocks, in a thread. No slot is touched.

**Epochs.** The names of chunks hold an epoch, a random word. The key ``<place>:epoch`` has that of whoever
opens next. A reset puts another word there, and goes on with a word that nobody else knows, for the
weights that came with the reset may be this process's alone. So nothing that was put before is found
again, not even where the server loses the key: then the next opener makes a new word, and all chunks of
the place are forgotten. They expire.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
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
from kvtier.tiers.base import TierContext
from kvtier_redis.answers import is_about_trust
from kvtier_redis.config import Address, RedisConfig
from kvtier_redis.dial import Dialer

SLOTS: Final = 16384
_SHARE_OF_MEMORY: Final = 0.75
_SWEEP_KEYS: Final = 500
_REPLICAS_MS: Final = 1000
_log = logging.getLogger("kvtier.tiers.redis")


@dataclass(frozen=True, slots=True)
class Servers:
    """Where chunks are kept.

    Attributes:
        addresses: the primaries.
        by_slot: for each slot of a cluster the index of its primary, -1 where nobody serves it; empty where
            there is one primary.
    """

    addresses: tuple[Address, ...]
    by_slot: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Fill:
    """How full all servers are together.

    Attributes:
        used_bytes: memory that they use, whoever's keys it is for.
        limit_bytes: memory that they may use.
        is_evicting: whether keys leave by themselves where the limit is reached.
    """

    used_bytes: int
    limit_bytes: int
    is_evicting: bool

    @property
    def room_bytes(self) -> float:
        """Bytes that may be put still; endless where others leave for them."""
        return float("inf") if self.is_evicting else self.limit_bytes - self.used_bytes


class _SentinelLoginError(MasterNotFoundError):
    """A sentinel wants another login; no other one knows the primary."""


class Control:
    """Talks to the servers of one tier.

    Args:
        config: the settings.
        context: what the tier was opened with.
        dialer: makes connections.
    """

    def __init__(self, config: RedisConfig, context: TierContext, dialer: Dialer) -> None:
        self._config = config
        self._context = context
        self._dialer = dialer
        self._clients: dict[Address, redis.Redis] = {}
        self._place = f"{config.key_prefix}:{context.identity.namespace}"

    # ------------------------------------------------------------------------------ opening

    def open(self) -> tuple[Servers, str, Fill]:
        """Find the servers, agree on whose place it is, and join its epoch.

        Raises:
            TierError: it cannot work like this; the message names the setting and the remedy.
        """
        try:
            servers = self.find()
            for address in servers.addresses:
                self._on(address, self._check)
            self._on(self._home(servers, "manifest"), self._agree)
            epoch = self._on(self._home(servers, "epoch"), self._join)
            fill = self.fill(servers)
        except (RedisError, OSError) as error:
            raise TierError(self._wrong(self._explain(error))) from None
        if fill.limit_bytes <= 0:
            raise TierError(
                self._wrong("the server says neither its maxmemory nor its machine's memory: set max_bytes")
            )
        return servers, epoch, fill

    def close(self) -> None:
        """Hang up."""
        for client in list(self._clients.values()):  # a thread that nobody waits for may add one meanwhile
            client.close()

    def find(self, known: Sequence[Address] = ()) -> Servers:
        """Find the servers that chunks are kept on; ``known`` are those of a moment ago."""
        return find(self._config, self._dialer, known)

    def _check(self, client: redis.Redis, address: Address) -> None:
        server = cast("Mapping[str, Any]", client.info("server"))
        kind = str(server.get("redis_mode") or server.get("server_mode") or "standalone")
        if kind == "sentinel":
            raise TierError(
                self._wrong(f"{address} is a sentinel: set mode to 'sentinel', with sentinel_master")
            )
        if (kind == "cluster") != (self._config.mode == "cluster"):
            mode = "cluster" if kind == "cluster" else "single"
            raise TierError(
                self._wrong(f"mode is {self._config.mode!r}, but {address} is {kind}: set {mode!r}")
            )
        if cast("Sequence[Any]", client.role())[0] not in (b"master", "master"):
            raise TierError(
                self._wrong(f"addresses: {address} is a replica, which takes no puts: give its primary's")
            )

    def _agree(self, client: redis.Redis, address: Address) -> None:
        name = f"{self._place}:manifest"
        found = _get_or_set(client, name, self._context.identity.manifest)
        try:
            self._context.identity.require(found, f"{address}, key {name},")
        except IdentityError as error:
            raise TierError(self._wrong(f"{error}")) from error

    def _join(self, client: redis.Redis, _: Address) -> str:
        return _get_or_set(client, f"{self._place}:epoch", _new_epoch())

    # --------------------------------------------------------------------------- afterwards

    def chunks(self, epoch: str) -> str:
        """Return what the names of an epoch's chunks begin with."""
        return f"{self._place}:{epoch}:"

    def reset(self, servers: Servers) -> str:
        """Let later openers start another epoch, and return one for this opener alone.

        Raises:
            TierError: it could not be written down.
        """
        try:
            self._on(self._home(servers, "epoch"), self._advance)
        except (RedisError, OSError) as error:
            raise TierError(f"the reset could not be stored: {self._explain(error)}") from None
        return "own-" + _new_epoch()

    def _advance(self, client: redis.Redis, address: Address) -> None:
        client.set(f"{self._place}:epoch", _new_epoch())
        replicas = int(cast("Mapping[str, Any]", client.info("replication")).get("connected_slaves", 0))
        if replicas and cast("int", client.wait(replicas, _REPLICAS_MS)) < replicas:
            _log.warning(
                "tier %s: not every replica of %s has confirmed the reset: one that takes over without it "
                "shows engines that open later what was put before",
                self._context.name,
                address,
            )

    def fill(self, servers: Servers) -> Fill:
        """Ask how full the servers are; keep the place's own keys from being the ones that leave."""
        fills = [self._on(address, self._fill) for address in servers.addresses]
        for name in ("manifest", "epoch"):
            self._on(self._home(servers, name), partial(self._touch, name))
        return Fill(
            sum(fill.used_bytes for fill in fills),
            sum(fill.limit_bytes for fill in fills),
            all(fill.is_evicting for fill in fills),
        )

    def _touch(self, name: str, client: redis.Redis, _: Address) -> None:
        client.touch(f"{self._place}:{name}")

    def _fill(self, client: redis.Redis, _: Address) -> Fill:
        memory = cast("Mapping[str, Any]", client.info("memory"))
        there, may = int(memory.get("total_system_memory", 0)), int(memory.get("maxmemory", 0))
        limit = int(self._config.max_bytes or may or there * _SHARE_OF_MEMORY)
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        evicts = bool(may) and policy != "noeviction" and may <= limit
        return Fill(int(memory["used_memory"]), limit, evicts)

    def sweep(self, servers: Servers, epoch: str, until: float) -> bool:
        """Remove what is left of an epoch that was this opener's alone. Returns whether all of it is gone.

        Args:
            servers: where it is.
            epoch: the epoch.
            until: time on the monotonic clock at which it ends; what is left expires.
        """
        pattern = self.chunks(epoch) + "*"

        def remove(client: redis.Redis, _: Address) -> bool:
            cursor = 0
            while True:
                cursor, names = cast("Any", client.scan(cursor, match=pattern, count=_SWEEP_KEYS))
                with client.pipeline(transaction=False) as pipeline:
                    for name in names:
                        pipeline.unlink(name)
                    pipeline.execute()
                if not cursor:
                    return True
                if time.monotonic() > until:
                    return False

        return all([self._on(address, remove) for address in servers.addresses])

    # ------------------------------------------------------------------------------ helpers

    def _on(self, address: Address, ask: Callable[[redis.Redis, Address], Any]) -> Any:
        try:
            return ask(self._client(address), address)
        except (RedisError, OSError) as error:
            error.add_note(str(address))  # the settings may name others: sentinels, or other nodes
            raise

    def _client(self, address: Address) -> redis.Redis:
        if address not in self._clients:
            self._clients[address] = self._dialer.client(address)
        return self._clients[address]

    def _home(self, servers: Servers, name: str) -> Address:
        """Return the server that has one of the place's own keys."""
        return servers.addresses[index_of(servers, f"{self._place}:{name}".encode())]

    def _wrong(self, text: str) -> str:
        return f"tier {self._context.name}: {text}"

    def _explain(self, error: Exception) -> str:
        """Say what went wrong, with the setting that may be the cause, and without passwords."""
        asked: Sequence[str] = getattr(error, "__notes__", ())
        where = ", ".join(asked or self._config.addresses)
        is_sentinel = self._config.mode == "sentinel" and not asked
        whose = "sentinel_" if is_sentinel else ""
        text = self._dialer.hide(error)
        if "unknown command 'AUTH'" in text:
            return f"{where} knows no passwords ({text}); leave out username, password and password_file"
        if is_about_trust(error):
            return f"{where}: TLS does not trust the server ({text}); set tls_ca_file, or tls_verify"
        if isinstance(error, _SentinelLoginError):
            return f"the sentinel refuses the login ({text}); set sentinel_username and sentinel_password"
        if isinstance(error, AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
            return f"{where} refuses the login ({text}); set {whose}username and {whose}password"
        if isinstance(error, NoPermissionError) or text.startswith("NOPERM"):
            user = getattr(self._config, f"{whose}username") or "default"
            return f"{where}: the ACL of user {user!r} lacks something ({text})"
        if "DB index" in text or "Invalid Database" in text:
            return f"{where} has no database {self._config.db} ({text}); set db"
        if "unknown command 'SENTINEL'" in text:
            return f"{where} is no sentinel: give those in addresses, or set mode to 'single' or 'cluster'"
        if "luster" in text and self._config.mode == "cluster":
            return f"{where}: {text}; set mode to 'single' unless it is a cluster"
        if isinstance(error, MasterNotFoundError):
            return f"no sentinel knows the primary ({text}); set sentinel_master and addresses"
        if isinstance(error, TimeoutError | ConnectionError | OSError):
            hint = "tls (is it a port without TLS?), tls_cert_file" if self._config.tls else "tls"
            return f"{where} cannot be reached ({text}); see addresses, connect_timeout_s, {hint}"
        return f"{where}: {text}"


def find(config: RedisConfig, dialer: Dialer, known: Sequence[Address] = ()) -> Servers:
    """Find the servers that chunks are kept on. Blocks.

    Args:
        config: the settings.
        dialer: makes connections.
        known: servers of the cluster that may be asked besides those of the settings.

    Raises:
        RedisError, OSError: none that is named in the settings could be asked, or knows.
    """
    if config.mode == "sentinel":
        return Servers((_primary(config, dialer),))
    if config.mode == "single":
        return Servers(config.parsed_addresses)
    problem: Exception | None = None
    for address in dict.fromkeys((*config.parsed_addresses, *known)):
        try:
            with closing(dialer.client(address)) as client:
                return _cluster(client.execute_command("CLUSTER SLOTS"), address)
        except (ConnectionError, TimeoutError, OSError) as error:
            problem = error
    assert problem is not None
    raise problem


def _primary(config: RedisConfig, dialer: Dialer) -> Address:
    """Ask one sentinel after the other. redis-py does that, too, but of failures it shows its own objects."""
    sentinel, name = dialer.sentinel(), str(config.sentinel_master)
    problems: list[str] = []
    refusals: list[str] = []
    for address, client in zip(config.parsed_addresses, sentinel.sentinels, strict=True):
        try:
            state = cast("Mapping[str, Any]", client.sentinel_masters()).get(name)
        except (ConnectionError, TimeoutError) as error:
            problem = f"{address}: {error}"
            (refusals if isinstance(error, AuthenticationError) else problems).append(problem)
            continue
        if state and sentinel.check_master_state(state, name):
            return Address(str(state["ip"]), int(state["port"]))
        problems.append(f"{address} takes {name!r} for down" if state else f"{address} has no {name!r}")
    if refusals:
        raise _SentinelLoginError("; ".join(refusals))
    raise MasterNotFoundError("; ".join(problems))


def _cluster(rows: Any, asked: Address) -> Servers:
    addresses: list[Address] = []
    by_slot = [-1] * SLOTS
    for first, last, primary, *_ in rows:
        address = Address(_words(primary[0]) or asked.host, int(primary[1]))
        if address not in addresses:
            addresses.append(address)
        by_slot[first : last + 1] = [addresses.index(address)] * (last - first + 1)
    if -1 in by_slot:
        raise ResponseError(f"CLUSTERDOWN {by_slot.count(-1)} of the cluster's {SLOTS} slots have no server")
    return Servers(tuple(addresses), by_slot)


def index_of(servers: Servers, name: bytes) -> int:
    """Return which server has a key."""
    if not servers.by_slot:
        return 0
    slot: int = key_slot(name)
    return servers.by_slot[slot]


def _get_or_set(client: redis.Redis, name: str, text: str) -> str:
    """Return what a key has. Set it only where it has nothing: a full server refuses every SET."""
    found = cast("bytes | None", client.get(name))
    if found is None:
        client.set(name, text, nx=True)
        found = cast("bytes | None", client.get(name))
    return text if found is None else found.decode(errors="replace")


def _new_epoch() -> str:
    return secrets.token_hex(8)


def _words(text: bytes | str | None) -> str:
    return text.decode() if isinstance(text, bytes) else text or ""
