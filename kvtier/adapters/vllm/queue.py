"""Keeps requests that are loaded from being stranded in vLLM's queue.

vLLM looks at its waiting requests in their order, and stops at the first that the device has no blocks for.
One that was put off by a connector holds none and keeps its place. One behind it that was loaded meanwhile
holds its blocks, and is looked at only when the scan gets there: where the first waits for just these
blocks and nothing runs, none of the two ever goes on. (vLLM's issue 45388. So it is in 0.30; from 0.31 on
those that hold blocks are looked at first, and nothing is to be done.)

A connector cannot change the order, but what it puts off is passed over. So after a step in which the scan
has stopped while loads wait behind, everything that is asked in the next is put off: only what is loaded
already goes on. The first is tried again in the step after. New requests that are not asked for, being
shorter than a chunk, could go before it: where nothing more is loaded, such steps become ever rarer.
"""

from __future__ import annotations

from collections.abc import Collection

from kvtier.adapters.vllm.compat import STRANDS_LOADED
from kvtier.core.requests import Request


class Queue:
    """What is known of vLLM's queue, from what is asked in its order.

    Args:
        strands: whether this vLLM has to be helped.

    Attributes:
        last: the request that was asked last in this step, if any.
        passes: whether all that is asked in this step is put off, without a word to the core: for it the
            requests go on to wait as they do, with what is held for them and their deadlines.
    """

    def __init__(self, strands: bool = STRANDS_LOADED) -> None:
        self.last: Request | None = None
        self.passes = False
        self._strands = strands
        self._stops = 0  # of the scan, since a load began or ended
        # They hold blocks, and may not have run yet. Nobody says when one runs that was preempted before.
        self._loaded: set[Request] = set()

    def loads(self, request: Request) -> None:
        """Note that a request has got its blocks and is loaded."""
        self._loaded.add(request)
        self._stops = 0
        self.last = None  # it was the last that was asked, and has got what it needs

    def ends_load(self) -> None:
        """Note that a load has ended: its request could go on."""
        self._stops = 0

    def ends(self, request: Request) -> None:
        """Note the end of a request."""
        self._loaded.discard(request)

    def end_step(self, runs: Collection[Request]) -> None:
        """End a step.

        Args:
            runs: the requests that are computed for the first time.
        """
        self._loaded.difference_update(runs)
        last, self.last = self.last, None
        was_put_off = self.passes or last is None or last.wanted
        stopped = self._strands and bool(self._loaded) and not was_put_off and last not in runs
        self._stops += stopped
        self.passes = stopped and self._stops.bit_count() == 1  # at the first, second, fourth, eighth ...
