"""Builds the parts from a configuration. The only module that imports all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import convert

from kvtier import _plugins as plugins
from kvtier._config import TieringConfig
from kvtier._core.limits import Limits
from kvtier._core.tiering import Tiering
from kvtier._core.tiers.breaker import Breaker
from kvtier._core.tiers.tier_status import TierStatus
from kvtier._core.tiers.write_admission import WriteAdmission
from kvtier._execution.executor import Executor, ExecutorThread, NamedTier
from kvtier._identity import Identity
from kvtier._isolation.process import AnyExecutor, ExecutorProcess
from kvtier._isolation.remote import RemoteExecutor
from kvtier._log import GuardedLogger
from kvtier.errors import ConfigError, IsolationError
from kvtier.policies._base import EvictionPolicy
from kvtier.tiers import _registry as registry
from kvtier.tiers import _seal as seals
from kvtier.tiers._activity import puts_at_once
from kvtier.tiers._adopted import ADOPTED
from kvtier.tiers._base import TierConfig

logger = GuardedLogger("kvtier.executor")

_OF_VLLM = (
    "block_size",
    "explain_rate",
    "immutable_adapters",
    "keep_host_memory_s",
    "self_describing_kv_events",
)
"""Settings whose default is nothing and that ``open_manager`` cannot honour."""

LEAST_CHUNKS = 4  # with fewer chunks a tier refuses every put

if TYPE_CHECKING:
    from kvtier._core.slot_trailers import SlotTrailers
    from kvtier._device.base import KVCaches
    from kvtier._manager.manager import TieringManager
    from kvtier._memory.layout import SlotLayout
    from kvtier._memory.region import Region
    from kvtier._memory.slot_checksums import SlotChecksums
    from kvtier.keys import OffloadKey


def make_core(
    config: TieringConfig,
    chunk_bytes: int,
    *,
    windowed_groups: frozenset[int] = frozenset(),
    track_kv_events: bool = False,
) -> Tiering:
    """Make the state machine that ``config`` describes, for chunks of this length. It has no slots yet."""
    name = config.eviction_policy
    policy = plugins.load(plugins.POLICIES, name, EvictionPolicy, "eviction_policy")
    tiers = zip(config.tier_names, config.all_tiers, strict=True)
    statuses = [make_tier_status(name, tier, chunk_bytes, config.max_tracker_size) for name, tier in tiers]
    limits = convert(config, Limits, from_attributes=True)  # settings have the same names
    made = plugins.make(plugins.POLICIES, name, policy)
    return Tiering(made, statuses, limits, windowed_groups=windowed_groups, track_kv_events=track_kv_events)


def make_tier_status(name: str, tier: TierConfig, chunk_bytes: int, remembered: int) -> TierStatus:
    """Make the core's status of a tier with these settings; ``remembered``: see ``WriteAdmission``."""
    max_bytes = getattr(tier, "max_bytes", None)
    if max_bytes is not None and max_bytes < LEAST_CHUNKS * chunk_bytes:
        needed = f"{LEAST_CHUNKS} chunks of {chunk_bytes} bytes"
        raise ConfigError(f"tier {name}: max_bytes ({max_bytes}) must have room for at least {needed}")
    chunks_per_day = tier.write_bytes_per_day / chunk_bytes if tier.write_bytes_per_day is not None else None
    return TierStatus(
        name,
        tier.deadline_s,
        width=puts_at_once(tier.max_concurrency),
        breaker=partial(Breaker, tier.breaker_failures, tier.breaker_pause_s, random.random),
        writes=WriteAdmission(tier.write_policy, chunks_per_day, remembered),
        in_place=tier.type == ADOPTED,
    )


def adopted_slots(trailers: SlotTrailers, identity: Identity) -> dict[OffloadKey, int]:
    """Return the slots of chunks left by an earlier engine, by key, least recently used first."""
    found: dict[OffloadKey, int] = {}
    for slot, trailer in trailers.adopt():
        sealed = seals.read(trailer)
        if sealed is not None and sealed.digest == identity.short_digest:
            found.pop(sealed.key, None)
            found[sealed.key] = slot
    if found:
        logger.info("the primary tier has %d chunks of an engine that has ended", len(found))
    return found


def make_tiers(config: TieringConfig) -> list[NamedTier]:
    """Make the tiers that ``config`` names, not opened yet."""
    tiers = zip(config.tier_names, config.all_tiers, strict=True)
    return [NamedTier(name, registry.maker(tier)) for name, tier in tiers]


def start_executor(
    config: TieringConfig,
    tiers: Sequence[NamedTier],
    identity: Identity,
    region: Region,
    slot_checksums: SlotChecksums | None = None,
) -> AnyExecutor:
    """Start the executor of the tiers, in the thread or process that ``isolation`` selects.

    With ``auto`` that is a tier process, or a thread, with a warning, if none can be started. A tier that
    crashes its process does not move to a thread: there it would end the engine. With ``process`` it raises
    ConfigError or IsolationError instead.
    """
    thread = ExecutorThread(partial(Executor, tiers, identity, region, slot_checksums=slot_checksums))
    if config.isolation == "thread" or (config.isolation == "auto" and not tiers):
        thread.start()
        return thread
    try:
        process = ExecutorProcess(
            *(tiers, identity, region),
            slot_checksums=slot_checksums,
            memory_limit_bytes=config.isolation_memory_limit,
        )
        process.start()
    except (ConfigError, IsolationError) as error:
        if config.isolation == "process":
            raise
        logger.warning("%s; tiers run in a thread of the engine, so a crash in a tier ends the engine", error)
        thread.start()
        return thread
    return process


