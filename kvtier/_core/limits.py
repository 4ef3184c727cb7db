"""The bounds that the core keeps."""

from __future__ import annotations

from msgspec import Struct

from kvtier._core.tiers.load_gate import LoadGateMode


class Limits(Struct, frozen=True):
    """The bounds that the core keeps. Fractions are of the primary tier's slots."""

    request_deadline_s: float = 5.0  # how long a request waits for pending answers
    max_wait_s: float = 30.0  # how long it may wait for chunks that no tier has yet
    promotion_budget: float = 0.25  # slots for promoted chunks that no request has loaded yet
    promotion_reserve: float = 1 / 32  # slots kept free, so that a get can copy chunks with its first answer
    # Slots that puts may pin. Each tier has an equal share, and may use the rest that other tiers leave: a
    # slow tier starves neither them nor the stores.
    put_backlog: float = 0.5
    pin_budget: float = 0.25  # slots that may be kept for clients on request
    store_threshold: int = 0  # how often a chunk must be offered before it is stored; below 2, at once
    max_tracker_size: int = 64_000  # keys whose offers are remembered for the threshold
    max_announced: int = 250_000  # keys of each tier that may be announced as available, if events are on
    load_gate: LoadGateMode = "off"  # when to compute a chunk although a tier has it; see ``LoadGate``
