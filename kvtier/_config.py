"""The configuration of the whole system. Raw mappings end here: behind this module all is typed.

The names are those that vLLM's users know from ``kv_connector_extra_config``, and kvtier's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, StrictBool, field_validator, model_validator

from kvtier import _plugins as plugins
from kvtier import _validation as validation
from kvtier._core.tiering import PRIMARY
from kvtier._quantities import Settings, Size
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers import _registry as registry
from kvtier.tiers._base import TierConfig

ENGINE_KEYS = frozenset({"spec_name", "spec_module_path", "sync_load_budget_bytes"})
"""What vLLM itself reads beside kvtier's settings, whichever spec is in use (0.31 to 0.33)."""

_LONGEST_WAIT_S = 86_400  # no wait without an end
_LEAST_MEMORY = 256 * 2**20  # for the tier process: the interpreter and some threads

_OTHER_SPECS = {
    "backpressure": "it belongs to vLLM's own tiering spec; kvtier holds puts back by itself",
    "cache_policy_module_path": (
        "it belongs to vLLM's own CPU spec; name a policy of the group kvtier.policies in eviction_policy"
    ),
    "tier_poll_interval_s": "it belongs to vLLM's own tiering spec; kvtier does not poll its tiers",
}


class TieringConfig(Settings):
    """Settings of the primary tier, of the secondary tiers and of what goes on between them.

    ``from_mapping`` and ``from_extra_config`` raise one ConfigError with everything that is wrong. The
    constructor raises pydantic's ValidationError, as every model does.
    """

    cpu_bytes_to_use: Annotated[Size, Field(gt=0)] = Field(
        description="Size of the primary tier in host memory, over all workers: bytes, or text like `8GiB`."
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per chunk, a multiple of the engine's block size. Default: as many blocks as "
        "make a chunk of 512 KiB or more, 256 tokens at most; one block for models with state-space layers.",
    )
    blocks_per_chunk: int | None = Field(
        default=None, ge=1, description="Engine blocks per chunk. Set this or `block_size`, not both."
    )
    eviction_policy: str = Field(
        default="lru", description="Who leaves the primary tier first: the name of an installed policy."
    )
    store_threshold: int = Field(
        default=0,
        ge=0,
        description="Store a chunk only when it was asked for this many times; 0 and 1 store at once.",
    )
    max_tracker_size: int = Field(
        default=64_000, ge=1, description="Chunks whose requests are counted for `store_threshold`."
    )
    secondary_tiers: tuple[SerializeAsAny[TierConfig], ...] = Field(
        default=(),
        description="The tiers behind the primary tier, asked in this order; each with its `type`.",
    )
    offload_prompt_only: StrictBool = Field(
        default=True, description="Store only what was computed for prompts, not for generated tokens."
    )
    self_describing_kv_events: StrictBool = Field(
        default=False, description="Send KV events that name tokens and block sizes, not only hashes."
    )
    namespace: str = Field(
        default="", description="Caches with different namespaces share nothing; part of the identity."
    )
    canonical_layout: StrictBool = Field(
        default=False,
        description="Keep chunks as one worker would have them, to share them between tensor-parallel sizes.",
    )
    promotion_budget: float = Field(
        default=0.25, gt=0, le=1, description="Share of the primary tier that promotions may fill at once."
    )
    request_deadline_s: float = Field(
        default=5.0,
        gt=0,
        le=_LONGEST_WAIT_S,
        description="Seconds a request waits for the tiers; what is late is a miss.",
    )
    copy_deadline_s: float = Field(
        default=60.0,
        gt=0,
        le=_LONGEST_WAIT_S,
        description="Seconds after which a device copy that has not ended is given up, and its device too.",
    )
    audit_rate: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="Share of chunks that are audited: read back from the device and compared with what was "
        "stored. 0 for none.",
    )
    isolation: Literal["auto", "thread", "process"] = Field(
        default="auto",
        description="Where the tiers run: `process`, in one of their own, whose end costs misses and nothing "
        "else; `thread`, in the engine's; `auto`, in a process where one can be started (with "
        "`TieringManager` in a thread).",
    )
    isolation_memory_limit: Annotated[Size, Field(ge=_LEAST_MEMORY)] | None = Field(
        default=None,
        description="Memory of its own that the process of the tiers may have, 256MiB at least; "
        "`cpu_bytes_to_use` does not count. What goes beyond fails. Default: no limit.",
    )
    drain_on_shutdown_s: float = Field(
        default=3.0,
        ge=0,
        le=_LONGEST_WAIT_S,
        description="Seconds a shutdown waits for puts that are under way; 1.5 s later it has ended, "
        "whatever hangs. Both count from when vLLM's workers begin to stop: vLLM waits for them first, and "
        "kills an engine that takes longer than 5 s in all.",
    )

    @field_validator("secondary_tiers", mode="before")
    @classmethod
    def _load_tiers(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ValueError("a list of tiers is needed, which may be empty")
        tiers, problems = [], []
        for index, item in enumerate(value):
            try:
                tiers.append(_tier(item, f"secondary_tiers[{index}]"))
            except KVTierError as error:
                problems.append(str(error))
        if problems:  # all of them, and beside them what is wrong elsewhere
            raise validation.explained(problems)
        return tuple(tiers)

    @field_validator("eviction_policy")
    @classmethod
    def _policy_is_installed(cls, value: str) -> str:
        plugins.require(plugins.POLICIES, value, "eviction_policy")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> TieringConfig:
        if self.isolation_memory_limit is not None and self.isolation != "process":
            raise ValueError("isolation_memory_limit needs isolation 'process': set that too, or remove it")
        if self.block_size is not None and self.blocks_per_chunk is not None:
            raise ValueError("give block_size or blocks_per_chunk, not both")
        given = [tier.name for tier in self.secondary_tiers if tier.name is not None]
        if twice := sorted({name for name in given if given.count(name) > 1}):
            raise ValueError(f"secondary_tiers: two tiers have the name {', '.join(twice)}")
        if problem := self.shared_directory():
            raise ValueError(f"secondary_tiers: {problem}: give each a directory of its own")
        if PRIMARY in self.tier_names:
            raise ValueError(
                f"secondary_tiers: {PRIMARY!r} is the name of the primary tier: give that tier another"
            )
        return self

    def shared_directory(self, normal: Callable[[Path], str] = os.path.normpath) -> str:
        """Return which tiers would write into one directory, in words; "" where none would.

        Args:
            normal: spells a path in the one way in which it is compared. The default asks no file system,
                which may hang.
        """
        owners = [
            (normal(path), f"{name} ({path})")
            for name, tier in zip(self.tier_names, self.secondary_tiers, strict=True)
            for path in tier.own_directories()
        ]
        return validation.nesting(owners)

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The tiers' names in logs and metrics: the one given, or the type, or ``<type>-2`` and so on."""
        taken = {tier.name for tier in self.secondary_tiers}
        names: list[str] = []
        for tier in self.secondary_tiers:
            name, number = tier.name or tier.type, 1
            while not tier.name and name in taken:
                number += 1
                name = f"{tier.type}-{number}"
            taken.add(name)
            names.append(name)
        return tuple(names)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object]) -> TieringConfig:
        """Validate what a user wrote.

        Raises:
            ConfigError: settings are unknown, missing or wrong, or a tier's plug-in cannot be used; the
                message names each of them.
        """
        return validation.build(cls, raw)

    @classmethod
    def from_extra_config(cls, raw: Mapping[str, object]) -> TieringConfig:
        """Validate vLLM's ``kv_connector_extra_config``, in which some keys are vLLM's own.

        Raises:
            ConfigError: settings are unknown, missing or wrong, or a tier's plug-in cannot be used; the
                message names each of them.
        """
        if foreign := sorted(_OTHER_SPECS.keys() & raw.keys()):
            raise ConfigError("; ".join(f"remove {key}: {_OTHER_SPECS[key]}" for key in foreign))
        return cls.from_mapping({key: value for key, value in raw.items() if key not in ENGINE_KEYS})


def _tier(item: object, where: str) -> TierConfig:
    if isinstance(item, TierConfig):
        return item
    if isinstance(item, Mapping):
        return registry.validate(item, where)
    raise ConfigError(f"{where} must be a mapping with the key type, not {type(item).__name__}")
