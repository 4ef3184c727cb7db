"""Differences between the supported versions of vLLM, 0.31 to 0.33, and facts that no version exposes."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import vllm

from kvtier._log import GuardedLogger, LogLimit
from kvtier.adapters.vllm._excluded_settings import SAME_MODELS
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

logger = GuardedLogger("kvtier.vllm")

OLDEST, NEWEST = (0, 31), (0, 33)
"""The range that kvtier is tested with."""

KV_FORMATS: Final = {"0.31.0": 1, "0.32.0": 1, "0.33.0": 1}
"""The KV format generation of each release whose chunks are proven readable within its generation.

A release gets a number when ``tests/integration/test_generations.py`` passes with it: it exchanges chunks
with the others for the same tokens, and no default of a relevant setting has changed. Otherwise it starts a
generation. Patch releases count too: vLLM fixes wrong numbers in those. So do the models: a generation holds
for those whose code was compared (``tests/integration/test_model_review.py``).
"""


def kv_format(architectures: Iterable[str], version: str = vllm.__version__) -> str:
    """Return the KV format generation of a version for models; its own if it or a model is not reviewed."""
    release = version.partition("+")[0]
    if release not in KV_FORMATS:
        return f"vllm {version}"
    return str(KV_FORMATS[release]) if SAME_MODELS.issuperset(architectures) else f"vllm {release}"


def is_reviewed(version: str = vllm.__version__) -> bool:
    """Return whether this version's settings were reviewed."""
    return version.partition("+")[0] in KV_FORMATS


def release(version: str) -> tuple[int, int] | None:
    """Return the major and minor number of vLLM's version; None for a build from sources without one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return None
    number = int(found[1]), int(found[2])
    # A build without git tags is named 0.1.dev5+g1a2b3c.
    return None if "dev" in version and number <= (0, 1) else number


def refuse_too_old(version: str) -> None:
    """Raise ConfigError for a vLLM that is older than the oldest supported version."""
    number = release(version)
    if number is not None and number < OLDEST:
        raise ConfigError(f"kvtier needs {_RANGE}, and this is vLLM {version}: install a newer vLLM")


def warn_if_untested(version: str = vllm.__version__) -> None:
    """Log a warning if this vLLM is newer than the tested versions, or of unknown age."""
    number = release(version)
    if number is None or number > NEWEST:
        logger.warning(
            "kvtier has not been tested with vLLM %s, only with %s: install a tested version", version, _RANGE
        )


_RANGE = f"vLLM {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"

# An older vLLM lacks modules imported below; their ImportError would not name the cause.
refuse_too_old(vllm.__version__)

from vllm.config import KVTransferConfig, VllmConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config as connector_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as connector_scheduler  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import PlaceholderRange  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    iter_layer_specs,
)
from vllm.v1.kv_offload.base import OffloadingManager, OffloadKey, ReqContext  # noqa: E402
from vllm.v1.kv_offload.config import OffloadingGroupConfig  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource
except ModuleNotFoundError:

    class CacheHitSource(Enum):  # type: ignore[no-redef]
        """vLLM's names for the sources of cache hits, which it has from 0.32 on."""

        HOST = "host"
        DISK = "disk"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


class _FewRefusals(logging.Filter):
    """Limits a line that vLLM writes in each step for each request whose chunks find no room."""

    _limit = LogLimit(60.0)

    def filter(self, record: logging.LogRecord) -> bool:
        if "cannot store chunks" not in str(record.msg):
            return True
        if (suffix := self._limit.allow("", time.monotonic())) is None:
            return False
        record.msg = f"{record.msg}{suffix}"
        return True


_few_refusals = _FewRefusals()


def limit_refusals() -> None:
    """Let vLLM log only once a minute that chunks find no room; kvtier counts them all."""
    connector_scheduler.logger.addFilter(_few_refusals)


REPORTS_RESET_FLUSH = hasattr(OffloadingManager, "on_reset_flushed")
"""Whether vLLM reports that workers have ended the copies that a reset cut off (0.33)."""

SCHEDULE_ENDS_LAST = REPORTS_RESET_FLUSH
"""Whether a step's ``on_schedule_end`` comes after its ``prepare_store`` (0.33), not before."""

TRACKS_BLOCKS = REPORTS_RESET_FLUSH
"""Whether vLLM replaces the block tables of sessions, and notes the blocks of other connectors (0.33)."""

