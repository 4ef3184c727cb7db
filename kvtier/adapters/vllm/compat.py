"""What differs between the supported versions of vLLM, 0.32 and 0.33, and what neither of them tells."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_offload.base import OffloadingManager

if TYPE_CHECKING:
    from types import FrameType

TELLS_OF_FLUSHES = hasattr(OffloadingManager, "on_reset_flushed")
"""Whether vLLM says when workers are through with the copies that a reset has cut off (0.33)."""


@dataclass(frozen=True)
class EngineContext:
    """The configuration of the engine that makes a spec, and of its KV cache."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig

    @property
    def nodes(self) -> int:
        """Machines that the workers of this engine are on."""
        return int(self.vllm_config.parallel_config.nnodes_within_dp)

    @property
    def steps_ahead(self) -> int:
        """Steps that are scheduled before the first of them has ended, itself included."""
        return int(self.vllm_config.max_concurrent_batches)

    def spec_of(self, group: int) -> KVCacheSpec:
        """Return how the blocks of one KV cache group are laid out."""
        return self.kv_cache_config.kv_cache_groups[group].kv_cache_spec

    def is_windowed(self, group: int) -> bool:
        """Say whether the group is looked up from the back (sliding window, state) or by prefix."""
        return not isinstance(self.spec_of(group), FullAttentionSpec)


def engine_context() -> EngineContext | None:
    """Find the configuration of the engine that is making the spec.

    The spec is given an extract that lacks the revision, the quantisation and the hash seed, and vLLM
    has a "current" configuration only in the workers. The connector that makes the spec got both
    configurations as arguments, so they are looked for among the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        vllm_config = frame.f_locals.get("vllm_config")
        kv_cache_config = frame.f_locals.get("kv_cache_config")
        if isinstance(vllm_config, VllmConfig) and isinstance(kv_cache_config, KVCacheConfig):
            return EngineContext(vllm_config, kv_cache_config)
        frame = frame.f_back
    return None


def hash_seed(algorithm: str) -> str | None:
    """Return what the block hashes are seeded with; None where every process draws its own.

    vLLM takes PYTHONHASHSEED where it is set, and else a fixed seed for cryptographic hashes and a
    random one for the others (``vllm.v1.core.kv_cache_utils``).
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if not algorithm.startswith("sha256"):
        return None
    from vllm.v1.core import kv_cache_utils

    return str(getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None))
