"""Settings of the Redis tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from kvtier.quantities import Size
from kvtier.tiers.base import TierConfig

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
MOST_VALUE_BYTES = 512 * 2**20 - 1024  # proto-max-bulk-len as servers have it, less the trailer


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a host and a port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, default_port: int) -> Address:
        """Read ``host``, ``host:port``, ``[v6]:port`` or ``/path/of/socket``.

        Raises:
            ValueError: it is none of these; the message says so.
        """
        if text.startswith(("/", "unix:/")):
            return Address(path=text.removeprefix("unix:"))
        if "://" in text or "@" in text:  # not shown: there may be a password in it
            raise ValueError(
                "an address is host:port or /path; user, password, db and tls are settings of their own"
            )
        host, colon, port = text.rpartition(":")
        if not colon or host.endswith(":") or text.endswith("]"):  # no port, which a v6 address may lack
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
        default="single", description="How the servers belong together."
    )
    addresses: tuple[str, ...] = Field(
        default=(f"127.0.0.1:{DEFAULT_PORT}",),
        min_length=1,
        description="Where to connect: `host:port` or the path of a Unix socket. In mode sentinel those of "
        "the sentinels, in mode cluster some nodes, the others are found.",
    )
    sentinel_master: str | None = Field(
        default=None, description="Name under which the sentinels know the primary. For mode sentinel."
    )
    db: int = Field(default=0, ge=0, description="Number of the database; a cluster has 0 alone.")
    username: str | None = Field(default=None, description="ACL user. Default: the server's default user.")
    password: SecretStr | None = Field(default=None, description="Password; never logged.")
    password_file: Path | None = Field(
        default=None, description="File with the password, instead of `password`."
    )
    sentinel_username: str | None = Field(default=None, description="ACL user for the sentinels.")
    sentinel_password: SecretStr | None = Field(
        default=None, description="Password for the sentinels; never logged."
    )
    sentinel_password_file: Path | None = Field(
        default=None, description="File with the password for the sentinels, instead of `sentinel_password`."
    )
    tls: bool = Field(default=False, description="Speak TLS, to the sentinels, too.")
    tls_ca_file: Path | None = Field(
        default=None,
        description="PEM file of who may have signed the server's certificate. Default: the system's.",
    )
    tls_cert_file: Path | None = Field(default=None, description="PEM file of the client's certificate.")
    tls_key_file: Path | None = Field(default=None, description="PEM file of the client's key.")
    tls_verify: Literal["full", "chain", "none"] = Field(
        default="full",
        description="What is checked of the server's certificate: who signed it and its host name, the "
        "former alone, or nothing.",
    )
    connections: int = Field(
        default=4, ge=1, le=64, description="Connections to each server for gets, and as many for puts."
    )
    connect_timeout_s: float = Field(
        default=2.0, gt=0, le=60, description="Seconds that connecting to a server may take."
    )
    value_bytes: Annotated[Size, Field(ge=4096, le=MOST_VALUE_BYTES)] = Field(
        default=64 * 2**20,
        description="Bytes of a chunk under one key at most; longer ones are kept in parts.",
    )
    ttl_s: int = Field(
        default=7 * 86_400,
        ge=60,
        le=10 * 365 * 86_400,
        description="Seconds after which a chunk expires that was neither put nor used.",
    )
    max_bytes: Annotated[Size, Field(gt=0)] | None = Field(
        default=None,
        description="Puts are refused while a server uses more memory. Default: what the server says in "
        "maxmemory; where it has none, three quarters of its machine's memory.",
    )
    key_prefix: str = Field(
        default="kvtier",
        pattern=r"^[A-Za-z0-9_.:/-]{1,100}$",
        description="What the names of all keys begin with.",
    )

    @field_validator("addresses")
    @classmethod
    def _can_be_read(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            Address.parse(text, DEFAULT_PORT)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> RedisConfig:
        for holds, problem in (
            (
                self.mode == "sentinel" and not self.sentinel_master,
                "sentinel_master is missing: mode sentinel needs the name of the primary",
            ),
            (
                self.mode != "sentinel" and self.sentinel_master,
                "sentinel_master is for mode sentinel: set mode to 'sentinel', or leave it out",
            ),
            (
                self.mode != "sentinel" and (self.sentinel_username or self._has_sentinel_password),
                "sentinel_username, sentinel_password and sentinel_password_file are for mode sentinel: "
                "leave them out",
            ),
            (
                self.sentinel_password and self.sentinel_password_file,
                "give sentinel_password or sentinel_password_file, not both",
            ),
            (
                self.sentinel_username and not self._has_sentinel_password,
                "sentinel_username needs sentinel_password or sentinel_password_file",
            ),
            (
                self.mode != "single" and self._has_socket,
                f"addresses: mode {self.mode} needs host:port, for its servers name each other like that",
            ),
            (
                self.tls and self._has_socket,
                "addresses: on a Unix socket nothing speaks TLS; leave tls out, or give host:port",
            ),
            (self.mode == "cluster" and self.db, "db: a cluster has database 0 alone"),
            (
                self.mode == "single" and len(self.addresses) > 1,
                "addresses: mode single has one; set mode to 'sentinel' or 'cluster'",
            ),
            (self.password and self.password_file, "give password or password_file, not both"),
            (
                self.username and not (self.password or self.password_file),
                "username needs password or password_file",
            ),
            (
                not self.tls and (self.tls_ca_file or self.tls_cert_file or self.tls_key_file),
                "tls_ca_file, tls_cert_file and tls_key_file need tls = true",
            ),
            (self.tls_key_file and not self.tls_cert_file, "tls_key_file needs tls_cert_file"),
        ):
            if holds:
                raise ValueError(problem)
        return self

    @property
    def _has_sentinel_password(self) -> bool:
        return bool(self.sentinel_password or self.sentinel_password_file)

    @property
    def _has_socket(self) -> bool:
        return any(address.path for address in self.parsed_addresses)

    @property
    def parsed_addresses(self) -> tuple[Address, ...]:
        """The addresses."""
        port = SENTINEL_PORT if self.mode == "sentinel" else DEFAULT_PORT
        return tuple(Address.parse(text, port) for text in self.addresses)