CAPS_HITS_BY_EXPERTS = REPORTS_RESET_FLUSH
"""Whether vLLM loads no more of a prompt than it has the routed experts of, if it returns them (0.33)."""


CHANGES_WEIGHTS: Final = re.compile(
    r"(apply|load)_model$|(?!(compute_weight_checksums|(init|shutdown)_weight_transfer_engine"
    r"|supports_draft_weight_updates|update_weights)$).*weight|(?!\w+$)",
    re.I,
)
"""Names of functions that can give workers new weights. ``update_weights`` comes between two that count.

So can functions without a name: lambdas, partial functions and pickled ones.
"""

_CROP_LONE_IMAGES: Final = frozenset(() if TRACKS_BLOCKS else ("DeepseekVLV2ForCausalLM", "H2OVLChatModel"))
"""Models that crop an image only if its request has few others. From 0.33 on, its hash says so."""


def places_of(context: ReqContext) -> Mapping[OffloadKey, int]:
    """Return the end of each chunk of a prompt, in tokens. vLLM extends it while the request runs."""
    return getattr(context, "_offload_key_positions", {})  # vLLM's own: a version may lack it


def _images(request: Request) -> list[PlaceholderRange]:
    """Return the places of a request's images and videos."""
    return [feature.mm_position for feature in request.mm_features if feature.modality != "audio"]


@dataclass
class Splits:
    """What ``EngineContext.note_step`` has seen of images whose tokens attend to each other."""

    has_any: bool = False  # a step has computed a part of one: the prefix cache may have its blocks
    behind_hits: set[str] = field(default_factory=set)  # requests that had a hit behind an image's front


