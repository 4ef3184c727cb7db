"""Settings of the Redis tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from kvtier.tiers import Size, TierConfig

_DEFAULT_PORT = 6379
_SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, default_port: int) -> Address:
        """Parse ``host``, ``host:port``, ``[v6]:port`` or ``/path/of/socket``. Raises ValueError."""
        if text.startswith(("/", "unix:/")):
            return Address(path=text.removeprefix("unix:"))
        if "://" in text or "@" in text:  # The value is not shown, because it may contain a password.
            raise ValueError(
                "an address is host:port or /path; username, password, db and tls have their own settings"
            )
        host, colon, port = text.rpartition(":")
        if not colon or host.endswith(":") or text.endswith("]"):  # a v6 address may lack a port
            host, port = text, str(default_port)
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is neither host:port nor the path of a socket")
        return Address(host, int(port))


class RedisConfig(TierConfig):
    """Settings of the Redis tier."""

    type: str = Field(
        default="redis", description="Name of the tier's entry point in the group kvtier.tiers."
    )
    mode: Literal["single", "sentinel", "cluster"] = Field(
        default="single", description="One server, a primary named by sentinels, or a cluster."
    )
    addresses: tuple[str, ...] = Field(
        default=(f"127.0.0.1:{_DEFAULT_PORT}",),
        min_length=1,
        description="`host:port`, `[v6]:port`, or the path of a Unix socket in mode `single`. In mode "
        "`sentinel` the sentinels (port 26379); in mode `cluster` some nodes, from which the others are "
        "discovered.",
    )
    sentinel_master: str | None = Field(
        default=None, description="Name of the primary in the sentinels' configuration."
    )
    db: int = Field(default=0, ge=0, description="Database number. A cluster has only 0.")
    username: str | None = Field(default=None, description="ACL user. Default: the server's default user.")
    password: SecretStr | None = Field(default=None, description="Password; never logged by kvtier.")
    password_file: Path | None = Field(
        default=None,
        description="File whose first line is the password, instead of `password`. Read again for each new "
        "connection.",
    )
    password_command: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments that print the password, such as a cloud's token, instead of "
        "`password`. Run again after a minute, for new connections, and after a refusal.",
    )
    sentinel_username: str | None = Field(default=None, description="ACL user on the sentinels.")
    sentinel_password: SecretStr | None = Field(
        default=None, description="Password for the sentinels; never logged by kvtier."
    )
    sentinel_password_file: Path | None = Field(
        default=None,
        description="File whose first line is the sentinels' password. Read again for each new connection.",
    )
    sentinel_password_command: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="Program and arguments that print the sentinels' password."
    )
    tls: bool = Field(default=False, description="Use TLS, also to the sentinels.")
    tls_ca_file: Path | None = Field(
        default=None, description="PEM file of trusted certificate authorities. Default: the system's."
    )
    tls_cert_file: Path | None = Field(default=None, description="PEM file of the client certificate.")
    tls_key_file: Path | None = Field(default=None, description="PEM file of the client certificate's key.")
    tls_verify: Literal["full", "chain", "none"] = Field(
        default="full",
        description="What to verify in the server's certificate: chain and host name, chain only, or "
        "nothing.",
    )
    connections: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Connections to each server for gets, and as many for puts; one more for small commands.",
    )
    connect_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Connect timeout, in seconds.")
    ttl_s: int = Field(
        default=7 * 86_400,
        ge=60,
        le=10 * 365 * 86_400,
        description="Expiry of a chunk in seconds; default: 7 days. A put, and a load from host memory, "
        "restart it.",
    )
    max_bytes: Annotated[Size, Field(gt=0)] | None = Field(
        default=None,
        description="Refuse puts while the servers together use more memory than this, other clients' keys "
        "included. "
        "Default: their `maxmemory`, else three quarters of their system memory.",
    )
    key_prefix: str = Field(
        default="kvtier",
        pattern=r"^[A-Za-z0-9_.:/-]{1,100}$",
        description="Prefix of all keys.",
    )

    @field_validator("addresses")
    @classmethod
    def _require_parsable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            Address.parse(text, _DEFAULT_PORT)
        return value

    @model_validator(mode="after")
    def _require_consistent(self) -> RedisConfig:
        is_sentinel = self.mode == "sentinel"
        names = ("password", "password_file", "password_command")
        passwords, sentinel_passwords = (
            [prefix + name for name in names if getattr(self, prefix + name)] for prefix in ("", "sentinel_")
        )
        has_socket = any(address.path for address in self.parsed_addresses)
        problems = {
            "sentinel_master is missing: mode sentinel needs the name of the primary": (
                is_sentinel and not self.sentinel_master
            ),
            "sentinel_master is for mode sentinel: set mode to 'sentinel', or remove it": (
                not is_sentinel and self.sentinel_master
            ),
            f"{' and '.join(sentinel_passwords) or 'sentinel_username'}: for mode sentinel only, remove it": (
                not is_sentinel and (self.sentinel_username or sentinel_passwords)
            ),
            f"give one of {' and '.join(sentinel_passwords)}": len(sentinel_passwords) > 1,
            f"addresses: mode {self.mode} needs host:port, not a Unix socket": (
                self.mode != "single" and has_socket
            ),
            "addresses: no TLS on a Unix socket: remove tls, or give host:port": self.tls and has_socket,
            "db: a cluster has only database 0": self.mode == "cluster" and self.db,
            "addresses: mode single has one; set mode to 'sentinel' or 'cluster'": (
                self.mode == "single" and len(self.addresses) > 1
            ),
            f"give one of {' and '.join(passwords)}": len(passwords) > 1,
            "tls_ca_file, tls_cert_file, tls_key_file and tls_verify need tls = true": (
                not self.tls
                and (self.tls_ca_file or self.tls_cert_file or self.tls_key_file or self.tls_verify != "full")
            ),
            "tls_key_file needs tls_cert_file": self.tls_key_file and not self.tls_cert_file,
        }
        for problem, applies in problems.items():
            if applies:
                raise ValueError(problem)
        return self

    @property
    def parsed_addresses(self) -> tuple[Address, ...]:
        """The addresses, with default ports."""
        port = _SENTINEL_PORT if self.mode == "sentinel" else _DEFAULT_PORT
        return tuple(Address.parse(text, port) for text in self.addresses)
