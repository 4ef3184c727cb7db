"""The configuration of kvtier. Raw mappings are validated here; every other module gets typed settings.

Names match vLLM's ``kv_connector_extra_config`` where vLLM has the same setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, StrictBool, field_validator, model_validator

from kvtier import _plugins as plugins
from kvtier._core.shared import PRIMARY
from kvtier._core.tiers.load_gate import LoadGateMode
from kvtier._settings import validation
from kvtier._settings.quantities import Settings, Size
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers import _registry as registry
from kvtier.tiers._adopted import ADOPTED, AdoptedConfig
from kvtier.tiers._base import TierConfig
from kvtier.tiers.fs._config import FsConfig

ENGINE_KEYS = frozenset({"spec_name", "spec_module_path", "sync_load_budget_bytes"})
"""Keys of the same mapping that vLLM itself reads, with any spec (0.31 to 0.33)."""

_CONNECTOR_KEYS = (
    "kv_connector",
    "kv_role",
    "kv_load_failure_policy",
    "kv_connector_module_path",
    "engine_id",
)

_LONGEST_WAIT_S = 86_400  # every wait must have an end
_LEAST_MEMORY = 256 * 2**20  # memory of the tier process for the interpreter and some threads

_OTHER_SPECS = {
    "backpressure": "it belongs to vLLM's own tiering spec; kvtier applies back-pressure automatically",
    "cache_policy_module_path": (
        "it belongs to vLLM's own CPU spec; name a policy of the group kvtier.policies in eviction_policy"
    ),
    "tier_poll_interval_s": "it belongs to vLLM's own tiering spec; kvtier does not poll its tiers",
}


class TieringConfig(Settings):
    """Settings of the primary tier, the secondary tiers, and the transfers between them.

    ``from_mapping`` and ``from_extra_config`` raise one ConfigError that lists every problem. The constructor
    raises pydantic's ValidationError, like any pydantic model.
    """

    cpu_bytes_to_use: Annotated[Size, Field(gt=0)] = Field(
        description="Size of the primary tier in host memory, for all workers of the engine together. Bytes, "
        "or text like `64GiB`."
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per chunk; a multiple of the engine's block size. Smaller chunks match more of a "
        "prompt, larger ones transfer faster. Default: the smallest multiple whose chunk has 512 KiB, at "
        "most 256 tokens; one block for models with state-space layers.",
    )
    blocks_per_chunk: int | None = Field(
        default=None, ge=1, description="Engine blocks per chunk, instead of `block_size`. Set at most one."
    )
    eviction_policy: str = Field(
        default="auto",
        description="Eviction policy of the primary tier: `auto`, `lru`, `arc`, `lhd` or the name of "
        "an installed policy.",
    )
    store_threshold: int = Field(
        default=0,
        ge=0,
        description="Store a chunk when the engine offers it for the n-th time. 0 and 1 store every chunk; 2 "
        "skips chunks that are computed only once, and so writes less.",
    )
    max_tracker_size: int = Field(
        default=64_000,
        ge=1,
        description="Number of chunks whose offers are remembered for `store_threshold` and for each tier's "
        "`write_policy`.",
    )
    secondary_tiers: tuple[SerializeAsAny[TierConfig], ...] = Field(
        default=(),
        description="Secondary tiers in lookup order, fastest first. Each has a `type` and that tier's "
        "settings.",
    )
    offload_prompt_only: StrictBool = Field(
        default=True,
        description="Store only the KV of prompts. `false` also stores generated tokens, which helps "
        "conversations.",
    )
    self_describing_kv_events: StrictBool = Field(
        default=False,
        description="Publish KV events with token ids, parent hash, block size and extra keys, for routers "
        "that need more than hashes. Needs `KVTierConnector`.",
    )
    namespace: str = Field(
        default="",
        description="Part of the cache's identity: engines with different namespaces share no chunks. Set it "
        "to keep engines apart, or when kvtier cannot tell two sets of weights apart.",
    )
    immutable_adapters: StrictBool = Field(
        default=False,
        description="The path of a LoRA adapter always has the same weights: new weights get a new path. "
        "Without this promise, an engine with LoRA shares no chunks, and finds none after a restart.",
    )
    keep_host_memory_s: float = Field(
        default=0.0,
        ge=0,
        le=_LONGEST_WAIT_S,
        description="Seconds that the primary tier's memory stays when the engine ends, however it ends. If "
        "it starts again meanwhile, with the same model, weights and layout, it finds its chunks there. Each "
        "is verified before its first use. 0: the memory is freed at once. Only with vLLM.",
    )
    canonical_layout: StrictBool = Field(
        default=False,
        description="Store chunks as a single worker would, so that engines of different tensor-parallel "
        "sizes share them. Set it on all of these engines.",
    )
    promotion_budget: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Largest share of the primary tier that promotions may occupy at a time. Raise it if "
        "`kvtier_misses` counts the reason `budget`.",
    )
    pin_budget: float = Field(
        default=0.25,
        ge=0,
        le=0.9,
        description="Largest share of the primary tier that requests may reserve with `ttl_s`, `pin` or "
        "`priority` in their `kv_transfer_params`. 0: none. Only with vLLM.",
    )
    request_deadline_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="Longest time that a request waits for secondary tiers, in seconds; chunks that are "
        "still pending then are misses. Lower it if computing is faster than waiting.",
    )
    max_wait_s: float = Field(
        default=30.0,
        ge=0,
        le=_LONGEST_WAIT_S,
        description="Longest time that a request may wait for chunks that another engine is still "
        "computing (`wait_s` in its `kv_transfer_params`), in seconds; `request_deadline_s` begins when it "
        "ends. 0: none waits. Only with vLLM.",
    )
    load_gate: LoadGateMode = Field(
        default="off",
        description="When to compute chunks although a secondary tier has them. `off`: never. `latency`: if "
        "computing gives the first token sooner, by the measured speed of the engine and of the tier. "
        "`throughput`: the same, but never while other requests keep the device busy. Until both speeds are "
        "known, everything is loaded.",
    )
    copy_deadline_s: float = Field(
        default=60.0,
        ge=1,
        le=_LONGEST_WAIT_S,
        description="Seconds after which a device copy counts as hung. kvtier then stops using the device "
        "until the engine is restarted.",
    )
    audit_rate: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="Share of chunks to audit: their bytes are read back from the device and compared with a "
        "checksum. Costs about 600 µs per MiB audited; 0 disables audits.",
    )
    explain_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of requests for which a log line says what each tier had and why the prefix "
        "ended. A request can also ask for its own line. Only with vLLM.",
    )
    isolation: Literal["auto", "thread", "process"] = Field(
        default="auto",
        description="Where secondary tiers run. `process`: in a separate process, whose crash causes only "
        "misses. `thread`: in a thread of the engine. `auto`: in a process if one can be started, else in a "
        "thread; with `TieringManager`, on its event loop.",
    )
    isolation_memory_limit: Annotated[Size, Field(ge=_LEAST_MEMORY)] | None = Field(
        default=None,
        description="Limit on the tier process's own memory, at least 256MiB; the primary tier does not "
        "count. An allocation beyond it fails with `MemoryError`. Requires `isolation` `process`. Default: "
        "no limit.",
    )
    drain_on_shutdown_s: float = Field(
        default=3.0,
        ge=0,
        le=_LONGEST_WAIT_S,
        description="Seconds that a shutdown waits for puts in flight. It ends at most 1.5 s later, even if "
        "a tier hangs. With vLLM both count from when its workers begin to stop; `vllm serve` kills the "
        "engine at once unless `--shutdown-timeout` is set, other programs after 5 s.",
    )

    @field_validator("secondary_tiers", mode="before")
    @classmethod
    def _load_tiers(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ValueError("a list of tiers is needed; it may be empty")
        tiers, problems = [], []
        for index, item in enumerate(value):
            try:
                tiers.append(_tier(item, f"secondary_tiers[{index}]"))
            except KVTierError as error:
                problems.append(str(error))
        if problems:  # reported together with problems of other settings
            raise validation.explained(problems)
        return tuple(tiers)

    @field_validator("eviction_policy")
    @classmethod
    def _require_policy(cls, value: str) -> str:
        plugins.require(plugins.POLICIES, value, "eviction_policy")
        return value

    @model_validator(mode="after")
    def _require_consistency(self) -> TieringConfig:
        if self.isolation_memory_limit is not None and self.isolation != "process":
            raise ValueError("isolation_memory_limit requires isolation 'process': set both, or remove it")
        if self.block_size is not None and self.blocks_per_chunk is not None:
            raise ValueError("set block_size or blocks_per_chunk, not both")
        given = [tier.name for tier in self.secondary_tiers if tier.name is not None]
        if twice := sorted({name for name in given if given.count(name) > 1}):
            raise ValueError(f"secondary_tiers: two tiers have the name {', '.join(twice)}")
        if problem := self.shared_directory():
            raise ValueError(f"secondary_tiers: {problem}: give each its own directory")
        for name, use in ((PRIMARY, "the primary tier"), (ADOPTED, "chunks of an earlier engine")):
            if name in given or name in [tier.type for tier in self.secondary_tiers]:
                raise ValueError(f"secondary_tiers: {name!r} is reserved for {use}: rename that tier")
        return self

    def shared_directory(self, normal: Callable[[Path], str] = os.path.normpath) -> str:
        """Return a sentence that names the tiers that would write into one directory; "" if there are none.

        ``normal`` normalises a path. The default does not access the file system, which could hang.
        """
        owners = [
            (normal(path), f"{name} ({path})")
            for name, tier in zip(self.tier_names, self.all_tiers, strict=True)
            for path in tier.own_directories()
        ]
        return validation.nesting(owners)

    @property
    def all_tiers(self) -> tuple[TierConfig, ...]:
        """The secondary tiers, preceded by the tier of chunks that an earlier engine left."""
        return (AdoptedConfig(), *self.secondary_tiers) if self.keep_host_memory_s else self.secondary_tiers

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The names of ``all_tiers`` in logs and metrics: ``name`` if set, else the type, ``<type>-2`` ..."""
        taken = {tier.name for tier in self.all_tiers}
        names: list[str] = []
        for tier in self.all_tiers:
            name, number = tier.name or tier.type, 1
            while not tier.name and name in taken:
                number += 1
                name = f"{tier.type}-{number}"
            taken.add(name)
            names.append(name)
        return tuple(names)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object]) -> TieringConfig:
        """Return the configuration that a user wrote, validated.

        Raises:
            ConfigError: settings are unknown, missing or wrong, or a tier's plug-in cannot be used; the
                message names each of them.
        """
        places = dict.fromkeys(FsConfig.model_fields, "into a tier of secondary_tiers")
        places |= dict.fromkeys(_CONNECTOR_KEYS, "out of kv_connector_extra_config, next to kv_connector")
        return validation.build(cls, raw, "", places)

    @classmethod
    def from_extra_config(cls, raw: Mapping[str, object]) -> TieringConfig:
        """Return the configuration in vLLM's ``kv_connector_extra_config``, without vLLM's own keys.

        Raises as ``from_mapping``.
        """
        if foreign := sorted(_OTHER_SPECS.keys() & raw.keys()):
            raise ConfigError("; ".join(f"remove {key}: {_OTHER_SPECS[key]}" for key in foreign))
        return cls.from_mapping({key: value for key, value in raw.items() if key not in ENGINE_KEYS})


def _tier(item: object, where: str) -> TierConfig:
    if isinstance(item, TierConfig):
        return item
    if isinstance(item, Mapping):
        places = dict.fromkeys(TieringConfig.model_fields, "out of secondary_tiers")
        return registry.validate(item, where, places)
    raise ConfigError(f"{where} must be a mapping with the key type, not {type(item).__name__}")
