"""Settings of the file tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kvtier._settings.quantities import Size, SizeOrShare
from kvtier.tiers._base import TierConfig
from kvtier.tiers.fs._files.chunk_files import require_library


class FsConfig(TierConfig):
    """Settings of the tier ``fs``, which keeps chunks as files below one directory.

    Raises:
        TierError: the native library is not loaded.
    """

    type: str = Field(
        default="fs", description="Type of the tier: the name of its entry point in `kvtier.tiers`."
    )
    root_dir: Path = Field(
        description="Directory for the chunks; created if missing. To use several disks, name a directory on "
        "a striped volume (RAID 0, LVM)."
    )
    n_threads: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Number of I/O threads for reads, and as many for writes. Idle threads serve the other "
        "queue, except one that is always reserved for reads.",
    )
    direct_io: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Bypass the page cache (O_DIRECT). `auto`: on local file systems and FUSE, if they "
        "support it. On others, such as NFS, a read may outlive its process.",
    )
    durability: Literal["none", "data", "full"] = Field(
        default="none",
        description="What is flushed to the disk before a put ends. `none`: nothing; chunks torn by a power "
        "cut fail their checksum. `data`: the file's bytes. `full`: also its name.",
    )
    max_bytes: Size | None = Field(
        default=None,
        description="Maximum size of everything below `root_dir`, for all engines that use it together; puts "
        "beyond it are refused. Default: 80 % of the sum of free bytes and bytes that `root_dir` already "
        "holds.",
    )
    min_free_bytes: SizeOrShare | None = Field(
        default=None,
        description="Bytes of the file system to keep free, or a share of it such as `12%`; puts are refused "
        "below that. Default: 16 %, more than the kubelet's thresholds.",
    )
    eviction: Literal["reuse", "none"] = Field(
        default="reuse",
        description="Eviction policy. `reuse`: the chunks that are least likely to be used soon leave first, "
        "by how often and how long ago they were used. `none`: nothing is evicted, and puts are refused "
        "when `root_dir` is full.",
    )
    high_watermark: float = Field(
        default=0.97, gt=0, le=1, description="Share of the size limit at which background eviction starts."
    )
    low_watermark: float = Field(
        default=0.93, ge=0, lt=1, description="Share of the size limit at which background eviction stops."
    )
    ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds after its last use at which a chunk is removed. Checked every `recount_s` "
        "seconds, or every `ttl_s` if that is shorter. Default: never.",
    )
    recount_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds between two counts of the bytes below `root_dir`, which find what other "
        "programs wrote or removed. Leftovers of dead writers are removed at the same time. One engine "
        "counts for all.",
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
        return (self.root_dir,)

    @model_validator(mode="after")
    def _require_library(self) -> FsConfig:
        require_library()
        return self

    @model_validator(mode="after")
    def _require_order_of_marks(self) -> FsConfig:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"low_watermark is {self.low_watermark:g}, and must be less than high_watermark, which is "
                f"{self.high_watermark:g}"
            )
        return self
