"""Secondary tiers: the interface of a tier, and helpers for authors. Tiers are found through entry points.

The file tier is in ``kvtier.tiers.fs``.
"""

from kvtier._log import GuardedLogger, LogLimit
from kvtier._settings.quantities import Size
from kvtier._settings.validation import conceal
from kvtier.tiers._base import (
    Batch,
    Knowledge,
    Outcome,
    SecondaryTier,
    SlotMemory,
    Status,
    TierConfig,
    TierContext,
    Usage,
)
from kvtier.tiers._faults import require_answers, require_fault
from kvtier.tiers._seal import TRAILER_BYTES
from kvtier.tiers._waiting import in_thread, until_done, wait_for_end

__all__ = [
    "TRAILER_BYTES",
    "Batch",
    "GuardedLogger",
    "Knowledge",
    "LogLimit",
    "Outcome",
    "SecondaryTier",
    "Size",
    "SlotMemory",
    "Status",
    "TierConfig",
    "TierContext",
    "Usage",
    "conceal",
    "in_thread",
    "require_answers",
    "require_fault",
    "until_done",
    "wait_for_end",
]