@dataclass(frozen=True)
class EngineContext:
    """The configuration of the engine that makes a spec, and of its KV cache; the connector made with it."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    connector: KVConnectorBase_V1 | None = None
    sees_blocks: bool = False  # KVTierConnector: its connector sees blocks that others get
    adapters: dict[int | str, str] = field(default_factory=dict, compare=False)  # see ``note_adapter``
    doubtful_adapters: set[tuple[int | str, str]] = field(default_factory=set, compare=False)
    splits: Splits = field(default_factory=Splits, compare=False)

    @property
    def nodes(self) -> int:
        """Number of machines with workers of this engine."""
        return int(self.vllm_config.parallel_config.nnodes_within_dp)

    @property
    def schedules_alone(self) -> bool:
        """Whether this engine has workers of other processes, and each has a scheduler (torchrun)."""
        parallel = self.vllm_config.parallel_config
        return parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1

    @property
    def returns_experts(self) -> bool:
        """Whether responses have the experts of each token of a prompt, also of tokens that were loaded."""
        outputs = getattr(self.vllm_config, "aux_output_config", None)
        return outputs is not None and outputs.enabled

    @property
    def steps_ahead(self) -> int:
        """Steps scheduled before the first of them has ended, itself included."""
        return int(self.vllm_config.max_concurrent_batches)

    @property
    def flushes_late(self) -> bool:
        """Whether reassigned blocks may be written before the stores that still read them have to end.

        vLLM's second model runner does so if it zeroes new blocks or copies shared ones (0.31 to 0.33).
        """
        cache = self.kv_cache_config
        lengths = {group.kv_cache_spec.block_size for group in cache.kv_cache_groups}
        sparse = getattr(self.vllm_config.attention_config, "hisparse_config", None)
        writes = cache.needs_kv_cache_zeroing or len(lengths) > 1 or sparse is not None
        return bool(writes and self.vllm_config.use_v2_model_runner)

    def has_blocks(self) -> bool:
        """Return whether requests or the prefix cache have blocks on the device, or might: closed if unknown.

        Called in the scheduler's thread. vLLM's own reset fails if requests, also ended ones, have blocks.
        """
        cache = None if self.connector is None else self.connector._kv_cache_manager
        if cache is None:
            return True
        pools = {manager.block_pool for manager in cache.coordinator.single_type_managers}
        in_use = (pool.num_gpu_blocks - pool.get_num_free_blocks() for pool in pools)
        null_block = 1  # each pool has one, always in use
        return max(in_use) > null_block or any(len(pool.cached_block_hash_to_block) for pool in pools)

    def forget_withdrawn_blocks(self) -> None:
        """Let vLLM's prefix cache forget blocks that a preempted request has not computed.

        With priority scheduling, vLLM can preempt a request that it has scheduled in the same step (0.31 to
        0.33). The blocks for that step are in its prefix cache by then: later requests would get them, and
        have them stored. Call this before vLLM binds its KV cache to the connector.
        """
        connector = self.connector
        if connector is None or self.vllm_config.scheduler_config.policy != "priority":
            return

        def guard(_: object) -> None:
            cache: Any = connector._kv_cache_manager
            for name in ("free", "pop_blocks_for_free"):
                setattr(cache, name, partial(_forget_and_free, cache, getattr(cache, name)))

        connector.bind_gpu_block_pool = guard

    def watch_adapters(self) -> None:
        """Note which LoRA adapters requests have, and which vLLM loads: it tells its executor alone.

        Call this while the engine, which has made its executor, makes its scheduler.
        """
        connector: Any = self.connector
        if connector is None or self.vllm_config.lora_config is None:
            return
        if (core := _engine_core()) is not None:
            executor = core.model_executor
            executor.add_lora = partial(self._note_and_add, executor.add_lora)
        connector.on_new_request = partial(self._note_and_begin, connector.on_new_request)

    def _note_and_add(self, add: Callable[[LoRARequest], bool], lora: LoRARequest) -> bool:
        self.note_adapter(lora)
        return add(lora)

    def _note_and_begin(self, begin: Callable[[Request], None], request: Request) -> None:
        self.note_adapter(request.lora_request)
        begin(request)

    def note_adapter(self, lora: LoRARequest | None) -> None:
        """Note the path of an adapter for its id and its name; "" if it is not the only one.

        An adapter that is loaded in place takes its id over if no request has the earlier one. Otherwise the
        prefix cache may get blocks of both under either path, and a request can bring the earlier one back.
        """
        if lora is None:
            return
        for key in (lora.lora_int_id, lora.lora_name):
            known = self.adapters.setdefault(key, lora.lora_path)
            if known == lora.lora_path:
                continue
            in_use = {it.lora_path for it in self._adapters_in_use() if key in (it.lora_int_id, it.lora_name)}
            takes_over = lora.load_inplace and key == lora.lora_int_id and in_use <= {lora.lora_path}
            self.adapters[key] = lora.lora_path if takes_over else ""
            if not takes_over:
                self.doubtful_adapters.update((key, path) for path in {known, lora.lora_path} | in_use)

    def _adapters_in_use(self) -> Iterator[LoRARequest]:
        for state in self._states().values():
            if state.req.lora_request is not None and not state.req.is_finished():
                yield state.req.lora_request

    def why_not_stored(self, req_id: str) -> str | None:
        """Return why a request's keys may not name the KV of its blocks; None if they do.

        The answer is a word of ``reasons.STORE_REFUSED``. vLLM's block hashes name only the first of media
        that share tokens, and images that a model sizes by the rest of the request as if it did not. With
        pruned videos, M-RoPE positions behind a video differ after a hit on it. vLLM takes the prompt of a
        request as computed if it ends it with an error; it counts the tokens of an aborted one (0.31 to
        0.33).
        """
        request = self._request(req_id)
        if request is None:
            return None
        if request.lora_request is not None and not self._has_own_adapter(request, request.lora_request):
            return "adapter"
        places = [feature.mm_position for feature in request.mm_features]
        share_tokens = any(one.offset + one.length > other.offset for one, other in pairwise(places))
        kinds = {feature.modality for feature in request.mm_features}
        if share_tokens or ("image" in kinds and self._sizes_images_together()):
            return "media"
        if self._may_have_splits(request):
            return "split"
        if "video" in kinds and self._prunes_videos():
            return "pruned"
        offered = max(request.num_prompt_tokens, request.num_tokens - 1)
        return "ended_early" if request.is_finished() and request.num_computed_tokens < offered else None

    def _request(self, req_id: str) -> Request | None:
        state = self._states().get(req_id)
        return None if state is None else state.req

    def _states(self) -> Mapping[str, Any]:
        """Return vLLM's records of the requests that its connector knows."""
        scheduler = getattr(self.connector, "connector_scheduler", None)
        return {} if scheduler is None else scheduler._req_status

    def note_step(self, output: SchedulerOutput) -> None:
        """Note whether a step computes a part of an image whose tokens attend to each other.

        vLLM computes such an image in one step, except behind a hit amid it: then the first part misses
        attention to the rest (0.31 to 0.33). Call this before the step's stores.
        """
        if not self.vllm_config.model_config.is_mm_prefix_lm:
            return
        known = {req_id for req_id in self.splits.behind_hits if self._request(req_id)}
        new = [new.req_id for new in output.scheduled_new_reqs]
        had_hits = {req_id for req_id in new if self._begins_behind_image(req_id)}
        self.splits.behind_hits = known | had_hits
        scheduled = output.num_scheduled_tokens.items()
        self.splits.has_any |= any(self._ends_amid_image(req_id, tokens) for req_id, tokens in scheduled)

    def _begins_behind_image(self, req_id: str) -> bool:
        request = self._request(req_id)
        return request is not None and any(
            place.offset < request.num_computed_tokens for place in _images(request)
        )

    def _ends_amid_image(self, req_id: str, tokens: int) -> bool:
        request = self._request(req_id)
        return request is not None and any(
            place.offset < request.num_computed_tokens + tokens < place.offset + place.length
            for place in _images(request)
        )

    def _may_have_splits(self, request: Request) -> bool:
        """Return whether blocks of a request may have a part of an image, computed without the rest."""
        if not self.vllm_config.model_config.is_mm_prefix_lm or not _images(request):
            return False
        if not self.sees_blocks or not self.vllm_config.scheduler_config.disable_chunked_mm_input:
            return True
        had_hits = request.request_id in self.splits.behind_hits or request.num_preemptions > 0
        return self.splits.has_any and had_hits

    def _has_own_adapter(self, request: Request, lora: LoRARequest) -> bool:
        """Return whether workers compute a request with the adapter that its keys name.

        They know it by its id, and the embeddings of media that they compute with it by its name.
        """
        keys: list[int | str] = [lora.lora_int_id]
        if request.mm_features and self.vllm_config.lora_config.enable_tower_connector_lora:
            keys.append(lora.lora_name)
        path = lora.lora_path
        is_own = all(self.adapters.get(key, path) == path for key in keys)
        return is_own and self.doubtful_adapters.isdisjoint((key, path) for key in keys)

    def _sizes_images_together(self) -> bool:
        """Return whether an image's embeddings depend on the rest of its request, unlike its hash.

        Nemotron's dynamic resolution fits all images, and the text, into ``max_model_len``.
        """
        model = self.vllm_config.model_config
        args = getattr(getattr(model.hf_config, "vision_config", None), "args", None)
        is_dynamic = isinstance(args, Container) and "min_num_patches" in args
        return is_dynamic or not _CROP_LONE_IMAGES.isdisjoint(model.architectures)

    def _prunes_videos(self) -> bool:
        """Return whether positions behind a video are right only in the step that computes the video."""
        model = self.vllm_config.model_config
        media = model.multimodal_config
        return media is not None and media.is_multimodal_pruning_enabled() and model.uses_mrope

    def prevents_reuse(self) -> str | None:
        """Return why a prefix's KV may not be reused, if so. vLLM turns off its prefix cache then.

        It does so for other reasons, too, which do not matter here; and its connectors load nevertheless.
        """
        model = self.vllm_config.model_config
        if model.pooler_config is not None and not model.is_prefix_caching_supported:
            return "the model's pooling needs all tokens of a prompt"
        groups = self.kv_cache_config.kv_cache_groups
        specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
        if any(isinstance(spec, RSWASpec) or getattr(spec, "non_causal", False) for spec in specs):
            return "the KV of the model's tokens does not depend on the tokens before them alone"
        return None

    def spec_of(self, group: int) -> KVCacheSpec:
        """Return the layout of the blocks of one KV cache group."""
        return self.kv_cache_config.kv_cache_groups[group].kv_cache_spec

    def with_chunks(self, group: OffloadingGroupConfig, blocks: int) -> OffloadingGroupConfig:
        """Return a group with ``blocks`` blocks in a chunk: vLLM 0.33 has its window in chunks."""
        if not hasattr(group, "sliding_window_size_in_chunks"):
            return group
        spec = next(iter(iter_layer_specs(self.spec_of(group.group_id))))
        window = connector_config.get_sliding_window_size_in_chunks(spec, group.tokens_per_block * blocks)
        return replace(group, sliding_window_size_in_chunks=window)

    def is_windowed(self, group: int) -> bool:
        """Return whether the group is looked up from the back (sliding window, state) or by prefix."""
        return not isinstance(self.spec_of(group), FullAttentionSpec)

    def keeps_states(self, group: int) -> bool:
        """Return whether the group holds states, each at the end of a prefix: loads read no other block."""
        spec = self.spec_of(group)
        return isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"

    def window_tokens(self, group: int) -> int:
        """Return how many tokens at the end of a prefix a windowed group needs; 1 for a state."""
        spec = self.spec_of(group)
        return getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 1


