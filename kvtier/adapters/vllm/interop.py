"""What vLLM's own fs tier calls the cache of this engine, and whether it keeps the same bytes.

Its name for a cache covers less than kvtier's identity: the model's name, the dtype, the groups' layers,
block and chunk size, and the parallel sizes. What it leaves out cannot be told apart in a root that is
shared with it.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvtier.adapters.vllm.compat import EngineContext, hash_seed
from kvtier.adapters.vllm.parallel import SlotShape
from kvtier.config import TieringConfig
from kvtier.errors import ConfigError
from kvtier.identity import Identity
from kvtier.memory.layout import whole_pages
from kvtier.tiers.fs.config import FsConfig

_REMEDY = "leave layout and integrity away"


def shares_files(settings: TieringConfig) -> bool:
    """Say whether a tier of these settings shares its root with vLLM's own fs tier."""
    return any(isinstance(tier, FsConfig) and tier.layout == "vllm" for tier in settings.secondary_tiers)


def native_identity(
    spec: OffloadingSpec, engine: EngineContext, shape: SlotShape, namespace: str
) -> Identity:
    """Return this cache as vLLM's own fs tier names it: the directory, and what its config.json holds.

    Args:
        spec: any spec of this engine; vLLM's own function makes the name from it.
        engine: the engine's own configuration.
        shape: what a slot holds.
        namespace: the user's own part of the identity, which vLLM's names have no place for.

    Raises:
        ConfigError: vLLM's own tier would keep other bytes under this name; the message says why.
    """
    if namespace:
        raise ConfigError("layout 'vllm' of a tier: vLLM's names have no part for namespace; remove one")
    if problem := _difference(spec, engine, shape):
        raise ConfigError(f"layout 'vllm' of a tier: {problem}; {_REMEDY}")
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=spec,
        blocks_per_file=spec.config.cache.blocks_per_chunk,
        parallel_agnostic=True,
    )
    if mapper.rank:
        raise ConfigError(f"layout 'vllm' of a tier: vLLM names files of rank {mapper.rank}; {_REMEDY}")
    return Identity(spec.config.model.name, mapper.get_run_config(), mapper.base_path.rpartition("/")[2])


def _difference(spec: OffloadingSpec, engine: EngineContext, shape: SlotShape) -> str:
    """Say in words why the two do not keep the same bytes under the same name; "" where they do."""
    config = spec.config
    workers = config.parallel.world_size
    if workers > 1:
        return (
            f"vLLM can keep the chunks of {workers} workers in the directory of one worker's, and the bytes "
            "differ: engines of one worker alone can share a root with it"
        )
    if shape.is_canonical:
        return "that canonical_layout gives the bytes that vLLM's own tiering keeps was never shown"
    if config.cache.blocks_per_chunk > 1 and any(engine.is_windowed(g.group_id) for g in config.groups):
        return "vLLM keeps chunks of several blocks of a window or state even where some were never computed"
    if (theirs := _native_chunk_bytes(spec)) != shape.chunk_bytes:
        return f"vLLM's chunks have {theirs} bytes and kvtier's {shape.chunk_bytes}"
    algorithm = str(engine.vllm_config.cache_config.prefix_caching_hash_algo)
    if hash_seed(algorithm) is None:
        return (
            f"the block hashes ({algorithm}) are seeded at random in each process, so no file would be "
            "found again: set PYTHONHASHSEED alike on both sides, or use sha256"
        )
    return ""


def _native_chunk_bytes(spec: OffloadingSpec) -> int:
    """Return the length of a chunk of one worker in vLLM's own tiering."""
    return whole_pages(spec.config.worker_kv_bytes_per_block * spec.config.cache.blocks_per_chunk)
