"""Settings of the file tier."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from kvtier.tiers.base import TierConfig


class FsConfig(TierConfig):
    """Settings of a tier that keeps chunks as files below one directory."""

    type: str = Field(default="fs", description="Name of the tier's entry point in the group kvtier.tiers.")
    root_dir: Path = Field(description="Directory that holds the chunks. It is made where it is missing.")
    n_threads: int = Field(
        default=8,
        ge=1,
        le=256,
        description="I/O threads of the tier: so many for reads and as many for writes, so that neither "
        "waits for the other.",
    )
    direct_io: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether files bypass the page cache (O_DIRECT). 'auto': where the file system can.",
    )
    durability: Literal["none", "data", "full"] = Field(
        default="none",
        description="What has reached the device when a put ends. 'none': nothing need have; what a power "
        "cut tears is found by its checksum. 'data': the file's bytes. 'full': its name as well.",
    )
    max_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Bytes that everything below root_dir may take; puts beyond are refused. Default: 80 % "
        "of what is free when the tier opens and what root_dir already holds.",
    )
    min_free_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Bytes of the file system that stay free; puts are refused below. Default: 5 % of it, "
        "and at most 32 GiB.",
    )
    recount_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds between two counts of root_dir's bytes, which learn what others wrote and "
        "removed; what is left over is swept then, too.",
    )

    @field_validator("root_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()