def watch_weights(changes: Callable[[], None]) -> None:
    """Call ``changes`` whenever workers are about to get new weights: vLLM tells its workers alone.

    Call this while the engine makes its scheduler.
    """
    if (core := _engine_core()) is None:
        return
    call = core.collective_rpc

    @wraps(call)  # vLLM converts arguments by the signature
    def collective_rpc(method: object, *args: Any, **kwargs: Any) -> Any:
        if CHANGES_WEIGHTS.match(str(getattr(method, "__name__", method))):
            changes()
        return call(method, *args, **kwargs)

    core.collective_rpc = collective_rpc


def _forget_and_free(cache: Any, free: Callable[[Request], Any], request: Request) -> Any:
    """Free the blocks of a request. If it still runs, it is being preempted."""
    if request.status is RequestStatus.RUNNING:
        tables = zip(
            cache.coordinator.single_type_managers, cache.get_blocks(request.request_id).blocks, strict=True
        )
        cache.evict_blocks(
            {
                block.block_id
                for manager, blocks in tables
                for block in blocks[request.num_computed_tokens // manager.block_size :]
            }
        )
    return free(request)


_provided: ContextVar[EngineContext | None] = ContextVar("kvtier_engine", default=None)


@contextmanager
def providing_engine(engine: EngineContext) -> Iterator[None]:
    """Make ``engine_context`` return this engine within the block: for a connector that makes a spec."""
    token = _provided.set(engine)
    try:
        yield
    finally:
        _provided.reset(token)


def engine_context() -> EngineContext:
    """Return the configuration of the engine that is making the spec; raise ConfigError if vLLM hides it.

    vLLM hands a spec an extract that lacks the model's configuration. ``KVTierConnector`` passes all of it
    through ``providing_engine``. vLLM's own connector passes it to no spec: the constructor has one argument,
    and the "current" configuration exists only in workers, without the KV cache. That connector got both as
    arguments, so kvtier looks for them among the callers. Only this module reads frames.
    """
    if (engine := _provided.get()) is not None:
        return engine
    for maker, vllm_config, kv_cache_config in _callers():
        if isinstance(vllm_config, VllmConfig) and isinstance(kv_cache_config, KVCacheConfig):
            connector = maker if isinstance(maker, KVConnectorBase_V1) else None
            return EngineContext(vllm_config, kv_cache_config, connector)
    raise ConfigError(
        f"vLLM {vllm.__version__} hides the engine's configuration from kvtier, so caches could not be told "
        "apart: use KVTierConnector (kv_connector), which receives it"
    )


def outer_connector() -> KVTransferConfig | None:
    """Return the configuration of the ``MultiConnector`` that is making this connector, if one is."""
    for maker, config, _ in _callers():
        if isinstance(maker, KVConnectorBase_V1) and not isinstance(maker, OffloadingConnector):
            return config.kv_transfer_config if isinstance(config, VllmConfig) else KVTransferConfig()
    return None


def is_for_snapshot() -> bool:
    """Return whether ``vllm snapshot create`` runs this engine: its processes have the server's arguments."""
    return Path("".join(sys.argv[:1])).parts[-3:] == ("vllm", "snapshot", "server.py")


def _engine_core() -> Any:
    """Return vLLM's engine core if it is making this connector, else None."""
    return next((it for it, _, _ in _callers() if hasattr(it, "model_executor")), None)


def _callers() -> Iterator[tuple[Any, ...]]:
    """Yield ``self``, ``vllm_config`` and ``kv_cache_config`` of each caller, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield tuple(map(frame.f_locals.get, ("self", "vllm_config", "kv_cache_config")))
        frame = frame.f_back


def hash_seed(algorithm: str) -> str | None:
    """Return the seed of the block hashes; None if every process draws its own.

    vLLM takes PYTHONHASHSEED if it is set. Otherwise cryptographic hashes have a fixed seed and the others a
    random one (``vllm.v1.core.kv_cache_utils``).
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if not algorithm.startswith("sha256"):
        return None
    from vllm.v1.core import kv_cache_utils

    return str(getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None))
