"""Settings of the NIXL tier."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, field_validator, model_validator

from kvtier.tiers import Size, TierConfig

_DEFAULT_PORT: Final = 18_570
_WILDCARDS: Final = ("0.0.0.0", "::")


class NixlConfig(TierConfig):
    """Settings of the NIXL tier."""

    type: str = Field(default="nixl", description="Name of the tier's entry point in the group kvtier.tiers.")
    listen: str = Field(
        default=f"127.0.0.1:{_DEFAULT_PORT}",
        description="Address at which other engines ask for chunks: `host:port`, a different one for each "
        "engine of a host. Port 0: any free port, for an engine that only reads.",
    )
    advertise: str | None = Field(
        default=None,
        description="Address by which the `peers` of others name this engine. Decode engines are told to ask "
        "there for what it has computed. Default: `listen`, unless its host is a wildcard or its port 0.",
    )
    peers: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="Addresses of the engines to read from. An engine ignores its own, so the list "
        "can be the same everywhere.",
    )
    router_capabilities: tuple[str, ...] = Field(
        default=(),
        description="What Dynamo's worker tells its router of this tier: `router_hint` for Dynamo 1.6. "
        "Without it the router sends no `kv.fetch`.",
    )
    control_advertise_host: str | None = Field(
        default=None,
        description="Host of this engine's address among the `peers` of others, for Dynamo's worker.",
    )
    control_ports: tuple[int, ...] = Field(
        default=(), description="The port of that address, for Dynamo's worker: a list of one."
    )
    secret_file: Path | None = Field(
        default=None,
        description="File with the secret that all engines share, at least 16 bytes; read again for each new "
        "connection. Required unless all addresses are loopback addresses.",
    )
    serve_bytes: Annotated[Size, Field(gt=0)] = Field(
        default=Size(2**30),
        description="Host memory for chunks that others may read, in addition to the primary tier. The least "
        "recently used leave first.",
    )
    receive_bytes: Annotated[Size, Field(gt=0)] = Field(
        default=Size(128 * 2**20),
        description="Host memory that chunks are received into. It bounds the bytes in flight from peers.",
    )
    lease_s: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="Seconds for which chunks that a peer is about to read keep their memory.",
    )
    answer_timeout_s: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="Seconds after which a peer that does not answer on the control channel is dropped, "
        "until it can be connected to again. At most half of `deadline_s`.",
    )

    @field_validator("listen")
    @classmethod
    def _require_address(cls, value: str) -> str:
        parse_address(value, least_port=0)
        return value

    @field_validator("advertise")
    @classmethod
    def _require_reachable(cls, value: str | None) -> str | None:
        if value is not None:
            parse_address(value)
        return value

    @field_validator("peers")
    @classmethod
    def _require_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_address(text)
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _require_secret(self) -> NixlConfig:
        public = [text for text in (self.listen, *self.peers) if not is_loopback(text)]
        if public and self.secret_file is None:
            raise ValueError(
                f"secret_file is missing: {public[0]} is no loopback address, and without a secret anyone "
                "could read and serve chunks"
            )
        return self

    @model_validator(mode="after")
    def _tells_its_address(self) -> NixlConfig:
        told = [f"{self.control_advertise_host}:{port}" for port in self.control_ports]
        if self.router_capabilities and told != [self.peer_address()]:
            raise ValueError(
                f"control_advertise_host and control_ports give {told}, and peers reach this engine at "
                f"{self.peer_address()}: with router_capabilities they must be that one address"
            )
        return self

    @model_validator(mode="after")
    def _answers_before_deadline(self) -> NixlConfig:
        # A get that uses up most of its deadline counts as failed: the breaker would disable the tier with
        # all peers.
        if self.answer_timeout_s > self.deadline_s / 2:
            raise ValueError(
                f"answer_timeout_s ({self.answer_timeout_s:g}) is more than half of deadline_s "
                f"({self.deadline_s:g}): a peer that hangs would use up the deadline; lower answer_timeout_s "
                f"to {self.deadline_s / 2:g}, or raise deadline_s"
            )
        return self

    def peer_address(self) -> str | None:
        """See ``TierConfig.peer_address``."""
        host, port = parse_address(self.listen, least_port=0)
        is_wildcard = host in _WILDCARDS or not port
        return self.advertise or (None if is_wildcard else self.listen)

    def peer_addresses(self) -> tuple[str, ...]:
        """See ``TierConfig.peer_addresses``."""
        return self.peers


def parse_address(text: str, least_port: int = 1) -> tuple[str, int]:
    """Parse ``host:port`` or ``[v6]:port``. Raises ValueError."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare) != (host != bare) or not port.isdecimal():
        raise ValueError(f"{text!r} is not host:port, such as 10.0.0.1:{_DEFAULT_PORT}")
    if not least_port <= int(port) < 65536:
        raise ValueError(f"{text!r} has no valid port, such as 10.0.0.1:{_DEFAULT_PORT}")
    return bare, int(port)


def is_loopback(text: str) -> bool:
    """Return whether an address that ``parse_address`` accepts cannot be reached from other hosts."""
    host = parse_address(text, least_port=0)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
