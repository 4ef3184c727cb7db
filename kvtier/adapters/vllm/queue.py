"""Keeps requests that are loaded from being stranded in vLLM's queue.

vLLM looks at its waiting requests in their order, and stops at the first that the device has no blocks for.
One that was put off by a connector holds none and keeps its place. One behind it that was loaded meanwhile
holds its blocks, and is looked at only when the scan gets there: where the first waits for just these
blocks and nothing runs, none of the two ever goes on. (vLLM's issue 45388; its pull request 57841 is open.)

A connector cannot change the order, but what it puts off is passed over. So after a step in which the scan
has stopped while loads wait behind, everything that is asked in the next is put off: only what is loaded
already goes on. New requests gain nothing by it, and the first is tried again in the step after.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from vllm.v1.kv_offload.base import LookupResult

from kvtier.core.requests import Request

_PUT_OFF: Final = (LookupResult.RETRY, LookupResult.HIT_PENDING)


class Queue:
    """What is known of vLLM's queue, from what is asked in its order.

    Attributes:
        last: the request that was asked last in this step, if any.
        passes: whether all that is asked in this step is put off.
    """

    def __init__(self) -> None:
        self.last: Request | None = None
        self.passes = False
        self._passed: Request | None = None
        self._loaded: set[Request] = set()  # they hold blocks, and may not have run yet

    def loads(self, request: Request) -> None:
        """Note that a request has got its blocks and is loaded."""
        self._loaded.add(request)
        self.last = None  # it was the last that was asked, and has got what it needs

    def ends(self, request: Request) -> None:
        """Note the end of a request."""
        self._loaded.discard(request)

    def end_step(self, runs: Collection[Request]) -> None:
        """End a step.

        Args:
            runs: the requests that are computed for the first time.
        """
        self._loaded.difference_update(runs)
        last, self.last, self._passed = self.last, None, None
        was_put_off = self.passes or last is None or last.wanted
        self.passes = bool(self._loaded) and not was_put_off and last not in runs

    def has_passed(self, request: Request) -> bool:
        """Say whether a request was put off in this step, so that nothing depends on its further keys."""
        return request is self._passed

    def put_off(self, request: Request, answer: LookupResult) -> LookupResult:
        """Return what to answer instead, in a step that passes over what is asked."""
        if request.wanted or answer in _PUT_OFF:
            return answer  # the core has put it off itself
        self._passed = request
        return LookupResult.RETRY
