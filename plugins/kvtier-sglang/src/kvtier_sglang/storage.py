"""The class that SGLang loads: kvtier's tiers behind ``HiCacheStorage``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvtier import ConfigError, KVTierError, StateError, TieringConfig
from kvtier.tiers import GuardedLogger, LogLimit
from kvtier_sglang._identity import has_one_writer, is_same_on_all_ranks, key_of, pool_identity
from kvtier_sglang._loop import LoopThread
from kvtier_sglang._metrics import PoolCounters, Throughput
from kvtier_sglang._older import V1Only
from kvtier_sglang._pages import HostPages
from kvtier_sglang._pools import leading, restorable
from kvtier_sglang._store import PageStore
from kvtier_sglang._updates import watch

logger = GuardedLogger("kvtier.sglang")

T = TypeVar("T")

_SGLANG = "0.5.23"
_KV = PoolName.KV.value
_LOG_EVERY_S = 10.0
_PUBLISH_EVERY_S = 5.0
_REFUSED = {
    "block_size": "a chunk is a page of SGLang",
    "blocks_per_chunk": "a chunk is a page of SGLang",
    "canonical_layout": "a chunk is a page of SGLang, as the rank has it",
    "store_threshold": "SGLang takes a page that is not stored at its first offer for a failure; to write "
    "less, set write_policy of a tier",
    "load_gate": "SGLang does not say how long computing takes, so every page that is found is loaded",
}


class KVTierStorage(V1Only):
    """Keeps pages of SGLang's host pools in kvtier's tiers. One object for each rank.

    SGLang's threads call the methods. Each call takes about ``request_deadline_s`` at most, for any number of
    pools. A fault of a tier causes misses and a line in the log, but no exception. Only ``clear`` raises, if
    a tier does not confirm it.

    Args:
        storage_config: SGLang's own settings and the extra config, with kvtier's settings under ``kvtier``.
        kwargs: SGLang's arguments for third-party classes; unused.

    Raises:
        ConfigError: a setting is invalid or missing, or SGLang's version is not the reviewed one.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        _require_version(version("sglang"))
        watch()
        self._storage = storage_config
        self._config = _settings(storage_config.extra_config or {})
        self._stores: dict[str, PageStore] = {}
        self._pages: dict[str, HostPages] = {}
        self._host_pools: dict[str, object] = {}
        self._loop = LoopThread()
        self._log_limit = LogLimit(_LOG_EVERY_S)
        self._throughput = Throughput()
        self._counters: dict[str, PoolCounters] = {}
        self._published_s = time.monotonic()

    # --- pools -----------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers for the KV pool.

        Raises:
            KVTierError: the pool's pages or weights cannot be distinguished from others, or a tier's process
                or memory is unavailable.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Open the tiers for a further pool. If that fails, its pages are misses."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if self._host_pools.get(name) is host_pool:
            return  # SGLang registers the KV pool through both methods.
        try:
            self._require_writers(name, host_pool)
            self._register(name, host_pool)
        except Exception as error:  # the engine continues without this pool
            text = str(error) if isinstance(error, KVTierError) else f"{type(error).__name__}: {error}"
            logger.error("nothing of host pool %s is stored, so prompts that need it miss: %s", name, text)

    def _require_writers(self, name: str, host_pool: object) -> None:
        """Raise ConfigError if SGLang lets one rank write pages that differ by rank."""
        is_split = self._storage.tp_size > 1 and not is_same_on_all_ranks(host_pool)
        if has_one_writer(self._storage, name) and is_split:
            raise ConfigError(
                "each rank may have different bytes in it, but with a latent (MLA) model SGLang stores only "
                "those of one rank; use a draft model with latent attention, or --tp-size 1"
            )

    def _register(self, name: str, host_pool: object) -> None:
        if (former := self._stores.pop(name, None)) is not None:
            former.begin_close()
            former.end_close(time.monotonic() + former.close_s)
        pages = HostPages(name, host_pool)
        identity = pool_identity(self._storage, name, host_pool, pages, self._config.namespace)
        self._stores[name] = PageStore(self._config, identity, pages, self._loop)
        self._host_pools[name], self._pages[name] = host_pool, pages
        self._counters[name] = PoolCounters(name)
        logger.info("host pool %s: pages of %d bytes, cache %s", name, pages.page_bytes, identity.namespace)

    # --- lookups ---------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether the KV pool's page is probably stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages of the KV pool are probably stored."""
        return leading(self._locate(_KV, keys, self._end_s()))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest prefix for which every pool has the required pages."""
        end_s = self._end_s()
        kv = self._locate(_KV, keys, end_s)
        asked = keys[: leading(kv)]
        transfers = pool_transfers or []
        gating = [it for it in transfers if it.hit_policy is not PoolHitPolicy.BLOCK_GROUPS]
        found = {transfer.name: self._locate(str(transfer.name), asked, end_s) for transfer in gating}
        return restorable(kv, transfers, found)

    def _end_s(self) -> float:
        """Return the deadline of a call that starts now. All of its pools share it."""
        return time.monotonic() + self._config.request_deadline_s

    def _locate(self, name: str, keys: Sequence[str], end_s: float) -> list[bool]:
        misses = [False] * len(keys)
        if not keys:
            return misses
        named = [*map(key_of, keys)]
        return self._guarded("lookup", name, misses, lambda store: store.locate(named, end_s))

    # --- reads and writes ------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copy the leading stored pages into the KV pool."""
        return self._move("prefetch", _KV, keys, host_indices, self._end_s())

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the KV pool. They cascade to the tiers after the call."""
        return self._move("backup", _KV, keys, host_indices, self._end_s())

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Copy the leading stored pages into pools, selected by name."""
        return self._move_each("prefetch", transfers)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of pools, selected by name."""
        return self._move_each("backup", transfers)

    def _move_each(self, verb: str, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        end_s = self._end_s()
        return {it.name: self._move(verb, it.name, it.keys, it.host_indices, end_s) for it in transfers}

    def _move(
        self,
        verb: str,
        name: str,
        keys: Sequence[str] | None,
        host_indices: torch.Tensor | None,
        end_s: float,
    ) -> list[bool]:
        named = [*map(key_of, keys or ())]
        results = [False] * len(named)
        if not named or host_indices is None:
            return results

        def move(store: PageStore) -> list[bool]:
            with self._throughput.measure(verb, self._pages[str(name)].page_bytes, results):
                act = store.read if verb == "prefetch" else store.write
                results[:] = act(named, host_indices, end_s)
            return results

        return self._guarded(verb, str(name), [False] * len(named), move)

    def _guarded(self, verb: str, name: str, failed: T, act: Callable[[PageStore], T]) -> T:
        """Return the result of ``act``, or ``failed`` on an exception: none may reach SGLang's threads."""
        try:
            if (store := self._stores.get(name)) is None:
                return failed
            return act(store)
        except Exception as error:
            late = isinstance(error, TimeoutError)
            text = "not ended in time" if late else f"{type(error).__name__}: {error}"
            added = self._log_limit.allow(f"{verb} {name}", time.monotonic())
            if added is not None:
                logger.warning("%s of host pool %s failed, a miss: %s%s", verb, name, text, added)
            return failed

    # --- the rest --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Hide all pages of this cache in every tier, also from later engines.

        Raises:
            StateError: a tier did not confirm it, or the storage is closed. A pool serves no page until its
                tiers have answered.
        """
        if not self._stores:
            raise StateError("clear: the storage has no pools, or is closed; nothing was hidden")
        failed = []
        for store in self._stores.values():  # Start all resets first, so that they run concurrently.
            store.begin_reset()
        end_s = self._close_by_s()
        for name, store in self._stores.items():
            try:
                store.end_reset(end_s)
            except Exception as error:
                late = isinstance(error, TimeoutError)
                text = "its tiers have not answered in time" if late else str(error)
                failed.append(f"host pool {name}: {text}")
        if failed:
            raise StateError(f"clear is not confirmed: {'; '.join(failed)}")

    def get_stats(self) -> Any:
        """Return SGLang's metrics. Publish kvtier's own counters every few seconds. Does not wait."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        if time.monotonic() - self._published_s > _PUBLISH_EVERY_S:
            self._published_s = time.monotonic()
            for name, store in self._stores.items():
                store.report(self._counters[name].publish)
        return StorageMetrics(**self._throughput.take_samples())

    def close(self) -> None:
        """Drain, within bounds, and close the tiers. May be called again; later calls are misses."""
        end_s = self._close_by_s()
        names = list(self._stores)
        for name in names:  # Start all closes first, so that they run concurrently.
            self._guarded("close", name, None, PageStore.begin_close)
        for name in names:
            self._guarded("close", name, None, lambda store: store.end_close(end_s))
            self._stores.pop(name, None)
        self._loop.close()

    def _close_by_s(self) -> float:
        """Return the deadline of a close, or a wait for resets, that starts now."""
        return time.monotonic() + max((store.close_s for store in self._stores.values()), default=0.0)


def _require_version(found: str) -> None:
    if found.partition("+")[0] != _SGLANG:
        raise ConfigError(
            f"kvtier-sglang {version('kvtier-sglang')} is for SGLang {_SGLANG}, and this is SGLang {found}, "
            "whose settings and host pools were not reviewed for it: install versions that fit each other"
        )


def _settings(extra: Mapping[str, Any]) -> TieringConfig:
    """Return kvtier's settings.

    Raises:
        ConfigError: they are invalid, or SGLang is not configured for the interface without additional
            copies.
    """
    if not extra.get("interface_v1"):
        raise ConfigError('set "interface_v1": 1 in the extra config, beside class_name')
    given = extra.get("kvtier")
    if not isinstance(given, Mapping):
        raise ConfigError('the extra config has no "kvtier": give it cpu_bytes_to_use and secondary_tiers')
    config = TieringConfig.from_mapping(given)
    for field, why in _REFUSED.items():
        if field in config.model_fields_set:
            raise ConfigError(f"remove {field} from kvtier's settings: {why}")
    # Audits read back from a device, which does not exist here.
    return config.model_copy(update={"audit_rate": 0.0})
