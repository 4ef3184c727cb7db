"""Settings of the file tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kvtier._quantities import Size
from kvtier.tiers._base import TierConfig


class FsConfig(TierConfig):
    """Settings of a tier that keeps chunks as files below one directory."""

    type: str = Field(default="fs", description="Name of the tier's entry point in the group kvtier.tiers.")
    root_dir: Path = Field(
        description="Directory that holds the chunks; made where it is missing. For several disks: one "
        "directory on a striped volume (RAID 0, LVM).",
    )
    n_threads: int = Field(
        default=8,
        ge=1,
        le=256,
        description="I/O threads for reads, and as many for writes. Idle ones serve the others, but for one "
        "that is always reserved for reads.",
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
    max_bytes: Size | None = Field(
        default=None,
        description="Bytes, such as 100GiB, that everything below root_dir may take, all engines that use it "
        "together; puts beyond are refused. Default: 80 % of what is free and what root_dir already holds.",
    )
    min_free_bytes: Size | None = Field(
        default=None,
        description="Bytes of the file system, such as 10GiB, that stay free; puts are refused below. "
        "Default: 5 % of it, and at most 32 GiB.",
    )
    eviction: Literal["reuse", "none"] = Field(
        default="reuse",
        description="How room is made. 'reuse': what was not used for long leaves, what was used only once "
        "sooner. 'none': nothing leaves, and puts are refused where root_dir is full.",
    )
    high_watermark: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="Share of what root_dir may hold above which room is made in the background.",
    )
    low_watermark: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="Share of what root_dir may hold at which that ends.",
    )
    ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds after which a chunk that was not used is removed. It is looked for every "
        "`recount_s` seconds, or every `ttl_s` where that is less. Default: never.",
    )
    recount_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds between two counts of root_dir's bytes, which learn what was written and "
        "removed past the engines; what is left over is swept then, too. One engine counts for all.",
    )

    @field_validator("root_dir", mode="before")
    @classmethod
    def _names_something(cls, value: Any) -> Any:
        if isinstance(value, str) and (not value or "\0" in value):
            raise ValueError("an empty path, or one with a NUL: name a directory")
        if isinstance(value, list | tuple):
            raise ValueError("name one directory: for several disks, one on a striped volume (RAID 0, LVM)")
        return value

    @field_validator("root_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    def own_directories(self) -> Sequence[Path]:
        """Return the root."""
        return (self.root_dir,)

    @model_validator(mode="after")
    def _marks_in_order(self) -> FsConfig:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"low_watermark is {self.low_watermark:g}, and must be less than high_watermark, which is "
                f"{self.high_watermark:g}"
            )
        return self