def slots_for(config: TieringConfig, chunk_bytes: int) -> int:
    """Return how many chunks fit into the primary tier. ConfigError if none does."""
    slots = int(config.cpu_bytes_to_use) // chunk_bytes
    if not slots:
        raise ConfigError(
            f"cpu_bytes_to_use ({int(config.cpu_bytes_to_use)}) is too small for a chunk of {chunk_bytes} "
            "bytes; set it to several hundred chunks or more"
        )
    return slots


def open_manager(
    config: TieringConfig,
    identity: Identity,
    kv_caches: KVCaches,
    *,
    windowed_groups: Sequence[int] = (),
) -> TieringManager:
    """Return a ``TieringManager``, to be entered with ``async with``.

    With ``isolation`` ``auto`` the tiers run on the program's event loop and the primary tier is private
    memory of the program, because a library should not start processes unasked. ``process`` needs room for
    the primary tier in ``/dev/shm``, which has only 64 MiB in many containers.

    Args:
        config: the settings. ``blocks_per_chunk`` is 1 by default.
        identity: everything that the bytes depend on; see ``Identity.make``. The settings' ``namespace``, and
            the layout of slots that hold several pages, are added to it.
        kv_caches: the engine's KV tensors.
        windowed_groups: KV cache groups with sliding-window attention: a lookup may hit in the middle of a
            prompt without its front.

    Raises:
        ConfigError: the primary tier is smaller than one chunk, a tier smaller than four, no backend can copy
            these tensors, ``canonical_layout`` is set and ``kv_caches`` has no page mappings, mappings leave
            bytes of a page to other workers, the identity has another ``namespace`` than the settings, or a
            setting works only with vLLM, as ``block_size`` and ``keep_host_memory_s`` do.
        RegionError: the machine has not enough memory for the primary tier.
    """
    from kvtier._device.auto import open_transfer_engine
    from kvtier._manager.manager import TieringManager
    from kvtier._memory.layout import SlotLayout

    if given := [name for name in _OF_VLLM if getattr(config, name)]:
        more = "; set blocks_per_chunk in place of block_size" if "block_size" in given else ""
        raise ConfigError(f"only with vLLM: {', '.join(given)}; remove them{more}")
    refs = [ref for group in kv_caches.groups for ref in group]
    if config.canonical_layout and not all(ref.mapping for ref in refs):
        raise ConfigError(
            "canonical_layout is set, but the KV tensors have no mappings (PageRef.mapping): remove it"
        )
    if not all(ref.is_whole for ref in refs):
        raise ConfigError(
            "the mappings of the KV tensors (PageRef.mapping) leave bytes of a page to other workers, but a "
            "manager works without other workers: remove them, and give each worker its own identity"
        )
    layout = SlotLayout.make(kv_caches.page_bytes, config.blocks_per_chunk or 1, rank=0, workers=1)
    identity = _with_settings(identity, config.namespace, layout)
    region, slot_checksums = _make_memory(config, layout)
    engine = open_transfer_engine(kv_caches, layout, region, deadline_s=config.copy_deadline_s)
    if slot_checksums is not None:
        engine.begin_audits(slot_checksums)
    tiers = make_tiers(config)
    make_process = partial(
        ExecutorProcess,
        *(tiers, identity, region),
        slot_checksums=slot_checksums,
        memory_limit_bytes=config.isolation_memory_limit,
    )
    return TieringManager(
        core=make_core(config, layout.chunk_bytes, windowed_groups=frozenset(windowed_groups)),
        tiers=tiers,
        identity=identity,
        region=region,
        engine=engine,
        blocks_per_chunk=layout.blocks_per_chunk,
        num_blocks=kv_caches.num_blocks,
        drain_s=config.drain_on_shutdown_s,
        slot_checksums=slot_checksums,
        make_executor=partial(RemoteExecutor, make_process) if config.isolation == "process" else None,
    )


def _with_settings(identity: Identity, namespace: str, layout: SlotLayout) -> Identity:
    """Return the identity with the settings' ``namespace``, and with the layout of slots of several pages."""
    fields = dict(identity.fields)
    if namespace and fields.setdefault("namespace", namespace) != namespace:
        raise ConfigError(
            f"namespace is {namespace!r} in the settings, but {fields['namespace']!r} in the identity: "
            "remove one of them"
        )
    if layout.blocks_per_chunk > 1 or len(layout.page_bytes) > 1:
        fields["kvtier_layout"] = [layout.blocks_per_chunk, *layout.page_bytes]
    return Identity(identity.model, fields)


def _make_memory(config: TieringConfig, layout: SlotLayout) -> tuple[Region, SlotChecksums | None]:
    """Return the memory of the primary tier and its checksums, for a process without workers."""
    from kvtier._memory.region import Region
    from kvtier._memory.slot_checksums import SlotChecksums, slot_checksums_bytes

    slots, rate = slots_for(config, layout.chunk_bytes), config.audit_rate
    if config.isolation != "process":
        region = Region.anonymous(slots, layout.chunk_bytes)
        return region, SlotChecksums.private(region, rate, layout.area_bytes) if rate else None
    region = Region.unnamed(slots, layout.chunk_bytes, slot_checksums_bytes(slots, 1) if rate else 0)
    return region, SlotChecksums.shared(region, rate, 1, layout.area_bytes) if rate else None
