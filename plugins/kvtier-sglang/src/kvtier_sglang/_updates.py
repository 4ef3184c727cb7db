"""Counts weight updates. SGLang does not notify its storage when a running engine replaces weights."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from kvtier.tiers import GuardedLogger, LogLimit

logger = GuardedLogger("kvtier.sglang")

UPDATES = (
    "begin_weight_update", "load_weights_from_distributed", "update_weights_from_disk",
    "update_weights_from_ipc", "update_weights_from_tensor",
)  # fmt: skip
"""The methods of SGLang's that replace weights of a model or a draft, wholly or in part."""

_log_limit = LogLimit(30.0)
_count = 0


def updates() -> int:
    """Return how often this process has replaced weights since the first call of ``watch``."""
    return _count


def watch() -> None:
    """Start to count the updates of this process. Further calls have no effect."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for name in UPDATES:
        update = getattr(WeightUpdater, name)
        if not hasattr(update, "__wrapped__"):
            setattr(WeightUpdater, name, _counted(update))


def _counted(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _count
        # With a filter, the update only moves experts and rereads their weights.
        if kwargs.get("weight_name_filter") is None:
            _count += 1  # Counted first, because a failed update has replaced some weights.
            added = _log_limit.allow("update", time.monotonic())
            if added is not None:
                logger.error(
                    "weights are replaced: nothing is loaded or stored until the storage is cleared (POST "
                    "/hicache/storage-backend/clear) or the engine restarts%s",
                    added,
                )
        return update(*args, **kwargs)

    return counted
