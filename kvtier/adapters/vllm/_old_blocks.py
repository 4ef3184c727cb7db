"""Tracks whether the device may hold KV from before the last reset. Needs no vLLM.

vLLM resets its connector, without a notice, even if its own reset fails because requests have blocks. Its
prefix cache then serves old blocks to later requests too, which compute more from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class OldBlocks:
    """Tracks the requests with blocks on the device, across resets.

    A reset that has preempted every request with blocks did not fail. vLLM names the preempted requests in
    the next step, so nothing is known until then. A request that was preempted earlier may have resumed: not
    every model runner of vLLM reports that.

    Attributes:
        are_there: whether the device's prefix cache may have old blocks, until the next reset.
    """

    def __init__(self) -> None:
        self.are_there = False
        self._holders: dict[str, bool] = {}  # requests that may have blocks, and whether they surely do
        self._at_reset: dict[str, bool] = {}  # the same at the last reset, until the next step
        self._unsure: set[str] = set()  # requests that may have had blocks at the last reset

    def note_blocks(self, req_id: str) -> None:
        """Note that a request loads, or was scheduled."""
        self._holders[req_id] = True

    def ended(self, req_id: str) -> None:
        self._holders.pop(req_id, None)
        self._unsure.discard(req_id)

    def reset(self, loading: Iterable[str]) -> None:
        """Note a reset, and the requests, perhaps ended, whose loads it cut off."""
        self.are_there = False
        self._unsure.clear()
        self._at_reset = {**self._holders, **dict.fromkeys(loading, True)}

    def step_ended(self, preempted: Collection[str]) -> int:
        """Note requests preempted by a step, or a reset before it; return how many others kept old blocks."""
        at_reset, self._at_reset = self._at_reset, {}
        kept = {req_id: is_sure for req_id, is_sure in at_reset.items() if req_id not in preempted}
        self._unsure.update(kept.keys() & self._holders)
        count = sum(kept.values())
        self.are_there = self.are_there or count > 0
        self._holders.update(dict.fromkeys(self._holders.keys() & preempted, False))
        return count

    def may_store(self, req_id: str) -> bool | None:
        """Return whether all KV of a request on the device is newer than the reset; None if not known."""
        if self._at_reset:
            return None
        return not self.are_there and req_id not in self._unsure
