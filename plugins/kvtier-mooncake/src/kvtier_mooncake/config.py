"""Settings of the Mooncake tier."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from kvtier.tiers import Size, TierConfig

_DEFAULT_PORT = 50051
P2P = "P2PHANDSHAKE"
"""The metadata "server" that stands for none: clients ask each other."""
_METADATA_SERVERS: Final = ("http", "https", "etcd", "redis")


class MooncakeConfig(TierConfig):
    """Settings of the Mooncake tier."""

    type: str = Field(
        default="mooncake", description="Name of the tier's entry point in the group kvtier.tiers."
    )
    master: str = Field(
        default=f"127.0.0.1:{_DEFAULT_PORT}",
        description="Address of `mooncake_master`: `host:port`.",
    )
    metadata_server: str = Field(
        default=P2P,
        description="Where clients find each other's memory: `P2PHANDSHAKE` (they ask each other), "
        "`http://host:port/metadata`, or `etcd://host:port`. The same for all clients of a master.",
    )
    local_hostname: str | None = Field(
        default=None,
        description="Name or address under which other hosts reach this one. Default: the address that "
        "connections to the master leave from.",
    )
    protocol: str = Field(
        default="tcp",
        pattern=r"^[a-z_]{2,20}$",
        description="Transport of the bytes: `tcp`, `rdma`, or another one that the installed build has.",
    )
    device_names: tuple[str, ...] = Field(
        default=(), description="RDMA devices, such as `mlx5_0`. Default: those that Mooncake discovers."
    )
    segment_bytes: Size = Field(
        default=Size(0),
        description="Host memory that this engine contributes to the pool, in addition to the primary tier. "
        "0: it contributes none, and other clients of the master must.",
    )
    replicas: int = Field(
        default=1, ge=1, le=16, description="Copies of each chunk, on different segments where there are any."
    )
    key_prefix: str = Field(
        default="kvtier", pattern=r"^[A-Za-z0-9_.:/-]{1,100}$", description="Prefix of all keys."
    )

    @field_validator("master")
    @classmethod
    def _require_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{value!r} is not host:port, such as 10.0.0.1:{_DEFAULT_PORT}")
        return value

    @field_validator("metadata_server")
    @classmethod
    def _require_metadata_server(cls, value: str) -> str:
        url = urlsplit(value)
        if value != P2P and not (url.scheme in _METADATA_SERVERS and url.hostname and url.port):
            raise ValueError(
                f"{value!r} is neither {P2P} nor a URL with a port, such as http://10.0.0.1:8080/metadata"
            )
        return value

    @property
    def metadata_address(self) -> tuple[str, int] | None:
        """Host and port of the metadata server; None if there is none."""
        url = urlsplit(self.metadata_server)
        return (url.hostname, url.port) if url.hostname and url.port else None

    @property
    def master_address(self) -> tuple[str, int]:
        """Host and port of the master."""
        host, _, port = self.master.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)
