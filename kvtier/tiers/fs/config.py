"""Settings of the file tier."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kvtier import validation
from kvtier.quantities import Size
from kvtier.tiers.base import TierConfig


class FsConfig(TierConfig):
    """Settings of a tier that keeps chunks as files below one directory."""

    type: str = Field(default="fs", description="Name of the tier's entry point in the group kvtier.tiers.")
    root_dir: Path = Field(
        description="Directory that holds the chunks. It is made where it is missing. A list of several, "
        "mostly on disks of their own: chunks are spread over them, and all settings hold for each."
    )
    more_root_dirs: tuple[Path, ...] = Field(
        default=(), description="The others, where `root_dir` is a list: they go there."
    )
    n_threads: int = Field(
        default=8,
        ge=1,
        le=256,
        description="I/O threads of the tier: so many for reads and as many for writes, so that neither "
        "waits for the other.",
    )
    n_read_threads: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="I/O threads for reads. They take over writes while there is nothing to read, but for "
        "one. Default: `n_threads`.",
    )
    n_write_threads: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="I/O threads for writes. They take over reads, which go first, but for one. Default: "
        "`n_threads`.",
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
    layout: Literal["kvtier", "vllm"] = Field(
        default="kvtier",
        description="How directories and files are named and what is in a file. 'vllm': as vLLM's own fs "
        "tier has it, to share a root with it; only with `integrity` 'none'.",
    )
    integrity: Literal["crc32c", "none"] = Field(
        default="crc32c",
        description="How a get proves a chunk's bytes. 'crc32c': by the checksum and the identity behind "
        "them. 'none': not at all, which is what sharing with vLLM's own fs tier costs.",
    )
    format: Literal["auto", "files", "segments"] = Field(
        default="auto",
        description="How chunks lie on disk. 'files': a file for each. 'segments': many in one file. 'auto': "
        "as they lie there already; else segments for chunks below 256 KiB, and files.",
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

    @model_validator(mode="before")
    @classmethod
    def _several_roots(cls, given: Any) -> Any:
        """Take a list as ``root_dir``: the first of it stays, the others go to ``more_root_dirs``."""
        if not isinstance(given, Mapping) or not isinstance(given.get("root_dir"), list | tuple):
            return given
        first, *others = given["root_dir"] or [None]
        if first is None:
            raise ValueError("root_dir is an empty list: name at least one directory")
        if others and given.get("more_root_dirs"):
            raise ValueError("root_dir is a list and more_root_dirs is given, too: leave the latter away")
        return {**given, "root_dir": first, **({"more_root_dirs": others} if others else {})}

    @field_validator("root_dir", "more_root_dirs", mode="before")
    @classmethod
    def _names_something(cls, value: Any) -> Any:
        for path in value if isinstance(value, list | tuple) else [value]:
            if isinstance(path, str) and (not path or "\0" in path):
                raise ValueError("an empty path, or one with a NUL: name a directory")
        return value

    @field_validator("root_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("more_root_dirs")
    @classmethod
    def _all_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser().absolute() for path in value)

    @model_validator(mode="after")
    def _different_roots(self) -> FsConfig:
        named = [(os.path.normpath(root), str(root)) for root in self.root_dirs]
        if problem := validation.nesting(named):
            raise ValueError(f"root_dir: {problem}: chunks are spread over different ones")
        return self

    def own_directories(self) -> Sequence[Path]:
        """Return all roots."""
        return self.root_dirs

    @property
    def root_dirs(self) -> tuple[Path, ...]:
        """All roots."""
        return (self.root_dir, *self.more_root_dirs)

    def of_root(self, root: Path) -> FsConfig:
        """Return the settings of one of the roots."""
        return self.model_copy(update={"root_dir": root, "more_root_dirs": ()})

    @model_validator(mode="after")
    def _marks_in_order(self) -> FsConfig:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"low_watermark is {self.low_watermark:g}, and must be less than high_watermark, which is "
                f"{self.high_watermark:g}"
            )
        return self

    @model_validator(mode="after")
    def _proves_what_it_can(self) -> FsConfig:
        if self.layout == "vllm" and self.integrity != "none":
            raise ValueError(
                "layout 'vllm' keeps no checksums, so what is read cannot be proven: say integrity 'none' as "
                "well, or leave layout away"
            )
        if self.layout == "vllm" and self.format == "segments":
            raise ValueError("layout 'vllm' is a file for each chunk: format 'segments' does not go with it")
        if self.layout == "kvtier" and self.integrity == "none":
            raise ValueError("integrity 'none' is for layout 'vllm' alone: leave it away")
        return self
